"""Every composition of tensor, context, expert and data parallelism computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.cells import Cell, assert_within_tolerance, run_cell
from tests.oracle.reference import Case, load_reference
from tests.oracle.topologies import CASES, TOPOLOGIES
from tests.pool import RunRanks

# Run by `make test`; the other cells by `make test-slow`.
SAMPLE = {
    ("qwen3_moe", "tp4"),
    ("qwen3_moe", "hsdp-ep2-tp2"),
    ("qwen3_moe", "path-a-cp2-tp2"),
    ("qwen3_moe", "cp4-ep2"),
    ("qwen3_moe", "dp2-cp2-tp2-ep4"),
    ("deepseek_v3", "fsdp-ep4-tp2"),
    ("qwen3_5_moe", "ep4-cp2-tp2"),
    ("qwen3_5_moe", "fsdp-ep4-cp2"),
}
CELLS = [(family, name) for family in CASES for name in TOPOLOGIES]


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*cell, marks=[] if cell in SAMPLE else [pytest.mark.slow]) for cell in CELLS],
)
def test_parity_with_one_process(family: str, name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, topology = CASES[family], TOPOLOGIES[name]
    reference = load_reference(case, reference_root)
    for errors in run_ranks(run_cell, topology.world_size, topology.cell(case), reference):
        assert_within_tolerance(errors)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "ep_size": 2},
        pytest.param({"cp_size": 2, "tp_size": 2, "ep_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "mp_replicate_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bias_that_both_split(sizes: dict[str, int], run_ranks: RunRanks, reference_root: Path) -> None:
    """Qwen2-MoE's attention has biases, strided shards of their one dim, and a shared expert that tp splits."""
    cell = Cell(world_size=4, sizes=sizes, layout="packed")
    for errors in run_ranks(run_cell, 4, cell, load_reference(Case(family="qwen2_moe"), reference_root)):
        assert_within_tolerance(errors)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "cp_size": 2, "ep_size": 4}], ids=str)
def test_tied_embeddings_are_one_table_of_rows(
    sizes: dict[str, int], run_ranks: RunRanks, reference_root: Path
) -> None:
    cell = Cell(world_size=4, sizes=sizes)
    for errors in run_ranks(run_cell, 4, cell, load_reference(Case(tied=True), reference_root)):
        assert_within_tolerance(errors)


def test_the_sample_is_of_existing_cells() -> None:
    assert set(CELLS) >= SAMPLE
