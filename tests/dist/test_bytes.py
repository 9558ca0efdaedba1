"""Bytes that each rank sends in a training step, by purpose, beside the least that shapes and batch allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.bounds import Rows, count_rows
from bench.traffic import PURPOSES, Traffic, measure_step, ratio
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions
from tests.oracle.cells import Cell, build_batch, load_parallel, share_documents
from tests.oracle.reference import Reference, load_reference
from tests.oracle.topologies import CASES, TOPOLOGIES, Topology
from tests.pool import RunRanks

MOST = 1.05
MOST_OTHER = 0.01  # of all that a rank sends
BF16 = ParallelOptions(compute_dtype=torch.bfloat16)
KEPT = ParallelOptions(reshard_after_forward=False)
# What the parity cells of N-D parallelism have elsewhere.
ALL_TOPOLOGIES = TOPOLOGIES | {
    "fsdp-ep2": Topology(world_size=4, sizes={"ep_size": 2}),
    "kept-ep2": Topology(world_size=4, sizes={"ep_size": 2}, options=KEPT, num_micro_batches=2),
    "hsdp-ep2": Topology(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2}),
    "bf16-ep2-tp2": Topology(world_size=4, sizes={"ep_size": 2, "tp_size": 2}, options=BF16),
}
CELLS = [(family, name) for family in CASES for name in ALL_TOPOLOGIES]
# Run by `make test`; the other cells by `make test-slow`.
SAMPLE = {
    ("qwen3_moe", "fsdp-ep2"),
    ("qwen3_moe", "bf16-ep2-tp2"),
    ("qwen3_moe", "dp2-cp2-tp2-ep4"),
    ("deepseek_v3", "fsdp-ep4-tp2"),
}


def count_step(rank: int, cell: Cell, reference: Reference) -> Traffic:
    meshes = build_meshes("cpu", **cell.sizes)
    batches = [build_batch(documents, cell.layout) for documents in share_documents(reference.documents, cell, rank)]
    return measure_step(load_parallel(reference, meshes, cell), meshes, cell.options, batches)


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*cell, marks=[] if cell in SAMPLE else [pytest.mark.slow]) for cell in CELLS],
)
def test_a_step_sends_what_it_must(family: str, name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, topology = CASES[family], ALL_TOPOLOGIES[name]
    sizes, options = topology.sizes, topology.options
    used = {
        "replicas": "mp_replicate_size" in sizes,
        "rows": "ep_size" in sizes and options.expert_parallel,
        "runs": "tp_size" in sizes,
        "loss": "tp_size" in sizes,
        "heads": "cp_size" in sizes or ("tp_size" in sizes and family == "qwen3_5_moe"),
    }
    reference = load_reference(case, reference_root)
    for traffic in run_ranks(count_step, topology.world_size, topology.cell(case), reference):
        assert {purpose: traffic.sent[purpose] > 0 for purpose in used} == used
        ratios = {purpose: ratio(traffic, purpose) for purpose in PURPOSES if purpose not in ("rows", "other")}
        # Less than the least would be a mistake in one of the two.
        assert all(1 - 1e-9 <= number <= MOST for number in ratios.values()), (ratios, traffic)
        # The eager dispatcher sends a row for each expert, not for each rank.
        assert traffic.sent["rows"] == traffic.pairs >= traffic.least["rows"]
        assert traffic.sent["other"] <= MOST_OTHER * sum(traffic.sent.values()), traffic


def test_rows_of_a_token_for_each_expert_and_for_each_rank() -> None:
    """4 experts on 2 ranks: two of the first token's on rank 1, one of the second's on each; then another layer's."""
    routes = [torch.tensor([[3, 2], [0, 3]]), torch.tensor([[1, 0]])]
    assert count_rows(routes, num_experts=4, ep_size=2) == Rows(pairs=(3, 3), tokens=(2, 2))


def test_the_sample_is_of_existing_cells() -> None:
    assert set(CELLS) >= SAMPLE
