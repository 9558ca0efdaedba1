"""The least that an engine rank must receive: the distinct elements that its loader reads, less those at hand.

Counted from the copies' geometry alone. Nothing here knows of fragments, holders or messages, so that a plan is
compared with something that it wasn't made from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moesaic.ops.placements import Block
from moesaic.reshard.layout import Copy, Held, Shape, TargetLayout


def lower_bound(layout: TargetLayout, tensors: Mapping[str, Held], at_hand: int | None) -> int:
    """Bytes on the wire. ``at_hand``: the trainer rank in the engine rank's own process."""
    dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
    reads: dict[tuple[str, int], list[Copy]] = defaultdict(list)
    for copy in layout.copies:
        wire_dtype = tensors[copy.source].wire_dtype_to(dtypes[copy.target])
        reads[copy.source, wire_dtype.itemsize].append(copy)
    counts: dict[object, int] = {}
    num_bytes = 0
    for (name, itemsize), copies in reads.items():
        held = tensors[name]
        geometry = tuple((copy.shape, copy.source_start, copy.source_dims, copy.source_steps) for copy in copies)
        key = (id(held.holdings), held.shape, geometry)
        if key not in counts:
            boxes = [block for holding in held.holdings for rank, block in holding.holders if rank == at_hand]
            counts[key] = count_missing(held.shape, copies, boxes)
        num_bytes += counts[key] * itemsize
    return num_bytes


def count_missing(shape: Shape, copies: Sequence[Copy], held: Sequence[Block]) -> int:
    """How many elements of a tensor of ``shape`` any of ``copies`` reads that lie in none of the boxes ``held``.

    Along each dim, indices are put together that the same copies and boxes have; what is left is a small grid of cells,
    each of which they have whole or not at all.
    """
    num_sets = len(copies) + len(held)
    if not shape:
        return int(bool(copies) and not held)
    cells = np.full((1, -(-num_sets // 8)), 255, np.uint8)
    num_elements = np.ones(1, np.int64)
    for dim, size in enumerate(shape):
        has = np.zeros((size, num_sets), np.bool_)
        for column, copy in enumerate(copies):
            has[_reads(copy, dim), column] = True
        for column, block in enumerate(held):
            has[block.global_slices[dim], len(copies) + column] = True
        kinds, counts = _count_kinds(np.packbits(has, axis=1))
        cells = (cells[:, None] & kinds[None]).reshape(-1, kinds.shape[1])
        num_elements = (num_elements[:, None] * counts[None]).reshape(-1)
        cells, num_elements = _drop_empty(cells, num_elements)
    flags = np.unpackbits(cells, axis=1, count=num_sets).astype(np.bool_)
    missing = flags[:, : len(copies)].any(axis=1) & ~flags[:, len(copies) :].any(axis=1)
    return int(num_elements[missing].sum())


def _reads(copy: Copy, source_dim: int) -> slice:
    start = copy.source_start[source_dim]
    if source_dim not in copy.source_dims:
        return slice(start, start + 1)
    dim = copy.source_dims.index(source_dim)
    step = copy.source_steps[dim]
    return slice(start, start + step * (copy.shape[dim] - 1) + 1, step)


def _count_kinds(rows: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Distinct rows and how often each occurs. Runs of equal rows first: there are few, and sorting is slow."""
    (starts,) = np.nonzero(np.append(True, (rows[1:] != rows[:-1]).any(axis=1)))
    lengths = np.diff(np.append(starts, len(rows)))
    kinds, which = np.unique(rows[starts], axis=0, return_inverse=True)
    counts = np.zeros(len(kinds), np.int64)
    np.add.at(counts, which.reshape(-1), lengths)
    return kinds, counts


def _drop_empty(
    cells: npt.NDArray[np.uint8], num_elements: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Without cells that nothing has, so that their number stays small."""
    some = cells.any(axis=1)
    return cells[some], num_elements[some]
