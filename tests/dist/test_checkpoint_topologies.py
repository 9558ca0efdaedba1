"""A run of an EP model that resumes on another topology goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic.checkpoint import TrainState, load_checkpoint, save_checkpoint
from moesaic.config import LrSchedulerConfig, OptimConfig
from moesaic.meshes import Meshes, build_meshes
from moesaic.ops.gather import gather_to_rank_0
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.train.optim import build_optimizer, build_scheduler
from moesaic.train.step import train_step
from tests.oracle.cells import TOLERANCES, Cell, build_batch, rel_error, share_documents
from tests.oracle.reference import Case, Reference, load_reference

CASE = Case()
# Topologies that a run may go on with: ranks, and sizes of build_meshes; None for path A.
TOPOLOGIES: dict[str, tuple[int, dict[str, int] | None]] = {
    "ep4": (4, {"ep_size": 4}),
    "ep1-efsdp2": (2, {}),
    "ep2-on-2-ranks": (2, {"ep_size": 2}),
    "hsdp2-ep2": (4, {"ep_size": 2, "mp_replicate_size": 2}),
    "path-a": (2, None),
}


class NoData:
    """A position of no data: every step sees all documents."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert state == {}


def build_state(folder: Path, sizes: dict[str, int] | None) -> tuple[TrainState, Meshes]:
    meshes = build_meshes("cpu", **(sizes or {}))
    options = ParallelOptions(expert_parallel=sizes is not None)
    model = from_pretrained(folder, meshes, options=options, attn_implementation="sdpa")
    optimizer = build_optimizer(model, OptimConfig(eps=1e-4, weight_decay=0.1), 1e-3)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(name="linear"), num_steps=4)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=NoData()), meshes


def run_steps(state: TrainState, meshes: Meshes, reference: Reference, rank: int, num_steps: int) -> None:
    batches = [build_batch(docs, "padded") for docs in share_documents(reference.documents, cell_of(meshes), rank)]
    for _ in range(num_steps):
        train_step(state.model, batches, state.optimizer, state.scheduler, meshes, max_grad_norm=1.0)


def cell_of(meshes: Meshes) -> Cell:
    return Cell(world_size=meshes.sizes.world_size)


def whole_state(state: TrainState) -> dict[str, torch.Tensor]:
    """On rank 0, weights and moments by name; elsewhere nothing."""
    wholes: dict[str, torch.Tensor] = {}
    for name, param in state.model.named_parameters():
        assert isinstance(param, nn.Parameter)
        moments = state.optimizer.state[param]
        for key, tensor in (("param", param), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            whole = gather_to_rank_0(tensor.detach())
            if whole is not None:
                wholes[f"{key} {name}"] = whole.clone()
    return wholes


def save_and_go_on(rank: int, reference: Reference, folder: str) -> Any:
    state, meshes = build_state(reference.folder, {"ep_size": 2})
    run_steps(state, meshes, reference, rank, 2)
    save_checkpoint(Path(folder), state, step=2)
    saved = whole_state(state)
    run_steps(state, meshes, reference, rank, 2)
    return saved, whole_state(state), state.scheduler.get_last_lr()


def load_and_go_on(rank: int, reference: Reference, folder: str, sizes: dict[str, int] | None) -> Any:
    state, meshes = build_state(reference.folder, sizes)
    assert load_checkpoint(Path(folder) / "step-000002", state) == 2
    loaded = whole_state(state)
    run_steps(state, meshes, reference, rank, 2)
    return loaded, whole_state(state), state.scheduler.get_last_lr()


def test_other_topologies_go_on_where_the_first_stopped(run_ranks, reference_root: Path, tmp_path: Path) -> None:
    """4 steps on ep 2 and efsdp 2, with a checkpoint after 2; from it, the last 2 elsewhere."""
    reference = load_reference(CASE, reference_root)
    saved, expected, lr = run_ranks(save_and_go_on, 4, reference, str(tmp_path))[0]
    assert len(saved) > 30
    assert not any(torch.equal(saved[key], value) for key, value in expected.items() if "gate_up_proj" in key)
    for name, (world_size, sizes) in TOPOLOGIES.items():
        loaded, reached, resumed_lr = run_ranks(load_and_go_on, world_size, reference, str(tmp_path), sizes)[0]
        assert loaded.keys() == saved.keys(), name
        assert all(torch.equal(loaded[key], value) for key, value in saved.items()), name
        assert resumed_lr == lr
        errors = {key: rel_error(reached[key], value) for key, value in expected.items()}
        too_large = {key: error for key, error in errors.items() if error > TOLERANCES["adamw"]}
        assert not too_large, name
