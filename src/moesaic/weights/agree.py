"""Fail together: one rank's failure becomes every rank's, so that none waits in a collective for a rank that left."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moesaic.runtime import PeerFailed

# What torch.compile and a checkpoint wrapper put into the names of the modules that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """``layers.0.mlp`` of ``layers.0._orig_mod.mlp``: the name that it has without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrap(model: nn.Module) -> nn.Module:
    """The module itself, of one that is wrapped as a whole."""
    for name, child in model.named_children():
        if name in WRAPPERS:
            return unwrap(child)
    return model


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers themselves (not copies), under the Hugging Face module's own keys.

    A tied parameter appears once, under the name that comes first. An unsharded FSDP module is resharded by this.
    """
    # keep_vars hands out the tensors that the module owns; state_dict (not named_parameters) because its hooks undo
    # most wrappers' prefixes and reshard.
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[plain_name(name)] = tensor
    return named


def find_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    """The mesh with the most ranks among those of the DTensors, ``None`` where there is no DTensor."""
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return max(meshes, key=lambda mesh: mesh.mesh.numel(), default=None)


def raise_together(error: Exception | None, mesh: DeviceMesh | None, what: str, *, step: int = 0) -> None:
    """Raise on every rank of ``mesh`` where any of them has an ``error``. One tiny all-reduce per mesh axis; every rank
    of ``mesh`` must call. Without a mesh, raise the calling rank's own.

    Args:
        step: what all ranks must be at, a number below 2**62.

    Raises:
        the rank's own ``error``; PeerFailed (a RuntimeError) on ranks without one, where another rank has one;
        RuntimeError on all where their steps differ.
    """
    if mesh is not None:
        is_failed, is_in_step = _compare(error is not None, step, mesh)
        if error is None and is_failed:
            raise PeerFailed(f"{what} failed on another rank; its own message says why.")
        if error is None and not is_in_step:
            raise RuntimeError(
                f"{what}: the ranks aren't in step. All of them must do the same, with equal arguments, in one order."
            )
    if error is not None:
        raise error


def announce_stop(mesh: DeviceMesh | None) -> None:
    """Take part in the ``raise_together`` that the other ranks of ``mesh`` come to next, as one that failed; says
    nothing of what they have found."""
    if mesh is not None and dist.is_initialized():
        _compare(True, 0, mesh)


def _compare(has_failed: bool, step: int, mesh: DeviceMesh) -> tuple[bool, bool]:
    """Whether any rank has failed, and whether all are at one step."""
    values = torch.tensor([int(has_failed), step, -step], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    num_failed, last, first = values.tolist()
    return num_failed > 0, last == -first


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name in ``state_tensors`` -> the further names of the same tensor, for those that have any."""
    first: dict[int, str] = {}
    result: dict[str, tuple[str, ...]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = plain_name(name)
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            result[owner] = (*result.get(owner, ()), name)
    return result
