"""Sequences that ranks share compute what one process computes, a document at a time: loss, every gradient, norms, and
weights after two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.parallel.apply import ParallelOptions
from tests.oracle.cells import Cell, assert_within_tolerance, run_cell
from tests.oracle.reference import Case, load_reference
from tests.pool import RunRanks

PATH_A = ParallelOptions(expert_parallel=False)
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
RESENT = ParallelOptions(activation_checkpointing=True, exchanged_tokens="recompute")

QWEN3, LONG = Case(), Case(num_documents=16)
QWEN2 = Case(family="qwen2_moe")
MLA = Case(family="deepseek_v3", is_listed=True)
# Two layers, one with a window of 8 tokens, which most documents exceed.
WINDOWED = Case(family="laguna", is_listed=True)


def cell(world_size: int, **settings: object) -> Cell:
    """``cp=2, ep=4`` are sizes of axes; the rest is the cell's own."""
    axes = {"cp": "cp_size", "ep": "ep_size", "hsdp": "mp_replicate_size"}
    sizes = {name: settings.pop(axis) for axis, name in axes.items() if axis in settings}
    return Cell(world_size=world_size, sizes=sizes, **settings)  # type: ignore[arg-type]


CELLS: dict[str, tuple[Case, Cell]] = {
    "cp2-ep4-packed": (LONG, cell(4, cp=2, ep=4, layout="packed")),
    "cp4-ep2-kv-heads-repeated": (QWEN3, cell(4, cp=4, ep=2)),
    "cp2-ep2-checkpointed-accumulation": (
        LONG,
        cell(4, cp=2, ep=2, layout="packed", num_micro_batches=2, options=CHECKPOINTED),
    ),
    "mla-cp2-ep2": (MLA, cell(4, cp=2, ep=2)),
    "window-cp4-ep2-packed": (WINDOWED, cell(4, cp=4, ep=2, layout="packed")),
}

MORE_CELLS: dict[str, tuple[Case, Cell]] = {
    "cp2-padded": (QWEN3, cell(2, cp=2)),
    "hsdp2-cp2-ep2": (QWEN3, cell(4, hsdp=2, cp=2, ep=2)),
    "path-a-cp2": (QWEN3, cell(2, cp=2, layout="packed", options=PATH_A)),
    "cp2-ep1": (QWEN3, cell(2, cp=2, ep=1, layout="packed")),
    "cp4-ep4-packed": (LONG, cell(4, cp=4, ep=4, layout="packed")),
    "cp4-path-a": (QWEN3, cell(4, cp=4, options=PATH_A)),
    "cp2-path-a-4-ranks": (LONG, cell(4, cp=2, options=PATH_A, num_micro_batches=2)),
    "cp2-ep4-8-ranks": (LONG, cell(8, cp=2, ep=4, layout="packed")),
    "cp4-ep8-8-ranks": (QWEN3, cell(8, cp=4, ep=8)),
    "hsdp2-cp2-ep4-8-ranks-packed": (LONG, cell(8, hsdp=2, cp=2, ep=4, layout="packed")),
    "hsdp2-cp4-path-a": (QWEN3, cell(4, hsdp=2, cp=4, options=PATH_A)),
    "cp2-uneven-shares": (LONG, cell(4, cp=2, ep=2, shares=(13, 3))),
    "cp2-rank-without-documents": (QWEN3, cell(4, cp=2, ep=4, shares=(8, 0))),
    "cp2-packed-rank-without-documents": (QWEN3, cell(4, cp=2, ep=4, layout="packed", shares=(8, 0))),
    "cp2-sent-again": (LONG, cell(4, cp=2, ep=4, layout="packed", options=RESENT)),
    "cp2-checkpointed-padded": (LONG, cell(4, cp=2, ep=2, num_micro_batches=2, options=CHECKPOINTED)),
    "cp4-unsharded-accumulation": (LONG, cell(4, cp=4, ep=2, num_micro_batches=2, accumulation="unsharded")),
    "qwen2-cp2-ep2": (QWEN2, cell(4, cp=2, ep=2, layout="packed")),
    "qwen2-cp4-ep4": (QWEN2, cell(4, cp=4, ep=4)),
    "mixtral-cp4-ep2": (Case(family="mixtral"), cell(4, cp=4, ep=2, layout="packed")),
    "mla-cp4-ep4-checkpointed": (MLA, cell(4, cp=4, ep=4, layout="packed", options=CHECKPOINTED)),
    "window-cp2-ep4": (WINDOWED, cell(4, cp=2, ep=4)),
    "window-cp2-path-a": (WINDOWED, cell(2, cp=2, options=PATH_A)),
}


def compare(name: str, cells: dict[str, tuple[Case, Cell]], run_ranks: RunRanks, root: Path) -> None:
    case, chosen = cells[name]
    for errors in run_ranks(run_cell, chosen.world_size, chosen, load_reference(case, root)):
        assert_within_tolerance(errors)


@pytest.mark.parametrize("name", CELLS)
def test_shared_sequences(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    compare(name, CELLS, run_ranks, reference_root)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CELLS)
def test_more_shared_sequences(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    compare(name, MORE_CELLS, run_ranks, reference_root)
