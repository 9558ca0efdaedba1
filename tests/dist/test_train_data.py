"""Whole runs on several datasets, plain text and streams: the same on any ranks, resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import Recipe
from moesaic.train.loop import train
from tests.unit.data_tokenizers import MARKED, build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, conversations with a bad one among them, and documents."""
    folder = tmp_path_factory.mktemp("source")
    save_tiny(folder / "model", "qwen3_moe", vocab_size=320)
    build_tokenizer(MARKED).save_pretrained(folder / "model")
    for name, numbers in (("one", range(20)), ("two", range(90, 95))):
        rows = [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}"}]}
            for n in numbers
        ]
        rows[3] = {"messages": []}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"the sum of {n} and {n} is {2 * n}. " * (1 + n % 4)} for n in range(30)]
    texts[2] = {"text": ""}
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def train_on_rank(rank: int, fields: dict[str, Any]) -> None:
    train(Recipe.model_validate(fields))


def fields_of(source: Path, output_dir: Path, **fields: Any) -> dict[str, Any]:
    return {
        "model": str(source / "model"),
        "output_dir": str(output_dir),
        "cutoff_len": 64,
        "global_batch_size": 8,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "dist_config": {"name": "moesaic", "ep_size": 2},
        **fields,
    }


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder, "train")]


def test_mixed_sets_and_held_out_sets(run_ranks, source: Path, tmp_path: Path) -> None:
    one, two = (str(source / f"{name}.jsonl") for name in ("one", "two"))
    mixed = [{"path": one, "weight": 1.0}, {"path": two, "weight": 1.0}]
    fields = fields_of(source, tmp_path / "run", train_dataset=mixed, eval_dataset=[one, two], save_steps=None)
    run_ranks(train_on_rank, 2, fields)
    (evaluation,) = read_metrics(tmp_path / "run", "eval")
    assert evaluation["sets"].keys() == {one, two}
    counts = [held["num_loss_tokens"] for held in evaluation["sets"].values()]
    total = sum(held["loss"] * held["num_loss_tokens"] for held in evaluation["sets"].values())
    assert evaluation["num_loss_tokens"] == sum(counts) and counts[0] > counts[1] > 0
    assert evaluation["loss"] == pytest.approx(total / sum(counts), rel=1e-6)
    reports = [json.loads(line) for line in (tmp_path / "run" / "data_report.jsonl").read_text().splitlines()]
    assert [(line["dataset"], line["source"], line["index"]) for line in reports] == [
        (dataset, path, 3) for dataset in ("train_dataset", "eval_dataset") for path in (one, two)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"stage": "pt", "packing": True, "train_dataset": "text.jsonl"}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": "pt", "packing": True, "train_dataset": {"path": "text.jsonl", "streaming": True, "buffer_size": 12}},
            marks=pytest.mark.slow,
        ),
        {"train_dataset": {"path": "one.jsonl", "streaming": True, "buffer_size": 12}},
    ],
    ids=["text", "streamed text", "streamed conversations"],
)
def test_the_same_on_any_ranks_and_resumed(run_ranks, source: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Two ranks; one rank with the same global batch; and two that go on from the one's checkpoint."""
    dataset = fields["train_dataset"]
    dataset = {"path": dataset} if isinstance(dataset, str) else dataset
    fields = {**fields, "train_dataset": {**dataset, "path": str(source / dataset["path"])}}
    run_ranks(train_on_rank, 2, fields_of(source, tmp_path / "two", **fields))
    one = {**fields, "dist_config": {"name": "fsdp2"}}
    run_ranks(train_on_rank, 1, fields_of(source, tmp_path / "one", **one))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    middle = str(tmp_path / "one" / "step-000002")
    run_ranks(train_on_rank, 2, fields_of(source, tmp_path / "on", resume_from_checkpoint=middle, **fields))
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "one")[2:], rel=1e-4)
    if fields["train_dataset"].get("streaming") and "stage" in fields:
        lines = (tmp_path / "two" / "data_report_0.jsonl").read_text().splitlines()
        assert {json.loads(line)["index"] for line in lines} == {2}
        assert not (tmp_path / "two" / "data_report_1.jsonl").exists(), "the ranks tokenize the same rows"
    elif fields["train_dataset"].get("streaming"):
        lines = (tmp_path / "one" / "data_report_0.jsonl").read_text().splitlines()
        assert {json.loads(line)["index"] for line in lines} == {3}


def refused_on_rank(rank: int, fields: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        train(Recipe.model_validate(fields))
    return str(error.value)


def test_tokens_beyond_the_models_vocabulary_are_refused(run_ranks, source: Path, tmp_path: Path) -> None:
    """With tensor parallelism nothing else would say so: such a token is in no rank's rows."""
    save_tiny(tmp_path / "model", "qwen3_moe", vocab_size=64)
    build_tokenizer(MARKED).save_pretrained(tmp_path / "model")
    fields = fields_of(source, tmp_path / "run", train_dataset={"path": str(source / "one.jsonl")})
    for message in run_ranks(refused_on_rank, 2, fields | {"model": str(tmp_path / "model"), "tp_size": 2}):
        assert f"{source / 'one.jsonl'}: token " in message and "beyond the model's vocabulary of 64" in message
