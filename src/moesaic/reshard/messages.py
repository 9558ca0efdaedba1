"""The messages of one process out of the groups of a plan: fragments get names again, layer by layer."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from moesaic.ops.placements import local_shape
from moesaic.reshard.fragments import Ints, source_shapes, source_slices, target_offsets
from moesaic.reshard.groups import CopyGroup, LayoutGroups
from moesaic.reshard.layout import Copy, Held, Holding, Piece, Shape, SourceRegion, TargetLayout, TargetRegion
from moesaic.reshard.record import holds

LAYER_NUMBER = re.compile(r"^(.*?\.)?\d+(?=\.)")


def number_layers(names: Iterable[str]) -> tuple[dict[str, int], int]:
    """Name -> its layer's number, in the order in which the trained model names them; and how many there are.

    A layer is what shares all of its name up to the first number (``model.layers.7``); names without one that follow
    each other are a layer too.
    """
    numbers: dict[str, int] = {}
    layer_of: dict[str, int] = {}
    last_unnumbered = -1
    num_layers = 0
    for name in names:
        found = LAYER_NUMBER.match(name)
        if found is None:
            if last_unnumbered != num_layers - 1 or not num_layers:
                last_unnumbered = num_layers
                num_layers += 1
            layer_of[name] = last_unnumbered
            continue
        if found[0] not in numbers:
            numbers[found[0]] = num_layers
            num_layers += 1
        layer_of[name] = numbers[found[0]]
    return layer_of, num_layers


def require_fitting(layout: TargetLayout, tensors: Mapping[str, Held]) -> None:
    """Raise ValueError where a copy reads or writes what isn't there."""
    names = {tensor.name for tensor in layout.tensors}
    for source in layout.sources:
        held = tensors.get(source.name)
        if held is not None and (held.shape != source.shape or not holds(source.dtype, held.wire_dtype)):
            raise ValueError(
                f"the engine's loader reads {source.name} as {source.shape} of {source.dtype}, and the trained model "
                f"sends {held.shape} of {held.wire_dtype}: trace and resolve with the shapes and dtypes of its export."
            )
    for copy in layout.copies:
        held = tensors.get(copy.source)
        if held is None or copy.target not in names:
            missing, where = (copy.source, "trained model") if held is None else (copy.target, "target layout")
            raise ValueError(
                f"{copy.target} is loaded from {copy.source}, and the {where} has no {missing}: resolve the traced "
                "layout to the trained model's names, and trace the engine of the same model."
            )
        end = list(copy.source_start)
        for extent, dim, step in zip(copy.shape, copy.source_dims, copy.source_steps, strict=True):
            if dim is not None:
                end[dim] += step * (extent - 1)
        if len(end) != len(held.shape) or any(last >= size for last, size in zip(end, held.shape, strict=True)):
            raise ValueError(
                f"{copy.target} reads {copy.source} up to {tuple(end)}, and its shape is {held.shape}: the engine's "
                "config isn't the trained model's."
            )


def find_local_shapes(tensors: Iterable[Held], rank: int) -> list[Shape]:
    """For each tensor, the shape that trainer rank ``rank``'s local tensor has; zeros where it holds nothing."""
    known: dict[tuple[int, int], Shape] = {}  # layers share their holdings: by identity
    shapes = []
    for held in tensors:
        key = (id(held.holdings), len(held.shape))
        if key not in known:
            known[key] = _local_shape(held.holdings, len(held.shape), rank)
        shapes.append(known[key])
    return shapes


def _local_shape(holdings: Sequence[Holding], num_dims: int, rank: int) -> Shape:
    return local_shape([block for its in holdings for holder, block in its.holders if holder == rank], num_dims)


@contextmanager
def pause_collector() -> Iterator[None]:
    """No garbage collections meanwhile. For making many small objects that all stay and form no cycles: collections
    then find nothing, and looking at all of the process's objects again and again takes longer than making these."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A piece without its names."""

    sender: int
    slices: tuple[slice, ...]
    source_shape: Shape
    target_offset: int
    target_shape: Shape


class Packer:
    """Makes the pieces of one layer, packed into messages; what instances share is made once."""

    def __init__(self, layout: LayoutGroups, max_bytes: int, rank: int | None) -> None:
        """``rank``: only what this trainer rank sends."""
        self._layout = layout
        self._max_bytes = max_bytes
        self._rank = rank
        self._geometries: dict[object, list[_Geometry]] = {}
        self._packed: dict[object, dict[int, list[tuple[Piece, ...]]]] = {}

    def pack(self, layer: int, instance: int) -> dict[int, list[tuple[Piece, ...]]]:
        """Sender -> the pieces of each of its messages to one instance."""
        copies = self._layout.layers[layer]
        patterns = [group.pattern(member, instance) for group, member in copies]
        key = (layer, *patterns)
        if key not in self._packed:
            pieces: dict[int, list[Piece]] = defaultdict(list)
            for (group, member), pattern in zip(copies, patterns, strict=True):
                copy = self._layout.layout.copies[group.members[member]]
                if (group, pattern) not in self._geometries:
                    senders = group.pick_senders(member, instance)
                    self._geometries[group, pattern] = _geometries(group, senders, self._rank)
                for geometry in self._geometries[group, pattern]:
                    pieces[geometry.sender].append(_name_piece(geometry, copy, group))
            self._packed[key] = {sender: _fill_messages(its, self._max_bytes) for sender, its in pieces.items()}
        return self._packed[key]


def _geometries(group: CopyGroup, holders: Ints, rank: int | None) -> list[_Geometry]:
    """Of the fragments with a holder (-1: none), or only of those that ``rank`` holds."""
    wanted = holders >= 0
    if rank is not None:
        wanted &= group.table.rank[holders] == rank
    (rows,) = np.nonzero(wanted)
    if not len(rows):
        return []
    fragments, holders = group.fragments.select(rows), holders[rows]
    return [
        _Geometry(*fields)
        for fields in zip(
            group.table.rank[holders].tolist(),
            source_slices(group.copy, group.table, fragments, holders),
            source_shapes(group.copy, fragments),
            target_offsets(group.copy, fragments),
            map(tuple, fragments.shape.tolist()),
            strict=True,
        )
    ]


def _name_piece(geometry: _Geometry, copy: Copy, group: CopyGroup) -> Piece:
    return Piece(
        source=SourceRegion(
            name=copy.source, slices=geometry.slices, dims=copy.source_dims, shape=geometry.source_shape
        ),
        target=TargetRegion(
            name=copy.target,
            offset=geometry.target_offset,
            strides=copy.target_strides,
            shape=geometry.target_shape,
        ),
        wire_dtype=group.wire_dtype,
    )


def local_pieces(groups: LayoutGroups, instance: int) -> Iterator[Piece]:
    """What one instance gets from the trainer rank in its own process, in the order of layers."""
    for layer in sorted(groups.layers):
        for group, member in groups.layers[layer]:
            copy = groups.layout.copies[group.members[member]]
            for geometry in _geometries(group, group.pick_local(instance), None):
                yield _name_piece(geometry, copy, group)


def _fill_messages(pieces: Sequence[Piece], max_bytes: int) -> list[tuple[Piece, ...]]:
    """Split at ``max_bytes``. Wide numbers first, so that none begins at an odd offset of a message."""
    result: list[list[Piece]] = []
    num_bytes = 0
    for piece in sorted(pieces, key=lambda piece: -piece.wire_dtype.itemsize):
        its_bytes = piece.num_bytes
        if not result or num_bytes + its_bytes > max_bytes:
            result.append([])
            num_bytes = 0
        result[-1].append(piece)
        num_bytes += its_bytes
    return [tuple(message) for message in result]
