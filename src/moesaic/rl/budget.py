"""What roles and engines hold in each state of the hand-over, in bytes on this rank: planned, and counted.

| state       | roles                                                       | engines                         |
|-------------|-------------------------------------------------------------|---------------------------------|
| ``TRAIN``   | the one at work: weights, optimizer; in an update gradients | asleep                          |
| ``SYNC``    | the actor's weights                                         | weights, once the sync wakes it |
| ``ROLLOUT`` | nothing                                                     | weights                         |
| ``ASLEEP``  | nothing                                                     | asleep                          |

Planned from shapes, dtypes and placements alone; counted from the storages that are there. Activations, gathered
parameters and an engine's keys and values come on top, and are gone before the state is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.engines.base import Engine
from moesaic.engines.hf import HfEngine
from moesaic.ops.parking import local_storages, local_tensor
from moesaic.ops.placements import shard_dim
from moesaic.rl.roles import Role
from moesaic.weights.agree import state_tensors

What = Literal["weights", "optimizer", "gradients"]
# Axes that split a parameter before FSDP does. FSDP's own shards are padded to equal sizes, theirs are not.
MODEL_AXES = frozenset({"tp", "ep"})
COUNTER_BYTES = 4  # AdamW counts a parameter's steps in one fp32 number


class State(StrEnum):
    """What the ranks are doing."""

    TRAIN = "TRAIN"
    SYNC = "SYNC"
    ROLLOUT = "ROLLOUT"
    ASLEEP = "ASLEEP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one owner has on the device in one state.

    Attributes:
        role: at work, in ``TRAIN``.
        owner: a role's name, or ``engine 0``.
        num_bytes: on the device of this rank.
        num_parked: taken from there; of an engine that drops its weights, 0.
    """

    state: State
    role: str | None
    owner: str
    what: What
    num_bytes: int
    num_parked: int = 0


def budget_table(
    roles: Sequence[Role], engines: Sequence[Engine] = (), *, parks: bool = True, sleeps: bool = True
) -> tuple[Row, ...]:
    """A row for each state, owner and kind of memory, from shapes alone. Not collective; ranks may differ.

    Args:
        parks: roles that aren't at work are parked (``park_idle_roles``).
        sleeps: engines sleep while they don't generate (``free_cache_engine``).
    """
    turns: list[tuple[State, str | None]] = [(State.TRAIN, role.name) for role in roles]
    turns += [(State.SYNC, None), (State.ROLLOUT, None), (State.ASLEEP, None)]
    rows = []
    for state, at_work in turns:
        for role in roles:
            needed = needs(state, at_work, role, engines) if parks else ("weights", "optimizer", "gradients")
            for what, size in planned_bytes(role).items():
                # Gradients are made in an update: elsewhere there are none, parked or not.
                is_there = what in needed and (what != "gradients" or role.name == at_work)
                num_parked = 0 if is_there or what == "gradients" else size
                rows.append(_row(state, at_work, role.name, what, size if is_there else 0, num_parked))
        is_awake = state in (State.SYNC, State.ROLLOUT) or not sleeps
        for number, engine in enumerate(engines):
            size = engine_bytes(engine)
            rows.append(_row(state, at_work, f"engine {number}", "weights", size if is_awake else 0, 0))
    return tuple(rows)


def _row(state: State, at_work: str | None, owner: str, what: What, num_bytes: int, num_parked: int) -> Row:
    return Row(state=state, role=at_work, owner=owner, what=what, num_bytes=num_bytes, num_parked=num_parked)


def needs(state: State, at_work: str | None, role: Role, engines: Sequence[Engine]) -> tuple[What, ...]:
    """What of ``role`` has to be on the device in a state."""
    if state is State.TRAIN and role.name == at_work:
        return ("weights", "optimizer", "gradients")
    if state is State.SYNC and role.name == "actor":
        return ("weights",)
    shares = any(isinstance(engine, HfEngine) and engine.model is role.model for engine in engines)
    return ("weights",) if state is State.ROLLOUT and shares else ()


def count_resident(roles: Sequence[Role], engines: Sequence[Engine] = ()) -> dict[tuple[str, What], int]:
    """Owner and kind of memory -> bytes of the storages that are on the device now, each storage once."""
    counted: dict[tuple[str, What], int] = {}
    for role in roles:
        for what, tensors in tensors_of(role).items():
            counted[role.name, what] = sum(storage.nbytes() for storage in local_storages(tensors))
    for number, engine in enumerate(engines):
        own = engine_tensors(engine)
        # A mapped file's storage is all of the file, whoever else has a part in it.
        mapped = [each for each in map(local_tensor, own) if not each.untyped_storage().resizable()]
        plain = [each for each in own if local_tensor(each).untyped_storage().resizable()]
        size = sum(storage.nbytes() for storage in local_storages(plain)) + sum(each.nbytes for each in mapped)
        counted[f"engine {number}", "weights"] = size
    return counted


def budget_text(rows: Sequence[Row], *, parks: bool = True) -> str:
    """A table for people: a line for each state and owner, MiB on this rank. For logs and the run's folder."""
    lines = ["" if parks else "park_idle_roles: false: every role stays on the device in every state."]
    lines += [f"{'state':<16}{'owner':<12}{'what':<12}{'MiB':>12}{'parked MiB':>14}"]
    turns = dict.fromkeys((row.state, row.role) for row in rows)
    for state, role in turns:
        its = [row for row in rows if (row.state, row.role) == (state, role)]
        name = state.value if role is None else f"{state.value} {role}"
        for row in its:
            if row.num_bytes or row.num_parked:
                lines.append(f"{name:<16}{row.owner:<12}{row.what:<12}{_mib(row.num_bytes)}{_mib(row.num_parked, 14)}")
        total, parked = sum(row.num_bytes for row in its), sum(row.num_parked for row in its)
        lines.append(f"{name:<16}{'all':<12}{'':<12}{_mib(total)}{_mib(parked, 14)}")
    return "\n".join(line for line in lines if line) + "\n"


def _mib(num_bytes: int, width: int = 12) -> str:
    return f"{num_bytes / 2**20:>{width},.2f}"


# ------------------------------------------------------------------------------------------------------ roles, tensors


def tensors_of(role: Role) -> dict[What, list[Tensor]]:
    """What a role has on its device: what is on the host already (``offload``) is left out."""
    gradients = [param.grad for param in role.model.parameters() if param.grad is not None]
    every: dict[What, Iterable[Tensor]] = {
        "weights": state_tensors(role.model).values(),
        "optimizer": [] if role.optimizer is None else optimizer_tensors(role.optimizer),
        "gradients": gradients,
    }
    kind = role.meshes.dense.device_type
    return {
        what: [each for each in tensors if local_tensor(each).device.type == kind] for what, tensors in every.items()
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Moments and counters."""
    states = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def engine_tensors(engine: Engine) -> list[Tensor]:
    """An engine's own weights in this process; of a server's client there are none."""
    if not isinstance(engine, HfEngine) or not engine.owns_weights:
        return []
    return list(state_tensors(engine.model).values())


def planned_bytes(role: Role) -> dict[What, int]:
    """What a role's memory is when all of it is there, from shapes, dtypes and placements."""
    kind = role.meshes.dense.device_type
    offloads = role.recipe.offload and kind != "cpu"
    trained = [param for param in role.model.parameters() if param.requires_grad] if role.optimizer is not None else []
    on_device = [
        tensor
        for tensor in state_tensors(role.model).values()
        if not (offloads and isinstance(tensor, torch.nn.Parameter))
    ]
    moments = 0
    for param in trained:
        moments += 2 * _num_elements(param, padded=False) * param.element_size()
    # The fused kernel has its counters beside the parameters, another on the host.
    counts = role.recipe.optim_config.implementation == "fused" or kind == "cpu"
    return {
        "weights": sum(_num_elements(tensor, padded=True) * tensor.element_size() for tensor in on_device),
        "optimizer": 0 if offloads else moments + COUNTER_BYTES * len(trained) * counts,
        "gradients": 0 if offloads else sum(_num_elements(p, padded=True) * p.element_size() for p in trained),
    }


def engine_bytes(engine: Engine) -> int:
    """What an engine's weights are in this process."""
    return sum(_num_elements(each, padded=True) * each.element_size() for each in engine_tensors(engine))


def _num_elements(tensor: Tensor, *, padded: bool) -> int:
    """Elements that this rank has of a parameter or buffer; with those that FSDP adds to make its shards equal.

    Example: 7 rows over 4 ranks of FSDP are 2, 2, 2, 1; padded, 2 on each.
    """
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    shape, mesh = list(tensor.shape), tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = sorted(range(mesh.ndim), key=lambda axis: names[axis] not in MODEL_AXES)
    for axis in axes:
        dim = shard_dim(tensor.placements[axis])
        if dim is not None:
            chunk = -(-shape[dim] // mesh.size(axis))
            is_padded = padded and names[axis] not in MODEL_AXES
            rest = max(shape[dim] - mesh.get_local_rank(axis) * chunk, 0)
            shape[dim] = chunk if is_padded else min(chunk, rest)
    return math.prod(shape)
