"""A whole state dict on one rank into a sharded model: each rank gets its shards, parameter by parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, blocks_at, local_shape
from moesaic.weights.agree import find_mesh, raise_together, state_tensors, tied_names


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor] | None, src: int = 0) -> None:
    """Fill ``model``, sharded or not, from the state dict that one rank holds, in place.

    Every rank of the model's meshes must call it, outside forward and backward; a process without DTensors alone. A
    rank receives its own shards and nothing else, by point-to-point messages in the default group; beside the state
    dict itself, no rank holds more than one parameter's shard at a time. Values are cast to each parameter's dtype.

    Args:
        state: on rank ``src`` whole tensors under the Hugging Face module's own names (``model.state_dict()`` of an
            unsharded one), on any device; None on every other rank. A tied parameter may be there once, under any of
            its names, or equal under several.
        src: rank in the default group.

    Raises:
        ValueError: ``state`` is missing on ``src``, or given elsewhere; names that are missing, mis-shaped or unknown,
            all of them in one message; tied tensors that differ. Nothing was changed then.
        RuntimeError: another rank failed.
    """
    own = state_tensors(model)
    mesh = find_mesh(own.values())
    ranks: list[int] = [src] if mesh is None else mesh.mesh.flatten().tolist()
    rank = src if mesh is None else dist.get_rank()
    error: Exception | None = None
    values: dict[str, torch.Tensor] = {}
    try:
        values = _check(model, own, state, is_src=rank == src, is_member=src in ranks)
    except ValueError as problem:
        error = problem
    raise_together(error, mesh, "load_full_state_dict")
    for name, tensor in own.items():
        if rank == src:
            _send(tensor, values[name], ranks, src)
        else:
            _receive(tensor, src)


def _check(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
    *,
    is_src: bool,
    is_member: bool,
) -> dict[str, torch.Tensor]:
    """What each parameter is filled from, on ``src``; nothing elsewhere.

    Raises:
        ValueError: see ``load_full_state_dict``.
    """
    if not is_member:
        raise ValueError("src is none of the model's ranks. Name one that holds a part of the model.")
    if not is_src:
        if state is not None:
            raise ValueError(
                "state is given on a rank that isn't src. Pass None there, or this rank as src everywhere."
            )
        return {}
    if state is None:
        raise ValueError("state=None on rank src, which has to hold it. Pass the state dict, or another rank as src.")
    aliases = tied_names(model)
    values: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    used: set[str] = set()
    for name, tensor in own.items():
        found = [each for each in (name, *aliases.get(name, ())) if each in state]
        used.update(found)
        if not found:
            problems.append(f"missing: {name} {list(tensor.shape)}")
            continue
        values[name] = state[found[0]]
        wrong = [each for each in found if state[each].shape != tensor.shape]
        problems += [f"shape: {each} is {list(state[each].shape)}, needs {list(tensor.shape)}" for each in wrong]
        if not wrong and any(not torch.equal(state[each], values[name]) for each in found[1:]):
            problems.append(f"tied: {' and '.join(found)} are one parameter of this model, but differ")
    problems += [f"unknown: {name} {list(state[name].shape)} fills nothing" for name in state if name not in used]
    if problems:
        raise ValueError(
            f"the state dict doesn't fit {type(model).__name__}; names and shapes are those of the unsharded module's "
            f"state_dict(). {len(problems)} problems:\n  " + "\n  ".join(problems)
        )
    return values


def _send(tensor: torch.Tensor, value: torch.Tensor, ranks: list[int], src: int) -> None:
    """Each rank's part of one parameter from ``src`` to it, and to itself."""
    device = _exchange_device(tensor)
    for rank, blocks in _held(tensor, ranks):
        if not blocks:
            continue
        part = torch.empty(local_shape(blocks, tensor.ndim), dtype=tensor.dtype, device=device)
        for block in blocks:
            part[block.local_slices].copy_(value[block.global_slices])
        if rank == src:
            _local(tensor).copy_(part)
        else:
            dist.send(_as_bytes(part), dst=rank)


def _receive(tensor: torch.Tensor, src: int) -> None:
    local = _local(tensor)
    if local.numel():
        part = torch.empty(local.shape, dtype=local.dtype, device=_exchange_device(tensor))
        dist.recv(_as_bytes(part), src=src)
        local.copy_(part)


def _exchange_device(tensor: torch.Tensor) -> torch.device | str:
    """Where both sides hold what is sent: a message goes by the backend of its device, and offloaded shards lie on the
    CPU of a mesh of accelerators."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device


def _held(tensor: torch.Tensor, ranks: list[int]) -> Iterator[tuple[int, tuple[Block, ...]]]:
    """(rank, what it holds of the tensor)."""
    if not isinstance(tensor, DTensor):
        origin = (0,) * tensor.ndim
        whole = (Block(origin, origin, tuple(tensor.shape)),) if tensor.numel() else ()
        yield from ((rank, whole) for rank in ranks)
        return
    shape = tuple(tensor.device_mesh.shape)
    coordinates = itertools.product(*map(range, shape))
    for coordinate, rank in zip(coordinates, tensor.device_mesh.mesh.flatten().tolist(), strict=True):
        yield rank, blocks_at(tensor.shape, shape, coordinate, tensor.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, so that any dtype can be sent."""
    return tensor.reshape(-1).view(torch.uint8)
