"""A sharded tensor brought together on one rank, by its exact blocks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import blocks_at, local_shape, shard_dim


@torch.no_grad()
def gather_to_rank_0(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole tensor on rank 0 of the default group, None elsewhere. Beside the shards only rank 0 holds more: the
    whole, and one shard at a time.

    Every rank of the tensor's mesh must call it, rank 0 among them; shards travel by point-to-point messages in the
    default group, one holder of each value sending. A plain tensor is the same on every rank already.
    """
    rank = dist.get_rank()
    if not isinstance(tensor, DTensor):
        return tensor if rank == 0 else None
    mesh, local = tensor.device_mesh, tensor.to_local()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device) if rank == 0 else None
    for coordinate in itertools.product(*map(range, mesh.shape)):
        is_replica = any(
            position and shard_dim(placement) is None
            for position, placement in zip(coordinate, tensor.placements, strict=True)
        )
        holder = int(mesh.mesh[coordinate])
        blocks = blocks_at(tensor.shape, tuple(mesh.shape), coordinate, tensor.placements)
        if is_replica or not blocks or rank not in (0, holder):
            continue
        if whole is None:
            dist.send(_as_bytes(local), dst=0)
            continue
        if holder == 0:
            part = local
        else:
            part = torch.empty(local_shape(blocks, tensor.ndim), dtype=tensor.dtype, device=local.device)
            dist.recv(_as_bytes(part), src=holder)
        for block in blocks:
            whole[block.global_slices] = part[block.local_slices]
    return whole


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (a copy where it isn't contiguous) as flat bytes, so that any dtype can be sent."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
