"""A sample of ``make matrix``: families with something of their own under tp or cp, and refusals as it reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.dispatch import DISPATCHERS
from tests.families.matrix import build_cells
from tests.families.measure import QUANTITIES, compare_or_refuse, shorten
from tests.oracle.cells import TOLERANCES
from tests.oracle.reference import Case, load_reference
from tests.pool import RunRanks


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("olmoe", "ep2-tp2"),  # its q and k norms span the heads
        pytest.param("beam", "ep4-cp2-tp2", marks=pytest.mark.slow),  # a bias per head
        pytest.param("afmoe", "ep4-cp2-tp2", marks=pytest.mark.slow),  # takes a view of what attention gives
    ],
)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_parity_with_one_process(
    family: str, topology: str, dispatcher: str, run_ranks: RunRanks, reference_root: Path
) -> None:
    (cell,) = build_cells([topology], [dispatcher]).values()
    reference = load_reference(Case(family=family, is_listed=True), reference_root)
    for result in run_ranks(compare_or_refuse, cell.world_size, cell, reference):
        assert isinstance(result, dict), result
        assert {key for key in QUANTITIES if not result[key][0] <= TOLERANCES[key]} == set(), result


def test_a_refusal_is_reported(run_ranks: RunRanks, reference_root: Path) -> None:
    (cell,) = build_cells(["ep2-cp2"], ["eager"]).values()
    reference = load_reference(Case(family="gpt_oss", is_listed=True), reference_root)
    (said,) = set(run_ranks(compare_or_refuse, cell.world_size, cell, reference))  # type: ignore[arg-type]
    assert said.startswith("attn_implementation='eager' can't attend over parts of sequences"), said


def test_a_refusal_is_shortened() -> None:
    of_tp = (
        "tp_size=2: model.layers.0.self_attn (A): k has 3 heads; model.layers.1.self_attn (A): k has 3 heads. "
        "Choose a tp_size that divides them, or 1."
    )
    assert shorten(of_tp, "x") == "A: k has 3 heads"
    of_cp = (
        "cp_size=2, tp_size=1: x: layers c look; set cp_size and tp_size 1.\ncp_size=2, tp_size=1: x: L (C, C) mixes."
    )
    assert shorten(of_cp, "x") == "layers c look; L (C) mixes"
