"""Models that would read other tokens than the actor wrote are refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from moesaic.config import Recipe
from moesaic.rl.vocabulary import require_same_tokens
from tests.unit.data_tokenizers import build_tokenizer
from tests.unit.tiny_checkpoints import tiny_config

SIZE = 320


def save_config(folder: Path, vocab_size: int = SIZE) -> Path:
    tiny_config("qwen3_moe", vocab_size=vocab_size).save_pretrained(folder)
    return folder


def save_swapped(folder: Path) -> None:
    """The tokenizer with two of its tokens the other way round."""
    build_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(data))


def check(actor: Path, **fields: Any) -> None:
    recipe = Recipe.model_validate({"stage": "rl", "model": str(actor), "train_dataset": "d", **fields})
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    require_same_tokens(recipe, tokenizer)


def teacher(folder: Path, mode: str = "policy_gradient", **fields: Any) -> dict[str, Any]:
    return {"teacher": {"model": str(folder)}, "distillation_config": {"mode": mode, **fields}}


def test_what_reads_the_same_tokens_is_let_through(tmp_path: Path) -> None:
    actor, other = save_config(tmp_path / "actor"), save_config(tmp_path / "other")
    check(actor, **teacher(other, "forward_kl_topk"))
    build_tokenizer().save_pretrained(other)
    check(actor, **teacher(other, "forward_kl_topk"))
    check(actor, **teacher(save_config(tmp_path / "padded", SIZE + 64)))
    save_swapped(tmp_path / "unused")
    check(actor, teacher={"model": str(save_config(tmp_path / "unused"))})  # no mode: there is no teacher


def test_what_reads_others_is_refused(tmp_path: Path) -> None:
    actor = save_config(tmp_path / "actor")
    small, large = save_config(tmp_path / "small", SIZE - 1), save_config(tmp_path / "large", SIZE + 1)
    with pytest.raises(ValueError, match="its vocabulary has 319 tokens, and the actor's 320"):
        check(actor, **teacher(small))
    with pytest.raises(ValueError, match=r"^reward.model=.*has 319 tokens"):
        check(actor, reward={"model": str(small)})
    with pytest.raises(ValueError, match="has 321 tokens, and the actor's 320; the actor can't learn"):
        check(actor, **teacher(large, "forward_kl_topk"))
    with pytest.raises(ValueError, match=r"distillation_config.topk=321: .*same has 320 tokens"):
        check(actor, **teacher(save_config(tmp_path / "same"), "forward_kl_topk", topk=321))
    swapped = save_config(tmp_path / "swapped")
    save_swapped(swapped)
    for fields in (teacher(swapped), {"reward": {"model": str(swapped)}}):
        with pytest.raises(
            ValueError, match=r"its tokenizer isn't the actor's, 2 of \d+ tokens differ \(e\.g\. \d+ is 'B'"
        ):
            check(actor, **fields)
