"""The gradient norm over any mix of meshes, from the gradients' own placements, and clipping by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float | None, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; every rank must call it.

    One all-reduce per mesh on which parameters live (over all its ranks). A value that several ranks hold (a Replicate
    axis) counts once. A parameter without a gradient counts as zero.

    Args:
        parameters: DTensors on any meshes, or plain tensors (equal on every rank, counted once).
        max_norm: None only measures.
        norm_type: p >= 1, or ``inf``.

    Returns:
        The norm before clipping, 0-D fp32, the same on every rank.

    Raises:
        ValueError: a gradient is still Partial on an axis: nothing has reduced it.
    """
    params = list(parameters)
    total = _global_norm(params, norm_type)
    if max_norm is not None:
        # As torch.nn.utils.clip_grad_norm_: no branch on the value, so no host read.
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        grads = [_local(param.grad) for param in params if param.grad is not None]
        for device_grads in _by_device(grads).values():
            torch._foreach_mul_(device_grads, coefficient.to(device_grads[0].device))
    return total


def _global_norm(params: list[nn.Parameter], norm_type: float) -> Tensor:
    """(sum over meshes of the p-th powers)^(1/p), or the maximum for p = inf."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    powers = [_reduced_power(mesh, members, norm_type) for mesh, members in groups.items()]
    if not powers:
        return torch.zeros(())
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    return stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1.0 / norm_type)


def _reduced_power(mesh: DeviceMesh | None, params: list[nn.Parameter], norm_type: float) -> Tensor:
    """Sum of |g|^p (or maximum) over the parameters of one mesh, each distinct value once. 0-D fp32."""
    grads = [param.grad for param in params if param.grad is not None and _local(param.grad).numel()]
    # Where the mesh's collectives run; offloaded gradients lie on the host, and only their norms come here.
    device = params[0].device if mesh is None else torch.device(mesh.device_type)
    power = torch.zeros((), dtype=torch.float32, device=device)
    if grads:
        norms = torch.cat([part.to(device) for part in _norms(grads, norm_type)])
        if math.isinf(norm_type):
            # A maximum over ranks may drop NaN, depending on which rank has it; infinity it keeps.
            power = torch.nan_to_num(norms.max(), nan=math.inf, posinf=math.inf)
        else:
            copies = torch.tensor([_num_copies(grad) for grad in grads], dtype=torch.float32, device=device)
            power = (norms.pow(norm_type) / copies).sum()
    if mesh is not None:
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(power, op=op, group=_flat_group(mesh))
    return power


def _norms(grads: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each local gradient, in the order of ``grads``; a 1-D tensor for each run of one device."""
    runs = itertools.groupby(map(_local, grads), key=lambda grad: grad.device)
    return [torch.stack(torch._foreach_norm(list(run), norm_type, dtype=torch.float32)) for _, run in runs]


def _num_copies(grad: Tensor) -> int:
    """How many ranks of its mesh hold each value of a gradient: the product of its Replicate axes."""
    if not isinstance(grad, DTensor):
        return 1
    if any(isinstance(placement, Partial) for placement in grad.placements):
        raise ValueError(f"gradient with placements {grad.placements}: not reduced yet; run FSDP's reduction first.")
    sizes = [grad.device_mesh.size(axis) for axis, p in enumerate(grad.placements) if isinstance(p, Replicate)]
    return math.prod(sizes)


def _flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One group over all ranks of a mesh, so that one all-reduce does; created once per mesh by torch."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups
