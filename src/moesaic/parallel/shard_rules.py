"""Which tensor dim FSDP shards. The only place that decides it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsOnMesh:
    """Parameters that a unit shards over another mesh than its own (1-D, or replicas x shards), along their own dim."""

    params: set[nn.Parameter]
    mesh: DeviceMesh
    place: ShardPlacementFn


def build_mixed_placement_fn(
    others: Sequence[ParamsOnMesh], place: ShardPlacementFn | None = None
) -> Callable[[nn.Parameter], ShardPlacementResult | Shard | None]:
    """Placement for units of several meshes: ``others`` over theirs, every other parameter over the unit's own mesh.

    Args:
        place: the dim of every other parameter; None: dim 0.
    """
    # One object for all units: FSDP tells its groups of parameters apart by it.
    infos = [_mesh_info(other.mesh) for other in others]

    def placement(param: nn.Parameter) -> ShardPlacementResult | Shard | None:
        for other, info in zip(others, infos, strict=True):
            if param in other.params:
                return ShardPlacementResult(other.place(param), info)
        return None if place is None else place(param)

    return placement


def build_free_placement_fn(num_shards: int) -> ShardPlacementFn:
    """Placement of a parameter that another axis has split already, over ``num_shards`` ranks of FSDP.

    Dim 0 where it is free, else the first free dim that divides evenly, else dim 0 once more (strided).
    Example, over 4: ``[48, 64]`` split along dim 0 by tp -> Shard(1); split along dim 1 -> Shard(0); a bias -> strided.
    """

    def placement(param: nn.Parameter) -> Shard:
        assert isinstance(param, DTensor), "split by no axis"
        taken = frozenset(dim for dim in map(shard_dim, param.placements) if dim is not None)
        return Shard(0 if 0 not in taken else first_even_dim(tuple(param.shape), num_shards, taken) or 0)

    return placement


def build_even_placement_fn(num_shards: int) -> ShardPlacementFn:
    """Placement without padding: the first dim that ``num_shards`` divides, else dim 0. Path A's rule.

    Example: stacked experts ``[7, 128, 64]`` over 4 -> Shard(1); a norm of 66 over 4 -> Shard(0), padded.
    """

    def placement(param: nn.Parameter) -> Shard:
        return Shard(first_even_dim(tuple(param.shape), num_shards) or 0)

    return placement


def build_planned_placement_fn(
    meshes: Mapping[nn.Parameter, DeviceMesh], dense_mesh: DeviceMesh
) -> Callable[[nn.Parameter], ShardPlacementResult]:
    """Placement after shard rules: the first dim that they left free and that the FSDP size divides, else dim 0.

    A parameter without a free dim is given a mesh with as many replicas as its FSDP mesh has ranks, of one shard each:
    held by every rank, and its gradient all-reduced. Rank 0 logs that, and strided shards, once for each shape. Making
    that mesh is collective: every rank asks for the same parameters in the same order.

    Args:
        meshes: FSDP mesh of each parameter that the rules cut (a DTensor), ``(shards,)`` or ``(replicas, shards)``.
        dense_mesh: of all others.
    """
    # One object for all units on the same groups: FSDP tells its groups of parameters apart by them, and by it.
    infos: dict[tuple[dist.ProcessGroup, ...], FSDPMeshInfo] = {}
    logged: set[tuple[int, ...]] = set()

    def info_of(mesh: DeviceMesh) -> FSDPMeshInfo:
        return infos.setdefault(tuple(mesh.get_all_groups()), _mesh_info(mesh))

    @functools.cache
    def whole(mesh: DeviceMesh) -> FSDPMeshInfo:
        flat = mesh if mesh.ndim == 1 else mesh._flatten()
        (name,) = flat.mesh_dim_names or ("fsdp",)
        return _mesh_info(flat._unflatten(0, (flat.size(), 1), (f"{name}_replicas", f"{name}_whole")))

    def log(param: nn.Parameter, outcome: str) -> None:
        if tuple(param.shape) not in logged and dist.get_rank() == 0:
            logged.add(tuple(param.shape))
            logger.warning("parameter %s, cut by shard rules: %s.", tuple(param.shape), outcome)

    def placement(param: nn.Parameter) -> ShardPlacementResult:
        info, shape = info_of(meshes.get(param, dense_mesh)), tuple(param.shape)
        placements = param.placements if isinstance(param, DTensor) else ()
        taken = frozenset(dim for dim in map(shard_dim, placements) if dim is not None)
        if taken and len(taken) == param.ndim:
            log(param, "no dim is left for FSDP, every rank of its mesh holds it")
            return ShardPlacementResult(Shard(0), whole(meshes[param]))
        dim = first_even_dim(shape, info.shard_mesh_size, taken)
        if dim is None and 0 in taken:
            log(param, f"no free dim divides by fsdp={info.shard_mesh_size}; sharding dim 0 (strided)")
        return ShardPlacementResult(Shard(dim or 0), info)

    for mesh in meshes.values():  # before dense_mesh, which may be the same ranks of another root
        info_of(mesh)
    return placement


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
