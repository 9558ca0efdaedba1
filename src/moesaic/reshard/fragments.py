"""Where the copies of an engine's loader meet the boxes that trainer ranks hold: arithmetic on arrays of boxes.

Example: ``target[i] = source[1 + 2 * i]`` for i in 0..3 (a copy of shape (4,), start 1, step 2), of a tensor of 8 whose
holdings are 0..3 and 4..7. Positions 1 3 | 5 7: the first holding has i in 0..1, the second i in 2..3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.reshard.layout import Copy, Holding, Shape

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Box = tuple[list[int], list[int]]  # low, shape


class HoldingTable:
    """The holdings of a tensor (of all tensors that lie alike) as arrays.

    Legend: N holdings, D dims of the tensor, A holders of all holdings one behind the other.

    Attributes:
        offset, size: [N, D], the boxes.
        num_holders, first: [N], how many holders and where its first lies among the A.
        rank: [A]; local_offset: [A, D], where the box begins in that rank's local tensor.
    """

    def __init__(self, holdings: Sequence[Holding], num_dims: int) -> None:
        blocks = [block for holding in holdings for _, block in holding.holders]
        self.offset = _table([holding.box.global_offset for holding in holdings], num_dims)
        self.size = _table([holding.box.size for holding in holdings], num_dims)
        self.num_holders: Ints = np.array([len(holding.holders) for holding in holdings], np.int64)
        self.first: Ints = np.cumsum(self.num_holders) - self.num_holders
        self.rank: Ints = np.array([rank for holding in holdings for rank, _ in holding.holders], np.int64)
        self.local_offset = _table([block.local_offset for block in blocks], num_dims)
        self._slots: dict[int, Ints] = {}

    def slots_of(self, rank: int) -> Ints:
        """[N]: which of a holding's holders ``rank`` is, -1 where it is none."""
        if rank not in self._slots:
            slots = np.full(len(self.first), -1, np.int64)
            (found,) = np.nonzero(self.rank == rank)
            holding = np.searchsorted(self.first, found, side="right") - 1
            slots[holding] = found - self.first[holding]
            self._slots[rank] = slots
        return self._slots[rank]

    def as_bytes(self) -> bytes:
        """Equal for equal holdings, in any process."""
        arrays = (self.offset, self.size, self.num_holders, self.rank, self.local_offset)
        return b"".join(array.tobytes() for array in arrays)


@dataclass(frozen=True, slots=True)
class Fragments:
    """Boxes of a copy's own index space, each within one holding.

    Legend: F fragments, J dims of the copy.

    Attributes:
        holding: [F], row of the HoldingTable.
        low, shape: [F, J].
    """

    holding: Ints
    low: Ints
    shape: Ints

    def num_elements(self, copy: Copy) -> Ints:
        """[F]: elements that travel; what a copy repeats travels once."""
        walked = [dim for dim, source in enumerate(copy.source_dims) if source is not None]
        return np.asarray(self.shape[:, walked].prod(axis=1, dtype=np.int64))

    def select(self, rows: Ints) -> Fragments:
        """Those at ``rows``."""
        return Fragments(self.holding[rows], self.low[rows], self.shape[rows])


def intersect(copy: Copy, table: HoldingTable) -> Fragments:
    """The part of ``copy`` in each holding, without empty ones, in the order of the table."""
    num_holdings, num_dims = table.offset.shape
    low = np.zeros((num_holdings, len(copy.shape)), np.int64)
    high = np.broadcast_to(np.array(copy.shape, np.int64), low.shape).copy()
    keep = np.ones(num_holdings, np.bool_)
    walkers = {source: dim for dim, source in enumerate(copy.source_dims) if source is not None}
    for source_dim in range(num_dims):
        # Of the holding, counted from where the copy begins.
        begin = table.offset[:, source_dim] - copy.source_start[source_dim]
        end = begin + table.size[:, source_dim]
        if source_dim in walkers:
            dim = walkers[source_dim]
            step = copy.source_steps[dim]
            low[:, dim] = np.maximum(-(-begin // step), 0)
            high[:, dim] = np.minimum(-(-end // step), copy.shape[dim])
        else:
            keep &= (begin <= 0) & (end > 0)
    keep &= (high > low).all(axis=1)
    (holding,) = np.nonzero(keep)
    return Fragments(holding, low[holding], (high - low)[holding])


def cut_fragments(copy: Copy, fragments: Fragments, num_shares: Ints, limit: int) -> Fragments:
    """Cut each fragment into even shares (``num_shares``: [F], at least 1; fewer where no dim has as many), and those
    into parts of at most ``limit`` elements."""
    num_elements = fragments.num_elements(copy)
    if (num_shares == 1).all() and (num_elements <= limit).all():
        return fragments
    repeated = [dim is None for dim in copy.source_dims]
    holding: list[int] = []
    low: list[list[int]] = []
    shape: list[list[int]] = []
    rows = zip(fragments.holding.tolist(), fragments.low.tolist(), fragments.shape.tolist(), strict=True)
    for (its_holding, its_low, its_shape), shares in zip(rows, num_shares.tolist(), strict=True):
        for share_low, share_shape in _share(its_low, its_shape, repeated, shares):
            for part_low, part_shape in _cut(share_low, share_shape, repeated, limit):
                holding.append(its_holding)
                low.append(part_low)
                shape.append(part_shape)
    num_dims = len(copy.shape)
    return Fragments(np.array(holding, np.int64), _table(low, num_dims), _table(shape, num_dims))


def source_slices(copy: Copy, table: HoldingTable, fragments: Fragments, holders: Ints) -> list[tuple[slice, ...]]:
    """For each fragment, its index in the local tensor of one holder. ``holders``: [F], rows of the table's A."""
    start = np.array(copy.source_start, np.int64) + table.local_offset[holders] - table.offset[fragments.holding]
    stop, step = start + 1, [1] * table.offset.shape[1]
    for dim, source_dim in enumerate(copy.source_dims):
        if source_dim is not None:
            step[source_dim] = copy.source_steps[dim]
            start[:, source_dim] += step[source_dim] * fragments.low[:, dim]
            stop[:, source_dim] = start[:, source_dim] + step[source_dim] * (fragments.shape[:, dim] - 1) + 1
    return [
        tuple(map(slice, its_start, its_stop, step))
        for its_start, its_stop in zip(start.tolist(), stop.tolist(), strict=True)
    ]


def source_shapes(copy: Copy, fragments: Fragments) -> list[Shape]:
    """For each fragment, the shape in which it travels: 1 where elements repeat."""
    shape = fragments.shape.copy()
    shape[:, [dim for dim, source in enumerate(copy.source_dims) if source is None]] = 1
    return [tuple(row) for row in shape.tolist()]


def target_offsets(copy: Copy, fragments: Fragments) -> list[int]:
    """For each fragment, its first element in the target's memory."""
    strides = np.array(copy.target_strides, np.int64)
    offsets: list[int] = (copy.target_offset + (fragments.low * strides).sum(axis=1)).tolist()
    return offsets


def _table(rows: Sequence[Sequence[int]], num_columns: int) -> Ints:
    """[rows, columns], also where there are no rows or no columns."""
    return np.array(rows, np.int64).reshape(len(rows), num_columns)


def _share(low: list[int], shape: list[int], repeated: Sequence[bool], num_shares: int) -> Iterator[_Box]:
    """Even parts of a box along its longest dim."""
    dims = [dim for dim, repeats in enumerate(repeated) if not repeats]
    if num_shares == 1 or not dims:
        yield low, shape
        return
    dim = max(dims, key=lambda dim: shape[dim])
    yield from _split(low, shape, dim, min(num_shares, shape[dim]))


def _cut(low: list[int], shape: list[int], repeated: Sequence[bool], limit: int) -> Iterator[_Box]:
    """Parts of a box with at most ``limit`` elements, the first dims cut first."""
    size = math.prod(extent for extent, repeats in zip(shape, repeated, strict=True) if not repeats)
    if size <= limit:
        yield low, shape
        return
    dim = next(dim for dim, extent in enumerate(shape) if extent > 1 and not repeated[dim])
    num_rows = max(1, limit * shape[dim] // size)
    for part_low, part_shape in _split(low, shape, dim, -(-shape[dim] // num_rows)):
        yield from _cut(part_low, part_shape, repeated, limit)


def _split(low: list[int], shape: list[int], dim: int, num_parts: int) -> Iterator[_Box]:
    for part in range(num_parts):
        start, end = (shape[dim] * bound // num_parts for bound in (part, part + 1))
        yield [*low[:dim], low[dim] + start, *low[dim + 1 :]], [*shape[:dim], end - start, *shape[dim + 1 :]]
