"""Every topology computes what one process computes: loss, every gradient, norms, and weights after two steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions
from moesaic.train.step import train_step
from tests.oracle.cells import (
    TOLERANCES,
    Cell,
    ShardOptimizer,
    assert_within_tolerance,
    build_batch,
    load_parallel,
    run_cell,
    share_documents,
    worst,
)
from tests.oracle.reference import NUM_STEPS, OPTIMIZERS, Case, Reference, backward_in_one_process, load_reference
from tests.pool import RunRanks

PATH_A = ParallelOptions(expert_parallel=False)
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)

# What packs, accumulates or shares unevenly needs more documents.
QWEN3, LONG = Case(), Case(num_documents=16)
QWEN2, MIXTRAL = Case(family="qwen2_moe"), Case(family="mixtral")
HYBRID = Case(family="qwen3_5_moe", num_documents=16)


def listed(family: str, vocabulary: int = 96) -> Case:
    return Case(family=family, is_listed=True, vocabulary=vocabulary)


CELLS: dict[str, tuple[Case, Cell]] = {
    # Ranks and axes.
    "one-rank": (QWEN3, Cell(world_size=1)),
    "ep1-efsdp2": (QWEN3, Cell(world_size=2)),
    "ep2-efsdp1-all-ranks-are-ep": (QWEN3, Cell(world_size=2, sizes={"ep_size": 2})),
    "ep4-efsdp1-all-ranks-are-ep": (QWEN3, Cell(world_size=4, sizes={"ep_size": 4})),
    "ep1-efsdp4": (QWEN3, Cell(world_size=4)),
    "ep2-efsdp2": (QWEN3, Cell(world_size=4, sizes={"ep_size": 2})),
    "ep4-efsdp2-8-ranks": (QWEN3, Cell(world_size=8, sizes={"ep_size": 4})),
    # Replicas: of both, and of the experts or of the dense parameters alone.
    "hsdp2-ep2": (QWEN3, Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2})),
    "hsdp2-ep4-edp1": (QWEN3, Cell(world_size=4, sizes={"ep_size": 4, "mp_replicate_size": 2, "edp_size": 1})),
    "edp2-ep2": (QWEN3, Cell(world_size=4, sizes={"ep_size": 2, "edp_size": 2})),
    "hsdp2-ep2-efsdp2-8-ranks": (QWEN3, Cell(world_size=8, sizes={"ep_size": 2, "mp_replicate_size": 2})),
    # Path A: FSDP2 alone.
    "path-a-2": (QWEN3, Cell(world_size=2, options=PATH_A)),
    "path-a-4": (QWEN3, Cell(world_size=4, options=PATH_A)),
    "path-a-hsdp2": (QWEN3, Cell(world_size=4, sizes={"mp_replicate_size": 2}, options=PATH_A)),
    "path-a-7-experts": (Case(num_experts=7), Cell(world_size=4, options=PATH_A)),
    # Experts that don't divide.
    "7-experts-ep4": (Case(num_experts=7), Cell(world_size=4, sizes={"ep_size": 4})),
    "7-experts-ep2-efsdp2": (Case(num_experts=7), Cell(world_size=4, sizes={"ep_size": 2})),
    "7-experts-ep2-efsdp3-strided": (
        Case(num_experts=7),
        Cell(world_size=6, sizes={"ep_size": 2}, shares=(2, 2, 1, 1, 1, 1)),
    ),
    "more-shards-than-experts": (Case(num_experts=2), Cell(world_size=4, sizes={"ep_size": 2})),
    # Tokens.
    "expert-and-rank-receive-nothing": (Case(vocabulary=2), Cell(world_size=4, sizes={"ep_size": 4})),
    "rank-without-loss-tokens": (LONG, Cell(world_size=4, sizes={"ep_size": 2}, shares=(8, 0, 5, 3))),
    "uneven-tokens": (LONG, Cell(world_size=4, sizes={"ep_size": 4}, shares=(1, 9, 2, 4))),
    "accumulation-4": (LONG, Cell(world_size=4, sizes={"ep_size": 2}, num_micro_batches=4)),
    "packed": (LONG, Cell(world_size=4, sizes={"ep_size": 2}, layout="packed")),
    "packed-accumulation-2": (LONG, Cell(world_size=4, sizes={"ep_size": 4}, layout="packed", num_micro_batches=2)),
    # Memory.
    "checkpointed-ep2": (QWEN3, Cell(world_size=4, sizes={"ep_size": 2}, options=CHECKPOINTED)),
    "checkpointed-ep4-packed": (
        LONG,
        Cell(world_size=4, sizes={"ep_size": 4}, options=CHECKPOINTED, layout="packed", num_micro_batches=2),
    ),
    "checkpointed-path-a": (
        QWEN3,
        Cell(world_size=2, options=ParallelOptions(expert_parallel=False, activation_checkpointing=True)),
    ),
    "no-reshard": (
        QWEN3,
        Cell(world_size=4, sizes={"ep_size": 2}, options=ParallelOptions(reshard_after_forward=False)),
    ),
    "ignored-modules-are-replicated": (
        QWEN3,
        Cell(
            world_size=4,
            sizes={"ep_size": 2},
            options=ParallelOptions(fsdp_ignored_modules=("model.layers.*.self_attn", "model.embed_tokens")),
        ),
    ),
    # Models.
    "tied-embeddings": (Case(tied=True), Cell(world_size=4, sizes={"ep_size": 2})),
    "tied-embeddings-path-a": (Case(tied=True), Cell(world_size=2, options=PATH_A)),
    "qwen2-shared-expert-ep2": (QWEN2, Cell(world_size=4, sizes={"ep_size": 2})),
    "qwen2-shared-expert-ep4-checkpointed": (QWEN2, Cell(world_size=4, sizes={"ep_size": 4}, options=CHECKPOINTED)),
    "qwen2-hsdp2-ep2": (QWEN2, Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2})),
    "qwen2-path-a": (QWEN2, Cell(world_size=2, options=PATH_A)),
    "mixtral-ep2": (MIXTRAL, Cell(world_size=4, sizes={"ep_size": 2})),
    "hybrid-ep2": (HYBRID, Cell(world_size=4, sizes={"ep_size": 2})),
    "hybrid-ep4-checkpointed": (HYBRID, Cell(world_size=4, sizes={"ep_size": 4}, options=CHECKPOINTED)),
}

# Run by `make test-slow`: others show the same together with something else.
SLOW = {
    "ep2-efsdp1-all-ranks-are-ep",
    "ep1-efsdp4",
    "ep4-efsdp2-8-ranks",
    "hsdp2-ep2",
    "path-a-2",
    "7-experts-ep2-efsdp2",
    "accumulation-4",
    "packed",
    "checkpointed-ep2",
    "checkpointed-path-a",
    "tied-embeddings-path-a",
    "qwen2-hsdp2-ep2",
    "qwen2-path-a",
    "hybrid-ep2",
}

EP2_EFSDP2 = Cell(world_size=4, sizes={"ep_size": 2})

# What sets families apart at the experts seam and in their routers; all 64 are compared by `make matrix`.
FAMILY_CELLS: dict[str, tuple[Case, Cell]] = {
    "groups-correction-bias-shared-experts": (listed("deepseek_v3"), EP2_EFSDP2),
    "groups-and-dense-layers": (listed("glm4_moe"), EP2_EFSDP2),
    "transposed-interleaved-biases": (listed("gpt_oss"), EP2_EFSDP2),
    "biases-of-experts-without-tokens": (
        listed("gpt_oss", vocabulary=2),
        Cell(world_size=4, sizes={"ep_size": 4}, options=CHECKPOINTED),
    ),
    "olmoe": (listed("olmoe"), EP2_EFSDP2),
    "granitemoe": (listed("granitemoe"), EP2_EFSDP2),
    "post-expert-norm": (listed("muse_spark"), EP2_EFSDP2),
    "post-expert-norm-ep4": (listed("muse_spark"), Cell(world_size=4, sizes={"ep_size": 4}, options=CHECKPOINTED)),
    "no-gate-and-another-width": (listed("nemotron_h"), EP2_EFSDP2),
    "transposed": (listed("aria_text"), EP2_EFSDP2),
}


@pytest.mark.parametrize("name", FAMILY_CELLS)
def test_parity_of_families(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, cell = FAMILY_CELLS[name]
    for errors in run_ranks(run_cell, cell.world_size, cell, load_reference(case, reference_root)):
        assert_within_tolerance(errors)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CELLS])
def test_parity_with_one_process(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, cell = CELLS[name]
    for errors in run_ranks(run_cell, cell.world_size, cell, load_reference(case, reference_root)):
        assert_within_tolerance(errors)


def optimize_both_ways(rank: int, cell: Cell, reference: Reference, optimizer: str) -> list[str]:
    """Parameters that an optimizer of the DTensors and one of their shards move to different values."""
    meshes = build_meshes("cpu", **cell.sizes)
    (batch,) = (build_batch(docs, cell.layout) for docs in share_documents(reference.documents, cell, rank))
    moved = []
    for build in (OPTIMIZERS[optimizer], partial(ShardOptimizer, OPTIMIZERS[optimizer])):
        model = load_parallel(reference, meshes, cell)
        steps = build(model.parameters())
        for _ in range(NUM_STEPS):
            train_step(model, [batch], steps, None, meshes, max_grad_norm=1.0)
        moved.append({name: param.detach().to_local() for name, param in model.named_parameters()})
    return [name for name, shard in moved[0].items() if not torch.equal(shard, moved[1][name])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_shards_is_one_of_dtensors(optimizer: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, cell = CELLS["hsdp2-ep2"]
    assert run_ranks(optimize_both_ways, 4, cell, load_reference(case, reference_root), optimizer) == [[]] * 4


def test_experts_and_ranks_without_tokens_occur(run_ranks: RunRanks, reference_root: Path) -> None:
    """The cell above that is named after them really has them: counted where the tokens arrive."""
    case, cell = CELLS["expert-and-rank-receive-nothing"]
    results = run_ranks(run_cell, cell.world_size, cell, load_reference(case, reference_root))
    for layer in results[0]["load"]:
        per_rank = [int(result["load"][layer].sum()) for result in results]
        assert 0 in per_rank, results


def test_rounding_moves_the_hybrid_model_less_than_the_tolerance(reference_root: Path) -> None:
    """Its gradients are sums of large terms that cancel; were its floor higher, the cells above would judge nothing."""
    reference = load_reference(HYBRID, reference_root)
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32, attn_implementation="sdpa")
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.mul_(1 + 1e-7 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)))
    backward_in_one_process(model.train(), reference.documents)
    floor = worst({name: param.grad for name, param in model.named_parameters()}, reference.grads)
    print(f"rounding floor of {HYBRID.name}: {floor}")
    assert 0 < floor[0] <= TOLERANCES["grads"], floor
