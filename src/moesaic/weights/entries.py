"""What the files' tensors have of a parameter, and how they are cut out of a box of it. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moesaic.weights.tiles import Grid, Shape, Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the files, and the tiles of one parameter that are in it: all of it, or a piece.

    Attributes:
        key, shape: of the file's tensor.
        tiles: where it is filled from.
    """

    key: str
    shape: Shape
    tiles: tuple[Tile, ...]

    @property
    def is_whole(self) -> bool:
        """One tile is all of the file's tensor."""
        return len(self.tiles) == 1 and self.tiles[0].source == tuple(map(range, self.shape))


def file_entries(grid: Grid, shapes: Mapping[str, Shape]) -> tuple[Entry, ...]:
    """The files' tensors that a parameter fills, in the order of its rows."""
    tiles_of: dict[str, list[Tile]] = defaultdict(list)
    for tile in sorted(grid.tiles, key=lambda tile: tile.offset):
        tiles_of[tile.key].append(tile)
    return tuple(Entry(key=key, shape=shapes[key], tiles=tuple(tiles)) for key, tiles in tiles_of.items())


def cut_tile(tile: Tile, offset: Shape, box: torch.Tensor) -> torch.Tensor:
    """A view of the tile in the ``box`` of its parameter that begins at ``offset``, its dims as in the file."""
    index: list[int | slice] = []
    for start, base, size, dim in zip(tile.offset, offset, tile.size, tile.dims, strict=True):
        index.append(start - base if dim is None else slice(start - base, start - base + size))
    order = [dim for dim in tile.dims if dim is not None]
    part = box[tuple(index)] if index else box
    return part.permute(*map(order.index, range(len(order)))) if order else part


def put_tiles(entry: Entry, offset: Shape, box: torch.Tensor, whole: torch.Tensor) -> int:
    """Fill what the entry has of a file's tensor ``whole`` out of the ``box`` at ``offset``; how many values."""
    num_values = 0
    for tile in entry.tiles:
        piece = cut_tile(tile, offset, box)
        whole[tuple(slice(part.start, part.stop, part.step) for part in tile.source)] = piece
        num_values += piece.numel()
    return num_values


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (a copy where it isn't contiguous) as flat bytes, so that any dtype can be sent and written."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
