"""Exact blocks of a sharded tensor: what a rank holds of the global tensor, and where in its local tensor it lies.

Placements are read as FSDP2 lays parameters out, which a ``_StridedShard`` describes: axes to its right shard first.
One dim of one rank is then a list of intervals; their product over the dims is a list of n-D blocks.

Example, shape (8,), mesh (efsdp 2, ep 2), placements (_StridedShard(0, split_factor=2), Shard(0)):

    ep splits first     0..3 | 4..7        ep rank 0 | ep rank 1
    then efsdp splits   01|23 | 45|67      efsdp rank 0 holds 01 and 45 over its two ep ranks, efsdp rank 1 23 and 67

so rank (efsdp 1, ep 0) holds one block: global offset 2, local offset 0, size 2. With ep missing from the placements
(``(_StridedShard(0, split_factor=2), Replicate())``) efsdp rank 1 holds two: 2..3 and 6..7, at local offsets 0 and 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Interval = tuple[int, int]  # (start, length) in the global tensor


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a global tensor that one rank holds. Each field has one int per tensor dim.

    Attributes:
        global_offset: where the box begins in the global tensor.
        local_offset: where it begins in the rank's local tensor.
        size: its extent, at least 1 in every dim.
    """

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Index of the box in the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.global_offset, self.size, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of the box in the local tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.local_offset, self.size, strict=True))


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that ``placement`` shards, ``None`` where it doesn't shard.

    ``isinstance(placement, Shard)`` and ``placement.is_shard()`` are False on a ``_StridedShard``: ask here.
    """
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def find_run_axis(placements: Sequence[Placement], dim: int) -> int | None:
    """The mesh axis along which ``dim`` is split into contiguous runs, each held by the ranks of one coordinate on it;
    ``None`` where there is none. Example: ep in (efsdp: ``_StridedShard(0)``, ep: ``Shard(0)``)."""
    axes = [axis for axis, placement in enumerate(placements) if shard_dim(placement) == dim]
    plain = [axis for axis in axes if isinstance(placements[axis], Shard)]
    # A strided axis was applied after the one plain axis to its right; two plain ones would interleave the runs.
    return plain[0] if len(plain) == 1 and plain[0] == axes[-1] else None


def local_blocks(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Block, ...]:
    """The blocks that the calling rank holds of a tensor of global ``shape``; no communication.

    In the order of the local tensor (last dim fastest); none where the rank's shard is empty or it isn't in ``mesh``.
    """
    coordinate = mesh.get_coordinate()
    return () if coordinate is None else blocks_at(shape, tuple(mesh.shape), coordinate, placements)


def blocks_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Block, ...]:
    """``local_blocks`` of the rank at ``coordinate`` of a mesh of ``mesh_shape``. Pure: for plans about other ranks."""
    assert len(mesh_shape) == len(coordinate) == len(placements), (mesh_shape, coordinate, placements)
    assert not any(placement.is_partial() for placement in placements), f"no blocks of a partial tensor: {placements}"
    per_dim = [_intervals(dim, size, mesh_shape, coordinate, placements) for dim, size in enumerate(shape)]
    blocks = []
    for combination in itertools.product(*per_dim):
        blocks.append(
            Block(
                global_offset=tuple(start for start, _, _ in combination),
                local_offset=tuple(local for _, _, local in combination),
                size=tuple(length for _, length, _ in combination),
            )
        )
    return tuple(blocks)


def local_shape(blocks: Sequence[Block], num_dims: int) -> tuple[int, ...]:
    """Extent of the local tensor that ``blocks`` fill; zeros where there is none."""
    if not blocks:
        return (0,) * num_dims
    return tuple(max(block.local_offset[dim] + block.size[dim] for block in blocks) for dim in range(num_dims))


def _intervals(
    dim: int, size: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, int, int]]:
    """(global start, length, local start) of what one rank holds along ``dim``."""
    axes = [axis for axis, placement in enumerate(placements) if shard_dim(placement) == dim]
    held: list[Interval] = [(0, size)] if size else []
    order = _right_to_left(axes, mesh_shape, placements)
    for axis in axes if order is None else order:
        placement = placements[axis]
        # Where the axes are taken in the order in which the tensor was sharded, a strided shard is a plain chunk.
        num_pieces = placement.split_factor if order is None and isinstance(placement, _StridedShard) else 1
        held = _chunk(held, int(num_pieces), mesh_shape[axis], coordinate[axis])
    local_start, result = 0, []
    for start, length in _merge(held):
        result.append((start, length, local_start))
        local_start += length
    return result


def _right_to_left(axes: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int] | None:
    """The order in which FSDP2 sharded one dim, ``None`` where the placements don't say so.

    A strided axis whose split factor is the product of all axes to its right was applied after them. Taking it so
    matters where chunks are uneven: 7 rows, (efsdp 3, ep 2): ep gives 4 and 3, efsdp 2 2 0 and 1 1 1; reading the axes
    from the left, as DTensor does, gives rank (2, 0) the row that rank (2, 1) really holds.
    """
    order: list[int] = []
    for axis in reversed(axes):
        placement = placements[axis]
        if not isinstance(placement, _StridedShard):
            order.insert(0, axis)
        elif placement.split_factor == math.prod(mesh_shape[right] for right in order):
            order.append(axis)
        else:
            return None
    return order


def _chunk(held: Sequence[Interval], num_pieces: int, num_chunks: int, index: int) -> list[Interval]:
    """Cut ``held`` into ``num_pieces`` (as ``torch.chunk`` does: trailing ones short or empty) and keep, of each, chunk
    ``index`` of ``num_chunks``."""
    result: list[Interval] = []
    for piece in range(num_pieces):
        piece_start, piece_end = _chunk_range(sum(length for _, length in held), num_pieces, piece)
        chunk_start, chunk_end = _chunk_range(piece_end - piece_start, num_chunks, index)
        result.extend(_cut(held, piece_start + chunk_start, piece_start + chunk_end))
    return result


def _chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    chunk_size = -(-size // num_chunks)
    return min(size, chunk_size * index), min(size, chunk_size * (index + 1))


def _cut(held: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """The part of ``held`` between local positions ``start`` and ``end``."""
    result, position = [], 0
    for global_start, length in held:
        low, high = max(start, position), min(end, position + length)
        if low < high:
            result.append((global_start + low - position, high - low))
        position += length
    return result


def _merge(held: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, length in held:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
