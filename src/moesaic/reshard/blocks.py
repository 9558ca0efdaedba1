"""Who holds what of a trained model: exact blocks of every tensor on every rank, from placements alone.

Nothing is sent, and no tensor's values are read: a model on meta under a process group that isn't real will do, so a
plan for 1,024 ranks can be made in one process.

Example, shape (4, 6) on ranks 0..3, mesh (replicate 2, shard 2), placements (Replicate(), Shard(0)):

    holding rows 0..1: ranks 0 and 2        holding rows 2..3: ranks 1 and 3
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel

from moesaic.ops.placements import Block, blocks_at
from moesaic.reshard.layout import Held, Holding, SourceLayout
from moesaic.weights.agree import state_tensors
from moesaic.weights.export import file_dtypes


def describe_source(
    model: PreTrainedModel, *, dtype: torch.dtype | None = None, num_ranks: int | None = None
) -> SourceLayout:
    """The tensors of ``model`` (``state_tensors``) and all their holders. Any rank may call, alone; no communication.

    Args:
        dtype: what floating-point weights are rounded to, as in ``export_hf`` (what the family keeps in fp32 stays).
        num_ranks: trainer ranks; default: those of the default process group, one without any.

    Raises:
        ValueError: a tensor is a partial sum, or lies on ranks beyond ``num_ranks``.
    """
    if num_ranks is None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    state = state_tensors(model)
    wire_dtypes = file_dtypes(model, state, dtype)
    # Layers are laid out alike. Holdings that are one object also stay one object in a pickle, and are planned once.
    known: dict[object, tuple[Holding, ...]] = {}
    tensors = []
    for name, tensor in state.items():
        kind = _kind(tensor)
        if kind not in known:
            known[kind] = _holdings_of(name, tensor, num_ranks)
        tensors.append(
            Held(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                wire_dtype=wire_dtypes[name],
                holdings=known[kind],
            )
        )
    return SourceLayout(num_ranks=num_ranks, tensors=tuple(tensors))


def find_holdings(
    shape: Sequence[int], mesh_shape: Sequence[int], ranks: Sequence[int], placements: Sequence[Placement]
) -> tuple[Holding, ...]:
    """The boxes of a tensor of global ``shape`` and the holders of each, ordered by the first holder. Pure.

    Args:
        ranks: of the mesh, row-major: ``mesh.mesh.flatten()``.
    """
    holders_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Block]]] = {}
    coordinates = itertools.product(*map(range, mesh_shape))
    for rank, coordinate in sorted(zip(ranks, coordinates, strict=True)):
        for block in blocks_at(shape, mesh_shape, coordinate, placements):
            holders_of.setdefault((block.global_offset, block.size), []).append((rank, block))
    return tuple(Holding(holders=tuple(holders)) for holders in holders_of.values())


def replicated(shape: Sequence[int], ranks: Iterable[int]) -> tuple[Holding, ...]:
    """The whole tensor on each of ``ranks``; no holding where it has no elements."""
    whole = Block((0,) * len(shape), (0,) * len(shape), tuple(shape))
    return () if 0 in shape else (Holding(holders=tuple((rank, whole) for rank in ranks)),)


def _kind(tensor: Tensor) -> object:
    """What makes two tensors lie alike."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tensor.device_mesh, tensor.placements
    return tuple(tensor.shape)


def _holdings_of(name: str, tensor: Tensor, num_ranks: int) -> tuple[Holding, ...]:
    if not isinstance(tensor, DTensor):
        return replicated(tensor.shape, range(num_ranks))
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{name} has placements {placements}: a partial sum has no values to send. Redistribute it to shards first."
        )
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if max(ranks) >= num_ranks:
        raise ValueError(
            f"{name} lies on rank {max(ranks)}, and num_ranks={num_ranks}: give the number of all trainer ranks."
        )
    return find_holdings(tensor.shape, tuple(mesh.shape), ranks, placements)
