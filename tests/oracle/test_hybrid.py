"""Hybrid models (linear and softmax attention) over shared sequences: loss, every gradient, norms, two steps' weights.

Their gradients are sums of large terms that cancel, and AdamW divides by small ones: norms whose weights begin at zero
are then worth little more than their rounding. So each model's rounding floor is measured beside it: how far a process
moves from itself where the embeddings are scaled by 1 + 1e-7. Where that is above a tolerance, twice it is the bound.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moesaic.parallel.apply import ParallelOptions
from tests.oracle.cells import TOLERANCES, Cell, run_cell
from tests.oracle.floors import bounds_above, measure_floor
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

CASES = {
    "qwen3_5": Case(family="qwen3_5_moe", num_documents=16),  # 4 key and 8 value heads
    "qwen3_next": Case(family="qwen3_next", is_listed=True, num_documents=16),  # 2 and 4
}
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
SENT_AGAIN = ParallelOptions(activation_checkpointing=True, exchanged_tokens="recompute", fsdp_implementation="custom")
WHOLE_BLOCKS = ParallelOptions(fsdp_ignored_modules=("model.layers.*.linear_attn",))
PATH_A = ParallelOptions(expert_parallel=False)

CELLS: dict[str, tuple[str, Cell]] = {
    "qwen3_5-cp2-ep4": ("qwen3_5", Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 4})),
    "qwen3_5-cp4-checkpointed": ("qwen3_5", Cell(world_size=4, sizes={"cp_size": 4}, options=CHECKPOINTED)),
    "qwen3_5-cp2-tp2-ep4": ("qwen3_5", Cell(world_size=4, sizes={"cp_size": 2, "tp_size": 2, "ep_size": 4})),
    "qwen3_next-cp4-ep2-key-heads-shared": ("qwen3_next", Cell(world_size=4, sizes={"cp_size": 4, "ep_size": 2})),
}

MORE_CELLS: dict[str, tuple[str, Cell]] = {
    "qwen3_5-cp2": ("qwen3_5", Cell(world_size=2, sizes={"cp_size": 2})),
    "qwen3_5-cp2-ep2-blocks-whole-on-every-rank": (
        "qwen3_5",
        Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 2}, options=WHOLE_BLOCKS),
    ),
    "qwen3_5-cp2-ep2-sent-again": (
        "qwen3_5",
        Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 2}, options=SENT_AGAIN),
    ),
    "qwen3_5-cp2-rank-without-documents": (
        "qwen3_5",
        Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 4}, shares=(16, 0)),
    ),
    "qwen3_next-tp2": ("qwen3_next", Cell(world_size=2, sizes={"tp_size": 2})),
    "qwen3_next-cp2-tp2-path-a-checkpointed": (
        "qwen3_next",
        Cell(
            world_size=4,
            sizes={"cp_size": 2, "tp_size": 2},
            options=ParallelOptions(expert_parallel=False, activation_checkpointing=True),
        ),
    ),
    "qwen3_next-cp2-path-a": ("qwen3_next", Cell(world_size=2, sizes={"cp_size": 2}, options=PATH_A)),
    "qwen3_next-cp2-ep4-accumulation-2": (
        "qwen3_next",
        Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 4}, options=CHECKPOINTED, num_micro_batches=2),
    ),
    "qwen3_next-hsdp2-cp2-ep2": (
        "qwen3_next",
        Cell(world_size=4, sizes={"cp_size": 2, "ep_size": 2, "mp_replicate_size": 2}),
    ),
}


def floor_of(reference: Reference) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32, experts_implementation="eager")
    return measure_floor(model.train(), reference)


@pytest.fixture(scope="module")
def floors(reference_root: Path) -> dict[str, dict[str, float]]:
    return {name: floor_of(load_reference(case, reference_root)) for name, case in CASES.items()}


def compare(name: str, floors: dict[str, dict[str, float]], run_ranks: RunRanks, root: Path) -> None:
    model, cell = (CELLS | MORE_CELLS)[name]
    floor = floors[model]
    bounds = bounds_above(floor)
    results = run_ranks(run_cell, cell.world_size, cell, load_reference(CASES[model], root))
    largest_errors = {key: max(errors[key] for errors in results) for key in bounds}
    print(f"{name}: {largest_errors}; floor {floor}")
    too_large = {key: error for key, error in largest_errors.items() if not error[0] <= bounds[key]}
    assert not too_large, f"beyond {bounds}: {too_large}; floor {floor}"


@pytest.mark.slow  # `make test` has hybrid cells without a floor in tests/oracle/test_topologies.py
@pytest.mark.parametrize("name", CELLS)
def test_hybrid_models_over_shared_sequences(
    name: str, floors: dict[str, dict[str, float]], run_ranks: RunRanks, reference_root: Path
) -> None:
    compare(name, floors, run_ranks, reference_root)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CELLS)
def test_more_hybrid_models_over_shared_sequences(
    name: str, floors: dict[str, dict[str, float]], run_ranks: RunRanks, reference_root: Path
) -> None:
    compare(name, floors, run_ranks, reference_root)


@pytest.mark.slow
def test_floors_of_gradients_are_below_their_tolerance(floors: dict[str, dict[str, float]]) -> None:
    """What is wrong shows in the gradients: there the tolerances themselves are the bounds."""
    for name, floor in floors.items():
        assert 0 < floor["grads"] <= TOLERANCES["grads"], (name, floor)
