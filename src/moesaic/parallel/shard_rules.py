"""Which tensor dim FSDP shards. The only place that decides it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from moesaic.ops.placements import shard_dim

logger = logging.getLogger(__name__)

ShardPlacementFn = Callable[[nn.Parameter], Shard]


def first_even_dim(shape: tuple[int, ...], num_shards: int, taken: frozenset[int] = frozenset()) -> int | None:
    """First dim that ``num_shards`` divides and that is not in ``taken``, or None.

    Example: ``(8, 6, 64)`` over 4 with dim 0 taken -> 2 (6 % 4 != 0).
    """
    return next((dim for dim, size in enumerate(shape) if dim not in taken and size % num_shards == 0), None)


def build_expert_placement_fn(efsdp_size: int) -> ShardPlacementFn:
    """Placement of an experts parameter over efsdp: the first dim that EP left free and that divides evenly.

    Sharding another dim than EP's gives placements ``(Shard(1), Shard(0))`` on ``(efsdp, ep)`` and an exact
    ``full_tensor()``. Where no other dim divides, FSDP falls back to EP's dim 0 as a ``_StridedShard``: rank 0 logs
    it, once for each shape.
    """
    logged: set[tuple[int, ...]] = set()

    def placement(param: nn.Parameter) -> Shard:
        taken = (
            {dim for dim in map(shard_dim, param.placements) if dim is not None} if isinstance(param, DTensor) else ()
        )
        dim = first_even_dim(tuple(param.shape), efsdp_size, frozenset({0, *taken}))
        if dim is None and tuple(param.shape) not in logged and dist.get_rank() == 0:
            logged.add(tuple(param.shape))
            logger.warning(
                "experts parameter %s: no dim but the experts' own divides by efsdp=%d; sharding dim 0 (strided).",
                tuple(param.shape),
                efsdp_size,
            )
        return Shard(dim or 0)

    return placement


def build_mixed_placement_fn(
    experts_params: set[nn.Parameter], efsdp_mesh: DeviceMesh
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Placement for one unit of two meshes: experts over ``efsdp_mesh``, everything else as the unit's own mesh says.

    Args:
        experts_params: the experts' parameters, split over EP.
        efsdp_mesh: ``efsdp``, or ``(edp, efsdp)`` for replicated experts.
    """
    # One object for all units: FSDP tells its groups of parameters apart by it.
    info = (
        FSDPMeshInfo(efsdp_mesh, shard_mesh_dim=0)
        if efsdp_mesh.ndim == 1
        else HSDPMeshInfo(efsdp_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    place_expert = build_expert_placement_fn(efsdp_mesh.size(-1))

    def placement(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(place_expert(param), info) if param in experts_params else None

    return placement


def build_even_placement_fn(num_shards: int) -> ShardPlacementFn:
    """Placement without padding: the first dim that ``num_shards`` divides, else dim 0. Path A's rule.

    Example: stacked experts ``[7, 128, 64]`` over 4 -> Shard(1); a norm of 66 over 4 -> Shard(0), padded.
    """

    def placement(param: nn.Parameter) -> Shard:
        return Shard(first_even_dim(tuple(param.shape), num_shards) or 0)

    return placement
