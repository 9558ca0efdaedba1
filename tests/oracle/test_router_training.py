"""Router losses, correction biases and frozen modules: every topology computes what one process computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from moesaic.model.build import find_auto_class
from moesaic.parallel.apply import ParallelOptions
from moesaic.train.router import RouterOptions
from tests.oracle.cells import TOLERANCES, Cell, assert_within_tolerance
from tests.oracle.reference import Case, build_config, load_reference
from tests.oracle.routers import Numbers, RouterCase, compute_in_one_process, heard, run_router_cell
from tests.pool import RunRanks

LOSSES = RouterOptions(aux_loss_coef=0.1, z_loss_coef=0.01)
QWEN3, LONG, DEEPSEEK = Case(), Case(num_documents=16), Case(family="deepseek_v3", is_listed=True)
LAGUNA, ERNIE = Case(family="laguna", is_listed=True), Case(family="ernie4_5_moe", is_listed=True)
ALL = RouterCase(options=replace(LOSSES, bias_update_rate=0.01))
PATH_A = ParallelOptions(expert_parallel=False)
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
GATES, EXPERTS = "model.layers.*.mlp.gate", "model.layers.*.mlp.experts"


def frozen(
    *patterns: str, case: Case = QWEN3, losses: bool = False, path_a: bool = False
) -> tuple[Case, RouterCase, Cell]:
    """A cell on 2 ranks in which the named modules are frozen."""
    options = ParallelOptions(frozen_modules=patterns, expert_parallel=not path_a)
    router_case = RouterCase(options=LOSSES if losses else RouterOptions(), frozen=patterns)
    return case, router_case, Cell(world_size=2, sizes={} if path_a else EP2, options=options)


CELLS: dict[str, tuple[Case, RouterCase, Cell]] = {
    "losses-ep2": (QWEN3, RouterCase(options=LOSSES), Cell(world_size=4, sizes=EP2)),
    "losses-hsdp2-ep2": (
        QWEN3, RouterCase(options=LOSSES), Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2})
    ),
    "losses-path-a-accumulation-2": (
        QWEN3, RouterCase(options=LOSSES), Cell(world_size=2, options=PATH_A, num_micro_batches=2)
    ),
    "losses-checkpointed-packed-accumulation-2": (
        LONG,
        RouterCase(options=LOSSES),
        Cell(world_size=4, sizes=EP4, options=CHECKPOINTED, layout="packed", num_micro_batches=2),
    ),
    "losses-uneven-tokens-accumulation-2": (
        QWEN3, RouterCase(options=LOSSES), Cell(world_size=2, sizes=EP2, shares=(2, 6), num_micro_batches=2)
    ),
    "z-loss-alone-accumulation-2": (
        QWEN3, RouterCase(options=RouterOptions(z_loss_coef=0.1)), Cell(world_size=2, sizes=EP2, num_micro_batches=2)
    ),
    "bias-ep2": (DEEPSEEK, ALL, Cell(world_size=4, sizes=EP2)),
    "bias-ep4-checkpointed": (DEEPSEEK, ALL, Cell(world_size=4, sizes=EP4, options=CHECKPOINTED)),
    "bias-alone-path-a-accumulation-2": (
        DEEPSEEK, RouterCase(options=RouterOptions(bias_update_rate=0.01)),
        Cell(world_size=2, options=PATH_A, num_micro_batches=2),
    ),
    # The bias is a frozen parameter, which FSDP shards, and keeps on the host where it is told to.
    "bias-a-parameter-hsdp2-offload": (
        LAGUNA, ALL,
        Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2}, options=ParallelOptions(offload=True)),
    ),
    "bias-a-row-ep2": (
        ERNIE, RouterCase(options=RouterOptions(bias_update_rate=0.01)), Cell(world_size=4, sizes=EP2)
    ),
    "losses-cp2-tp2-ep4-accumulation-2": (
        LONG, RouterCase(options=LOSSES),
        Cell(world_size=4, sizes={"cp_size": 2, "tp_size": 2, "ep_size": 4}, layout="packed", num_micro_batches=2),
    ),
    "bias-tp2-ep2": (DEEPSEEK, ALL, Cell(world_size=4, sizes={"tp_size": 2, "ep_size": 2})),
    "frozen-embedding-and-router-tp2": (
        QWEN3, RouterCase(options=LOSSES, frozen=("model.embed_tokens", GATES)),
        Cell(
            world_size=2, sizes={"tp_size": 2}, options=ParallelOptions(frozen_modules=("model.embed_tokens", GATES))
        ),
    ),
    "frozen-router": frozen(GATES),
    "frozen-router-losses": frozen(GATES, losses=True),
    "frozen-experts": frozen(EXPERTS, losses=True),
    "frozen-experts-path-a": frozen(EXPERTS, losses=True, path_a=True),
    "frozen-embedding": frozen("model.embed_tokens", losses=True),
    "frozen-tied-embedding": frozen("model.embed_tokens", case=Case(tied=True)),
    "frozen-blocks-and-embedding": frozen("model.layers.0", "model.embed_tokens"),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected_of(reference_root: Path) -> Callable[[Case, RouterCase], Numbers]:
    """What one process computes, once for all cells that share it."""

    @functools.cache
    def compute(case: Case, router_case: RouterCase) -> Numbers:
        return compute_in_one_process(load_reference(case, reference_root), router_case)

    return compute


# Run by `make test-slow`: others show the same together with something else.
SLOW = {
    "losses-hsdp2-ep2",
    "losses-checkpointed-packed-accumulation-2",
    "z-loss-alone-accumulation-2",
    "bias-ep2",
    "bias-a-parameter-hsdp2-offload",
    "frozen-router",
    "frozen-tied-embedding",
    "frozen-experts-path-a",
    "frozen-blocks-and-embedding",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CELLS])
def test_parity_with_one_process(
    name: str, run_ranks: RunRanks, reference_root: Path, expected_of: Callable[[Case, RouterCase], Numbers]
) -> None:
    case, router_case, cell = CELLS[name]
    reference, expected = load_reference(case, reference_root), expected_of(case, router_case)
    for errors in run_ranks(run_router_cell, cell.world_size, cell, reference, router_case, expected):
        assert_within_tolerance(errors)
        router_losses = [errors[key] for key in ("aux_loss", "z_loss") if key in errors]
        assert len(router_losses) == bool(router_case.options.aux_loss_coef) + bool(router_case.options.z_loss_coef)
        assert all(error <= TOLERANCES["loss"] for error, _ in router_losses), errors


def test_the_reference_has_the_loss_of_transformers(
    reference_root: Path, expected_of: Callable[[Case, RouterCase], Numbers]
) -> None:
    expected = expected_of(QWEN3, RouterCase(options=LOSSES))
    reference = load_reference(QWEN3, reference_root)
    model = find_auto_class(build_config(QWEN3)).from_pretrained(reference.folder, dtype=torch.float32).eval()
    with torch.no_grad(), heard(model) as calls:
        for document in expected["documents"]:
            model(input_ids=torch.tensor([document.input_ids]), use_cache=False)
    logits = tuple(torch.cat([logits for logits, _ in layer]) for layer in calls.values())
    theirs = load_balancing_loss_func(logits, num_experts=8, top_k=2).item()
    assert abs(expected["aux_loss"] - theirs) <= TOLERANCES["loss"] * theirs
