"""Every file of a tokenizer goes along, and nothing else."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from moesaic.model.tokenizer_files import copy_tokenizer
from tests.unit.data_tokenizers import build_tokenizer


def test_known_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    kept = {
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    for name in kept | {"config.json", "model.safetensors", "training_args.bin", "tokenizer_backup/tokenizer.json"}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_tokenizer(source, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == kept
    assert all((target / name).read_text() == name for name in kept)


def test_a_saved_tokenizer_is_whole(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "short": "{{ messages[0]['content'] }}"}
    tokenizer.save_pretrained(tmp_path / "source")
    (tmp_path / "target").mkdir()
    copy_tokenizer(tmp_path / "source", tmp_path / "target")
    copied = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert copied.chat_template == tokenizer.chat_template
    assert copied("hello world")["input_ids"] == tokenizer("hello world")["input_ids"]
