"""What each rank runs for a cell of reinforcement learning: forwards and updates of a role, compared with one
process's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from moesaic.config.recipe import Recipe
from moesaic.data.batch import Batch
from moesaic.meshes import Meshes, build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.rl.forward import Column, compute_columns, compute_scores, compute_topk
from moesaic.rl.roles import Role
from moesaic.rl.tokens import Tables
from moesaic.rl.update import _Loss, update_actor, update_critic
from moesaic.weights.load import load_weights
from tests.oracle.cells import ShardOptimizer, grads_of, largest, worst
from tests.oracle.reference import OPTIMIZERS
from tests.oracle.rl_reference import MAX_NORM, SCHEDULES, RlReference


@dataclass(frozen=True, slots=True, kw_only=True)
class RlCell:
    """One topology, and how trajectories become micro-batches.

    Attributes:
        sizes: keyword arguments of ``build_meshes``.
        batches: fields of the recipe: ``micro_batch_size`` (padded) or ``micro_batch_tokens`` (end to end), and more.
    """

    world_size: int
    sizes: dict[str, int] = field(default_factory=dict)
    options: ParallelOptions = field(default_factory=ParallelOptions)
    batches: dict[str, Any] = field(default_factory=lambda: {"micro_batch_size": 1})


class Recorder(torch.optim.SGD):
    """Moves nothing, and compares the gradients of each step."""

    def __init__(self, model: PreTrainedModel, reference: dict[str, Tensor]) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.errors: list[tuple[float, str]] = []
        self._model, self._reference = model, reference

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.errors.append(worst(_as_named(grads_of(self._model)), self._reference))


def run_rl_cell(rank: int, cell: RlCell, references: list[RlReference]) -> list[dict[str, Any]]:
    """For each reference, all of one model and role: the worst error per quantity, as ``assert_within_tolerance`` wants
    them, and the tables, which must be the same on all ranks."""
    meshes = build_meshes("cpu", **cell.sizes)
    first = references[0]
    model = from_pretrained(
        first.folder,
        meshes,
        options=cell.options,
        attn_implementation="sdpa",
        value_head="trained" if first.case.role == "critic" else None,
    )
    return [_run_case(cell, meshes, model, reference) for reference in references]


def _run_case(cell: RlCell, meshes: Meshes, model: PreTrainedModel, reference: RlReference) -> dict[str, Any]:
    load_weights(model, reference.folder)  # from the beginning again
    case, folder = reference.case, reference.folder

    def role(optimizer: Any, **fields: Any) -> Role:
        recipe: Recipe = case.recipe(folder, **cell.batches, **fields)
        return Role(name=case.role, recipe=recipe, meshes=meshes, model=model, optimizer=cast(Optimizer, optimizer))

    wanted = cast(tuple[Column, ...], tuple(reference.columns))
    tables = compute_columns(role(None), reference.experience, wanted, temperature=case.temperature)
    recorder = Recorder(model, reference.grads)
    metrics = update(role(recorder, max_grad_norm=None), reference)
    assert metrics.keys() >= reference.metrics.keys() and metrics[f"{case.role}/num_skipped"] == 0
    assert metrics[f"{case.role}/lr"] == 0
    (grads,) = recorder.errors
    norm = metrics[f"{case.role}/grad_norm"]
    errors: dict[str, Any] = {
        "columns": worst(tables, reference.columns),
        "loss": largest(
            {name: abs(metrics[name] - value) / max(size, 1e-30) for name, (value, size) in reference.metrics.items()}
        ),
        "grads": grads,
        "norms": (abs(norm - reference.norm) / reference.norm, "2.0"),
        "tables": tables,
    }
    load_weights(model, folder)
    optimizer = ShardOptimizer(OPTIMIZERS[case.optimizer], model.parameters())
    update(role(optimizer, max_grad_norm=MAX_NORM, **SCHEDULES[case.optimizer]), reference)
    errors[case.optimizer] = worst(_as_named(dict(model.named_parameters())), reference.weights)
    return errors


def update(role: Role, reference: RlReference) -> dict[str, float]:
    experience, mask_BT = reference.experience, reference.mask_BT
    if role.name == "critic":
        return update_critic(role, experience, mask_BT)
    return update_actor(role, experience, mask_BT, topk=reference.topk)


def _as_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A value model's head is called as a classifier's."""
    is_critic = any(name == "lm_head.weight" and tensor.shape[0] == 1 for name, tensor in tensors.items())
    return {"score.weight" if is_critic and name == "lm_head.weight" else name: t for name, t in tensors.items()}


def run_faulty_cell(rank: int, fault: str, cell: RlCell, reference: RlReference) -> float:
    """The error of the gradients with a fault of public systems planted."""
    with FAULTS[fault]():
        return float(run_rl_cell(rank, cell, [reference])[0]["grads"][0])


@contextmanager
def means_of_own_parts() -> Iterator[None]:
    """GSPO's ratio of a trajectory is each rank's own, of the tokens that it has."""
    build = Tables.build

    def without_group(*args: Any) -> Tables:
        return replace(build(*args), cp_group=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "build", without_group)
        yield


@contextmanager
def own_counts() -> Iterator[None]:
    """A micro-batch's loss is the mean over its own tokens, and then the mean over micro-batches is taken."""
    call = _Loss.__call__

    def averaged(self: Any, logits: Tensor, batch: Batch) -> Tensor:
        num_own = (self._weights[batch.kept_places] * (batch.kept_places >= 0) > 0).sum().clamp(min=1)
        return call(self, logits, batch) * self._num_trained / num_own / NUM_MICRO_BATCHES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Loss, "__call__", averaged)
        yield


NUM_MICRO_BATCHES = 3
FAULTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"means-of-own-parts": means_of_own_parts, "own-counts": own_counts}
)


def run_scores(rank: int, cell: RlCell, reference: RlReference) -> Tensor:
    """What a reward model says of the reference's trajectories."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes, attn_implementation="sdpa", value_head="trained").eval()
    recipe = reference.case.recipe(reference.folder, **cell.batches)
    return compute_scores(Role(name="reward", recipe=recipe, meshes=meshes, model=model), reference.experience)


def run_topk(rank: int, cell: RlCell, reference: RlReference, k: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """A teacher's likeliest tokens; and whether the model is still in the mode it was in."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes, attn_implementation="sdpa").eval()
    recipe = reference.case.recipe(reference.folder, **cell.batches)
    role = Role(name="teacher", recipe=recipe, meshes=meshes, model=model)
    found = compute_topk(role, reference.experience, k, temperature=reference.case.temperature)
    return found.rows_BT, found.ids_MK, found.logprobs_MK, not model.training
