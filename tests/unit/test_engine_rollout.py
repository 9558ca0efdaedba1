"""``moesaic rollout``: prompts of every kind, what is refused before weights are read, and what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.engines.prompts import Prompt, encode, read_prompts
from tests.unit.data_tokenizers import build_tokenizer
from tests.unit.tiny_checkpoints import tiny_config


def write_model(folder: Path, chat_template: str | None = None) -> Path:
    tokenizer = build_tokenizer() if chat_template is None else build_tokenizer(chat_template)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", vocab_size=len(tokenizer)), dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[7], do_sample=True, temperature=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rollout") / "model")


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["rollout", *map(str, args)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TURNS = [{"role": "user", "content": "hello"}]


def test_lines_of_text_and_what_is_written(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("hello world\n\nwhat is the sum\nthe answer is: \n")
    options = ("--n", 2, "--max-tokens", 5, "--seed", 3, "--batch-size", 2, "--ignore-end", "--tokens")
    result = run(model, prompts, "--out", out, *options)
    assert result.exit_code == 0, result.output
    assert f"6 completions in {out}" in result.stderr
    rows = rows_of(out)
    assert [(row["index"], row["sample"]) for row in rows] == [(i, j) for i in range(3) for j in range(2)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows:
        assert row["num_tokens"] == len(row["tokens"]) == len(row["logprobs"]) == 5
        assert row["completion"] == tokenizer.decode(row["tokens"], skip_special_tokens=True)
        assert row["mean_logprob"] == pytest.approx(sum(row["logprobs"]) / 5)
    assert rows[0]["prompt"] == "hello world"
    assert len({tuple(row["tokens"]) for row in rows}) == 6
    again = run(model, prompts, "--out", tmp_path / "again.jsonl", *options)
    assert again.exit_code == 0 and rows_of(tmp_path / "again.jsonl") == rows
    other = run(model, prompts, "--out", tmp_path / "other.jsonl", *options, "--batch-size", 3)
    assert other.exit_code == 0, other.output
    assert [row["tokens"] for row in rows_of(tmp_path / "other.jsonl")] == [row["tokens"] for row in rows]
    refused = run(model, prompts, "--out", out)
    assert refused.exit_code == 2 and "exists, and nothing is overwritten" in refused.stderr
    assert rows_of(out) == rows
    shown = run(model, prompts, "--limit", 1, "--max-tokens", 2, "--temperature", 0)
    assert [json.loads(line)["index"] for line in shown.stdout.splitlines()] == [0]


def test_the_models_own_end_and_stops(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello world\n")
    options = ("--max-tokens", 40, "--n", 60, "--seed", 1, "--tokens")
    run(model, prompts, "--out", tmp_path / "a.jsonl", *options)
    run(model, prompts, "--out", tmp_path / "b.jsonl", *options, "--stop", 9, "--stop", "a", "--ignore-end")
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, stops in (("a", {7, tokenizer.eos_token_id}), ("b", {9, tokenizer.encode("a")[0]})):
        rows = rows_of(tmp_path / f"{name}.jsonl")
        assert {row["finish_reason"] for row in rows} == {"stop", "length"}
        for row in rows:
            assert not stops & set(row["tokens"][:-1])
            assert (row["tokens"][-1] in stops) == (row["finish_reason"] == "stop")


def test_rows_of_every_kind(tmp_path: Path) -> None:
    answered = [*TURNS, {"role": "assistant", "content": "hi"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"messages": answered, "id": 3}, {"prompt": TURNS}])
    assert read_prompts(path) == [Prompt(asked="a"), Prompt(asked=TURNS), Prompt(asked=TURNS)]
    assert read_prompts(path, limit=1, is_chat=True) == [Prompt(asked=[{"role": "user", "content": "a"}])]
    import datasets

    datasets.Dataset.from_list([{"messages": answered}] * 2).to_parquet(tmp_path / "rows.parquet")
    assert read_prompts(tmp_path / "rows.parquet") == [Prompt(asked=TURNS)] * 2
    (tmp_path / "list.json").write_text(json.dumps([{"prompt": "a"}]))
    assert read_prompts(tmp_path / "list.json") == [Prompt(asked="a")]
    tokenizer = build_tokenizer()
    (ids,) = encode([Prompt(asked=TURNS)], tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"prompt": "b"}, {}], "row 1: has text; needs prompt .*\nrow 3: has nothing"),
        ([{"messages": [{"role": "user"}]}], "row 1: each turn needs role and content"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "row 1: no turn before the assistant's"),
        ([3], "row 1: expected an object, got int"),
        ([], "no prompt in it"),
        ([{}] * 9, "row 5: .*\nand 4 more"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(write_rows(tmp_path / "rows.jsonl", rows))


def test_bad_input_is_refused_before_weights_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("moesaic.engines.hf.HfEngine.load", refuse)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    prompts = write_rows(tmp_path / "rows.jsonl", [{"prompt": "hello"}])
    long = write_rows(tmp_path / "long.jsonl", [{"prompt": "a"}, {"prompt": "x" * 200}])
    (tmp_path / "bad.jsonl").write_text("{\n")
    bare = write_model(tmp_path / "bare", "")
    turns = write_rows(tmp_path / "turns.jsonl", [{"messages": TURNS}])
    for args, message in (
        ((tmp_path / "none", prompts), "neither a model folder"),
        ((model, tmp_path / "none.jsonl"), "no such file"),
        ((model, tmp_path / "rows.csv"), "a file that ends in .txt"),
        ((model, tmp_path / "bad.jsonl"), "row 1: not JSON"),
        ((model, prompts, "--max-tokens", 0), "max_tokens=0: at least 1"),
        ((model, prompts, "--engine", "vllm"), "isn't installed; pip install 'moesaic[vllm]'"),
        ((model, prompts, "--engine", "sglang"), "isn't installed; pip install 'moesaic[sglang]'"),
        ((model, prompts, "--tp-size", 2, "--dtype", "fp8", "--limit", 0), "tp_size=2: hf runs in one process"),
        ((model, prompts, "--dtype", "fp8"), "dtype='fp8': one of auto"),
        ((model, prompts, "--out", tmp_path / "no" / "out.jsonl"), "its folder doesn't exist"),
        ((model, prompts, "--stop", "hello there"), "a stop is one token"),
        ((model, prompts, "--stop", "99999"), "a stop is one token"),
        ((model, long), "prompt 2 has 200 tokens, and the model's sequences at most 64"),
        ((bare, turns), "prompt 1 is a conversation, and the model's tokenizer has no chat_template"),
    ):
        result = run(*args)
        assert result.exit_code == 2, (args, result.output, result.exception)
        assert message in result.stderr.replace("\n", " "), result.stderr
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_is_exported_first(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export itself is the export command's; here, that it is asked for, and that its folder goes."""
    checkpoint, exports = tmp_path / "step-000002", list[Path]()
    checkpoint.mkdir()
    (checkpoint / ".metadata").touch()
    (tmp_path / "train.jsonl").write_text("{}\n")
    fields = {"model": str(model), "train_dataset": str(tmp_path / "train.jsonl"), "output_dir": str(tmp_path)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))

    def export(command: list[str]) -> None:
        assert command[:4] == ["-m", "moesaic.cli", "export", str(checkpoint)]
        exports.append(Path(command[4]))
        shutil.copytree(model, command[4])

    monkeypatch.setattr("moesaic.engines.rollout.run_alone", export)
    prompts = write_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    result = run(checkpoint, prompts, "--max-tokens", 2)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompt"] == TURNS
    assert len(exports) == 1 and not exports[0].exists()
