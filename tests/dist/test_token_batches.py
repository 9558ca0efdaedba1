"""Micro-batches by tokens in training: ranks with unequal shares finish, and compute what one process computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import Recipe
from moesaic.data import Batch, TokenBatchLoader
from moesaic.data.packing import Row, RowOptions, collate
from moesaic.meshes import Meshes, build_meshes
from moesaic.train.loop import train
from tests.oracle.cells import TOLERANCES, Cell, load_parallel, measure_gradients
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks
from tests.unit.data_tokenizers import MARKED, build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny

EP2_EFSDP2 = Cell(world_size=4, sizes={"ep_size": 2})


def assigned(rank: int, reference: Reference, micro_batch_tokens: int, meshes: Meshes) -> list[Batch]:
    """This rank's part of one step that is the whole reference."""
    loader = TokenBatchLoader(
        reference.documents,
        micro_batch_tokens=micro_batch_tokens,
        global_batch_size=len(reference.documents),
        dp_rank=meshes.data.get_local_rank("dp"),
        dp_size=meshes.sizes.dp_size,
        cutoff_len=14,
        pad_token_id=0,
        seed=3,
    )
    return next(iter(loader))


def lopsided(rank: int, reference: Reference, shares: Sequence[int], meshes: Meshes) -> list[Batch]:
    """So many documents for this rank, each a micro-batch, and empty ones up to the largest share."""
    first = sum(shares[:rank])
    rows: list[Row] = [(index,) for index in range(first, first + shares[rank])]
    rows += [()] * (max(shares) - len(rows))
    return [
        collate(reference.documents, [row], RowOptions(cutoff_len=14 if row else 1, packing=True, pad_token_id=0))
        for row in rows
    ]


def one_step(
    rank: int, build: Callable[..., list[Batch]], reference: Reference, how: object, accumulation: Any
) -> dict[str, Any]:
    """Errors of one step, and how many of this rank's micro-batches have a document."""
    meshes = build_meshes("cpu", **EP2_EFSDP2.sizes)
    batches = build(rank, reference, how, meshes)
    model = load_parallel(reference, meshes, EP2_EFSDP2)
    errors = measure_gradients(model, batches, meshes, reference, accumulation)
    return errors | {"counts": (sum(bool(batch.document_lengths) for batch in batches), len(batches))}


CASES: dict[str, tuple[Callable[..., list[Batch]], int, object, list[tuple[int, int]]]] = {
    "rounds-are-full": (assigned, 16, 14, [(3, 3)] * 4),
    "a-round-has-a-gap": (assigned, 7, 14, [(1, 2), (2, 2), (2, 2), (2, 2)]),
    "fewer-documents-than-ranks": (assigned, 2, 14, [(1, 1), (1, 1), (0, 1), (0, 1)]),
    "lopsided": (lopsided, 16, (8, 1, 0, 7), [(8, 8), (1, 8), (0, 8), (7, 8)]),
}


@pytest.mark.parametrize("accumulation", ["sharded", "unsharded"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_unequal_numbers_of_micro_batches_compute_the_same(
    name: str, accumulation: str, run_ranks: RunRanks, reference_root: Path
) -> None:
    build, num_documents, how, counts = CASES[name]
    reference = load_reference(Case(num_documents=num_documents), reference_root)
    results = run_ranks(one_step, 4, build, reference, how, accumulation)
    for errors in results:
        for quantity in ("loss", "grads", "norms"):
            assert errors[quantity][0] <= TOLERANCES[quantity], (quantity, errors)
    assert [result["counts"] for result in results] == counts


def train_on_rank(rank: int, fields: dict[str, Any]) -> None:
    train(Recipe.model_validate(fields))


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """A model, 21 conversations of many lengths, and some held out."""
    save_tiny(tmp_path / "model", "qwen3_moe", vocab_size=320)
    build_tokenizer(MARKED).save_pretrained(tmp_path / "model")
    for name, numbers in (("train", range(21)), ("held_out", range(30, 37))):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{n}?"},
                    {"role": "assistant", "content": f"{n + 1} " * (1 + n % 5)},
                ]
            }
            for n in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(tmp_path / "model"),
        "train_dataset": str(tmp_path / "train.jsonl"),
        "eval_dataset": str(tmp_path / "held_out.jsonl"),
        "cutoff_len": 64,
        "micro_batch_tokens": 80,
        "global_batch_size": 9,  # of 21: the last step of an epoch has 3 samples, and four ranks
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "dist_config": {"name": "moesaic", "ep_size": 2},
    }


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_is_the_same_on_any_ranks_and_resumed(
    run_ranks: RunRanks, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Four ranks, one rank, four that go on from the one's checkpoint, and one that trains in whole rows."""
    run_ranks(train_on_rank, 4, {**fields, "output_dir": str(tmp_path / "four")})
    alone = {**fields, "dist_config": {"name": "fsdp2"}}
    run_ranks(train_on_rank, 1, {**alone, "output_dir": str(tmp_path / "one")})
    middle = str(tmp_path / "one" / "step-000002")
    run_ranks(train_on_rank, 4, {**fields, "output_dir": str(tmp_path / "on"), "resume_from_checkpoint": middle})
    rows = {**alone, "micro_batch_tokens": None, "micro_batch_size": 3, "output_dir": str(tmp_path / "rows")}
    run_ranks(train_on_rank, 1, rows)
    # Each step begins where rounding has moved the one before: that of a gradient.
    close = partial(pytest.approx, rel=TOLERANCES["grads"])
    one = read_metrics(tmp_path / "one", "train")
    for name, first in (("four", 0), ("on", 2), ("rows", 0)):
        other = read_metrics(tmp_path / name, "train")
        assert [line["num_loss_tokens"] for line in other] == [line["num_loss_tokens"] for line in one[first:]]
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in other] == close([line[key] for line in one[first:]])
        (held_out,) = read_metrics(tmp_path / name, "eval")
        assert held_out["loss"] == close(read_metrics(tmp_path / "one", "eval")[0]["loss"])
    assert [line["epoch"] for line in one] == [1, 1, 1, 2]


def test_tokens_per_second_count_every_sample_once(run_ranks: RunRanks, fields: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the ranks and the empty micro-batches: tokens/s times the time is the documents' tokens."""
    counts = []
    for world_size in (1, 4):
        output_dir = tmp_path / f"{world_size}"
        changes = {"max_steps": 3, "logging_steps": 3, "save_steps": None, "output_dir": str(output_dir)}
        topology = {"name": "fsdp2"} if world_size == 1 else fields["dist_config"]
        run_ranks(train_on_rank, world_size, {**fields, **changes, "dist_config": topology})
        (metrics,) = read_metrics(output_dir, "train")
        counts.append(metrics["tokens_per_s"] * metrics["step_time_s"] * 3)
    assert counts[0] == pytest.approx(counts[1], rel=1e-9)
    assert counts[0] == pytest.approx(round(counts[0]), rel=1e-9) and counts[0] > 21 * 5
