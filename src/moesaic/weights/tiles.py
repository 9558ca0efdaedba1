"""Which slices of which tensors in the files make up a parameter. Pure arithmetic, torch-free.

A ``Grid`` is a tensor that isn't there: its shape, and the tiles that fill it, each a strided and permuted slice of one
tensor of the files. The functions here do to grids what torch does to tensors. Both directions use the result: loading
intersects the tiles with the blocks that a rank holds, exporting fills the files' tensors from them.

Example (qwen3_moe, 2 experts, I = 4, H = 3): ``model.layers.0.mlp.experts.gate_up_proj`` of shape (2, 8, 3) is

    concatenate([stack([gate of 0, gate of 1], 0), stack([up of 0, up of 1], 0)], 1), in tiles

    key                                              offset     size
    model.layers.0.mlp.experts.0.gate_proj.weight    (0, 0, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.1.gate_proj.weight    (1, 0, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.0.up_proj.weight      (0, 4, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.1.up_proj.weight      (1, 4, 0)  (1, 4, 3)

A rank that holds rows 2..5 of expert 1 reads rows 2..3 of the second and rows 0..1 of the fourth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a torch-free file: the type is only read
    from moesaic.ops.placements import Block

T = TypeVar("T")
Shape = tuple[int, ...]


class MisfitError(ValueError):
    """Tensors that can't be put together. The message names the shapes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """``grid[offset : offset + size]`` is a slice of one tensor of the files.

    Attributes:
        key: that tensor.
        offset: where the tile begins in the grid.
        dims: for each dim of the grid the dim of the file's tensor; None for one that stacking added.
        ranges: for each dim of the grid the indices along the file's dim; ``range(1)`` for one that stacking added.
    """

    key: str
    offset: Shape
    dims: tuple[int | None, ...]
    ranges: tuple[range, ...]

    @property
    def size(self) -> Shape:
        """Extent in the grid."""
        return tuple(map(len, self.ranges))

    @property
    def source(self) -> tuple[range, ...]:
        """Indices along each dim of the file's tensor."""
        chosen = {dim: indices for dim, indices in zip(self.dims, self.ranges, strict=True) if dim is not None}
        return tuple(chosen[dim] for dim in range(len(chosen)))


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor described by the tiles that cover it, each position exactly once."""

    shape: Shape
    tiles: tuple[Tile, ...]

    @classmethod
    def whole(cls, key: str, shape: Sequence[int]) -> Grid:
        """One tensor of the files, as it is."""
        num_dims = len(shape)
        tile = Tile(key, (0,) * num_dims, tuple(range(num_dims)), tuple(map(range, shape)))
        return cls(tuple(shape), (tile,))

    def cut(self, dim: int, chosen: range) -> Grid:
        """``index_select`` along ``dim`` by an ascending range."""
        tiles = []
        for tile in self.tiles:
            begin, old = tile.offset[dim], tile.ranges[dim]
            first = max(0, -(-(begin - chosen.start) // chosen.step))  # position in ``chosen``
            last = min(len(chosen), -(-(begin + len(old) - chosen.start) // chosen.step))
            if first < last:
                start = chosen[first] - begin
                kept = old[start : chosen[last - 1] - begin + 1 : chosen.step]
                tiles.append(
                    Tile(tile.key, _put(tile.offset, dim, first), tile.dims, _put(tile.ranges, dim, kept)),
                )
        return Grid(_put(self.shape, dim, len(chosen)), tuple(tiles))

    def transpose(self, a: int, b: int) -> Grid:
        """Swap two dims."""
        tiles = [Tile(t.key, _swap(t.offset, a, b), _swap(t.dims, a, b), _swap(t.ranges, a, b)) for t in self.tiles]
        return Grid(_swap(self.shape, a, b), tuple(tiles))

    def unsqueeze(self, dim: int) -> Grid:
        """A new dim of 1."""
        tiles = [
            Tile(t.key, _insert(t.offset, dim, 0), _insert(t.dims, dim, None), _insert(t.ranges, dim, range(1)))
            for t in self.tiles
        ]
        return Grid(_insert(self.shape, dim, 1), tuple(tiles))

    def assert_covered(self) -> None:
        """The tiles have as many positions as the grid."""
        assert sum(math.prod(tile.size) for tile in self.tiles) == math.prod(self.shape), self


@dataclass(frozen=True, slots=True)
class Read:
    """One slice to read: ``local[dest]`` is ``file[key][source]``, its dims in the order ``dims`` (see ``Tile``)."""

    key: str
    source: tuple[range, ...]
    dims: tuple[int | None, ...]
    dest: tuple[slice, ...]

    def split(self) -> list[Read]:
        """The same, one index of the file's first dim at a time."""
        first, *rest = self.source
        at = self.dims.index(0)
        begin = self.dest[at].start
        return [
            Read(self.key, (first[i : i + 1], *rest), self.dims, _put(self.dest, at, slice(begin + i, begin + i + 1)))
            for i in range(len(first))
        ]


def concatenate(grids: Sequence[Grid], dim: int) -> Grid:
    """``torch.cat``.

    Raises:
        MisfitError: the shapes differ in another dim.
    """
    expected = _put(grids[0].shape, dim, 0)
    tiles: list[Tile] = []
    start = 0
    for grid in grids:
        if _put(grid.shape, dim, 0) != expected:
            raise MisfitError(f"{grid.tiles[0].key} gives {list(grid.shape)} beside {list(grids[0].shape)}")
        tiles += [Tile(t.key, _put(t.offset, dim, t.offset[dim] + start), t.dims, t.ranges) for t in grid.tiles]
        start += grid.shape[dim]
    return Grid(_put(grids[0].shape, dim, start), tuple(tiles))


def stack(grids: Sequence[Grid], dim: int) -> Grid:
    """``torch.stack``."""
    return concatenate([grid.unsqueeze(dim) for grid in grids], dim)


def interleave(grid: Grid, dim: int, *, inverse: bool) -> Grid:
    """``a0 b0 a1 b1 ...`` to ``a0 a1 ... b0 b1 ...``; ``inverse``: the other way round."""
    size = grid.shape[dim]
    if size % 2:
        raise MisfitError(f"{grid.tiles[0].key} gives {list(grid.shape)}, whose dim {dim} has no halves")
    half = size // 2
    parts = [range(i, i + half + 1, half) for i in range(half)] if inverse else [range(0, size, 2), range(1, size, 2)]
    return concatenate([grid.cut(dim, part) for part in parts], dim)


def plan_reads(grid: Grid, block: Block) -> list[Read]:
    """The slices that fill one ``block`` of a parameter. Together they cover it exactly once."""
    reads = []
    for tile in grid.tiles:
        held, dest = [], []
        for dim, size in enumerate(block.size):
            begin, block_begin = tile.offset[dim], block.global_offset[dim]
            start = max(begin, block_begin)
            end = min(begin + len(tile.ranges[dim]), block_begin + size)
            if start >= end:
                break
            held.append(tile.ranges[dim][start - begin : end - begin])
            to_local = block.local_offset[dim] - block_begin
            dest.append(slice(start + to_local, end + to_local))
        else:
            part = Tile(tile.key, tile.offset, tile.dims, tuple(held))
            reads.append(Read(tile.key, part.source, tile.dims, tuple(dest)))
    return reads


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _insert(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index:])


def _swap(values: tuple[T, ...], a: int, b: int) -> tuple[T, ...]:
    return _put(_put(values, a, values[b]), b, values[a])
