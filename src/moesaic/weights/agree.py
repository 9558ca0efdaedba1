"""Fail together: one rank's failure becomes every rank's, so that none waits in a collective for a rank that left."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers themselves (not copies), under the Hugging Face module's own keys.

    A tied parameter appears once, under the name that comes first. An unsharded FSDP module is resharded by this.
    """
    # keep_vars hands out the tensors that the module owns; state_dict (not named_parameters) because its hooks undo the
    # wrappers' prefixes and reshard.
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def find_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    """The mesh with the most ranks among those of the DTensors, ``None`` where there is no DTensor."""
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return max(meshes, key=lambda mesh: mesh.mesh.numel(), default=None)


def raise_together(error: Exception | None, mesh: DeviceMesh | None, what: str) -> None:
    """Raise on every rank of ``mesh`` where any of them has an ``error``. One tiny all-reduce per mesh axis; every rank
    of ``mesh`` must call. Without a mesh, raise the calling rank's own.

    Raises:
        the rank's own ``error``; RuntimeError on ranks without one, where another rank has one.
    """
    if mesh is not None:
        num_failed = torch.tensor([int(error is not None)], device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(num_failed, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        if error is None and int(num_failed):
            raise RuntimeError(f"{what} failed on another rank; its own message says why.")
    if error is not None:
        raise error


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name in ``state_tensors`` -> the further names of the same tensor, for those that have any."""
    first: dict[int, str] = {}
    result: dict[str, tuple[str, ...]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            result[owner] = (*result.get(owner, ()), name)
    return result
