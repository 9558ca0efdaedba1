"""What router training and frozen modules leave behind: checkpoints, exports, skipped steps, experts without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moesaic.checkpoint import TrainState, load_checkpoint, save_checkpoint
from moesaic.config import LrSchedulerConfig, OptimConfig
from moesaic.meshes import build_meshes
from moesaic.model.build import find_auto_class
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.train.optim import build_optimizer, build_scheduler
from moesaic.train.router import RouterOptions, RouterTraining, build_router_training
from moesaic.train.step import train_step
from moesaic.weights import export_hf
from tests.oracle.cells import Cell, build_batch, full, share_documents
from tests.oracle.reference import Case, Reference, build_config, load_reference
from tests.pool import RunRanks

DEEPSEEK = Case(family="deepseek_v3", is_listed=True)
RATE = 0.01
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CELL = Cell(world_size=2, sizes={"ep_size": 2})
FROZEN = ("model.layers.*.mlp.experts", "model.embed_tokens")
FROZEN_PARAMS = (".experts.", "embed_tokens")


class Position:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def build(reference: Reference, meshes: Any) -> tuple[TrainState, RouterTraining]:
    options = ParallelOptions(frozen_modules=FROZEN)
    model = from_pretrained(reference.folder, meshes, options=options)
    router = build_router_training(model, RouterOptions(aux_loss_coef=0.1, bias_update_rate=RATE), meshes)
    assert router is not None
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), 1e-3)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(), num_steps=4)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=Position()), router


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def stop_and_resume(rank: int, reference: Reference, folder: Path) -> dict[str, Any]:
    meshes = build_meshes("cpu", **CELL.sizes)
    batches = [build_batch(docs, "padded") for docs in share_documents(reference.documents, CELL, rank)]
    straight, router = build(reference, meshes)
    first = whole(straight.model)

    def step(state: TrainState, router: RouterTraining) -> None:
        train_step(state.model, batches, state.optimizer, state.scheduler, meshes, 1.0, router=router)

    step(straight, router)
    path = save_checkpoint(folder, straight, step=1)
    saved = whole(straight.model)
    step(straight, router)
    resumed, router = build(reference, meshes)
    load_checkpoint(path, resumed)
    loaded = whole(resumed.model)
    step(resumed, router)
    export_hf(resumed.model, folder / "export")
    num_states = [len(state.optimizer.state) for state in (straight, resumed)]
    num_trained = sum(param.requires_grad for param in straight.model.parameters())
    whole_ones = {"first": first, "saved": saved, "loaded": loaded, "straight": whole(straight.model)}
    return {**whole_ones, "resumed": whole(resumed.model), "num_states": num_states, "num_trained": num_trained}


def test_biases_and_frozen_weights_are_saved_resumed_and_exported(
    run_ranks: RunRanks, reference_root: Path, tmp_path: Path
) -> None:
    reference = load_reference(DEEPSEEK, reference_root)
    results = run_ranks(stop_and_resume, 2, reference, tmp_path)
    one, other = results
    for name, value in one["saved"].items():
        assert torch.equal(value, one["loaded"][name]), name
        assert torch.equal(one["straight"][name], one["resumed"][name]), name
        assert torch.equal(one["straight"][name], other["straight"][name]), name
        is_frozen = any(part in name for part in FROZEN_PARAMS)
        assert torch.equal(one["first"][name], one["straight"][name]) == is_frozen, name
    steps = (one["straight"][BIAS] / RATE).round()
    assert torch.equal(one["straight"][BIAS], (steps * RATE)) and steps.abs().max() == 2
    assert one["num_states"] == [one["num_trained"]] * 2
    auto_class = find_auto_class(build_config(DEEPSEEK))
    exported = auto_class.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    for name, value in exported.items():
        assert torch.equal(value, one["resumed"][name]), name


def skip_a_step(rank: int, reference: Reference) -> tuple[bool, float, dict[str, float]]:
    meshes = build_meshes("cpu", **CELL.sizes)
    state, router = build(reference, meshes)
    batches = [build_batch(docs, "padded") for docs in share_documents(reference.documents, CELL, rank)]

    def spoil() -> None:
        param = state.model.get_output_embeddings().weight
        param.grad.to_local().fill_(float("nan"))

    result = train_step(state.model, batches, state.optimizer, None, meshes, None, before_clip=spoil, router=router)
    return result.is_finite, state.model.get_buffer(BIAS).abs().max().item(), router.measure()


def test_a_skipped_step_moves_no_bias(run_ranks: RunRanks, reference_root: Path) -> None:
    for is_finite, largest, metrics in run_ranks(skip_a_step, 2, load_reference(DEEPSEEK, reference_root)):
        assert not is_finite and largest == 0 == metrics["max_bias"]
        assert metrics["aux_loss"] > 0 and metrics.keys() == {"aux_loss", "max_bias"}


def decay_alone(rank: int, reference: Reference) -> dict[str, list[float]]:
    """Per layer: how far each expert's weights are from what weight decay alone makes of them; 0 without tokens."""
    cell = Cell(world_size=2, sizes={"ep_size": 2})
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.5), 0.1)
    first = whole(model)
    batches = [build_batch(docs, "padded") for docs in share_documents(reference.documents, cell, rank)]
    train_step(model, batches, optimizer, None, meshes, None)
    last = whole(model)
    assert dist.is_initialized()
    stacks = [name for name in first if name.endswith("gate_up_proj")]
    return {name: (last[name] - first[name] * (1 - 0.1 * 0.5)).abs().amax((1, 2)).tolist() for name in stacks}


def test_experts_without_tokens_decay_like_all_others(run_ranks: RunRanks, reference_root: Path) -> None:
    """Their gradient is zero and not none, so AdamW decays them as one process does."""
    case = Case(vocabulary=2)
    for errors in run_ranks(decay_alone, 2, load_reference(case, reference_root)):
        for layer in errors.values():
            assert 0 < sum(error < 1e-6 for error in layer) < case.num_experts, layer


def bias_refusal(rank: int, compute_dtype: torch.dtype, reference: Reference) -> str:
    meshes = build_meshes("cpu", ep_size=2)
    model = from_pretrained(reference.folder, meshes, options=ParallelOptions(compute_dtype=compute_dtype))
    try:
        build_router_training(model, RouterOptions(bias_update_rate=RATE), meshes)
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_bias_that_would_be_gathered_in_bf16_is_refused(run_ranks: RunRanks, reference_root: Path) -> None:
    """laguna's is a parameter; deepseek_v3's is a buffer, which stays as it is."""
    laguna = load_reference(Case(family="laguna", is_listed=True), reference_root)
    deepseek = load_reference(DEEPSEEK, reference_root)
    for said in run_ranks(bias_refusal, 2, torch.bfloat16, laguna):
        assert "gathered in the computing type" in said and "e_score_correction_bias" in said
    assert run_ranks(bias_refusal, 2, torch.float32, laguna) == ["taken"] * 2
    assert run_ranks(bias_refusal, 2, torch.bfloat16, deepseek) == ["taken"] * 2
