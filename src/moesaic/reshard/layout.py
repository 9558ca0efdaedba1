"""What a reshard is planned from: who holds what of the trained model, and where an engine's loader puts it.

Example, one tensor of 4 x 3 that four trainer ranks hold a row each of, and an engine whose rank 1 (of tp 2) loads rows
2..3 of it behind six other elements of a fused parameter:

    Held(name="q.weight", shape=(4, 3), holdings=(rows 0..0 by rank 0, ..., rows 3..3 by rank 3))
    Copy(source="q.weight", target="qkv.weight", shape=(2, 3),
         source_start=(2, 0), source_dims=(0, 1), source_steps=(1, 1), target_offset=6, target_strides=(3, 1))

Element (i, j) of the copy goes from q.weight[2 + i, 0 + j] to element 6 + 3 * i + j of the engine's qkv.weight. Its two
rows come from ranks 2 and 3: two transfers, each of one row.

Torch's dtypes aside, these are plain values: pickled, compared, hashed; equal on every process that builds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moesaic.ops.placements import Block

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One box of a tensor and all ranks that hold it: replicas are one holding with several holders.

    Attributes:
        holders: (trainer rank, the box as it lies in that rank's local tensor), in the order of ranks. All of these
            blocks have the same global offset and size; local offsets may differ.
    """

    holders: tuple[tuple[int, Block], ...]

    @property
    def box(self) -> Block:
        """Where the box lies in the global tensor (its local offset is the first holder's)."""
        return self.holders[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor of the trained model, under its name in ``weights.agree.state_tensors``.

    Attributes:
        dtype: as stored; ``wire_dtype`` as it would be exported: what is rounded to first, whatever the engine keeps.
        holdings: boxes that cover the tensor, each position exactly once.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    wire_dtype: torch.dtype
    holdings: tuple[Holding, ...]

    def wire_dtype_to(self, target: torch.dtype) -> torch.dtype:
        """What travels to a tensor of dtype ``target``: as exported, or the target's where that is narrower. Not where
        the export itself rounds: an engine that loads the files rounds twice, which may differ from once."""
        narrower = target.is_floating_point and target.itemsize < self.wire_dtype.itemsize
        return target if narrower and self.wire_dtype == self.dtype else self.wire_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """The trained model on ``num_ranks`` ranks. Tied tensors are in it once; what isn't a DTensor has every rank as
    holder."""

    num_ranks: int
    tensors: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One strided copy of an engine's loader, from a named tensor to a named tensor of one engine rank.

    Attributes:
        source: a tensor: of the files as traced, of the trained model once resolved (``resolve.py``).
        shape: of the copy's own index space, in whose row-major order its elements travel.
        source_start: index in the source where the copy begins; one int per dim of the source.
        source_dims: for each dim of the copy, the source's dim that it walks; None for one that repeats elements.
            A dim of the source is walked by one dim of the copy at most.
        source_steps: for each dim of the copy, its step along that dim of the source.
        target_offset: in elements, from the first element of the target's tensor.
        target_strides: for each dim of the copy, in elements of the target's memory.
    """

    source: str
    target: str
    shape: Shape
    source_start: Shape
    source_dims: tuple[int | None, ...]
    source_steps: Shape
    target_offset: int
    target_strides: Shape

    @property
    def num_elements(self) -> int:
        """How many elements it writes."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Elements that a loader sets to one value: padding of a vocabulary, a bias that only one rank adds."""

    target: str
    shape: Shape
    target_offset: int
    target_strides: Shape
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A tensor of one engine rank, in its layout while weights are loaded."""

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor that copies name as their source: as a trace was given it, or once resolved, as the trained model's
    export holds it."""

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """What one engine rank loads.

    Attributes:
        copies: in the loader's order; a later one may overwrite nothing of an earlier.
        sources: of the copies, each once. What is planned from must have these shapes, and values that these dtypes
            hold. Empty in a layout that wasn't traced: then only bounds are checked.
    """

    tensors: tuple[TargetTensor, ...]
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    sources: tuple[SourceTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRegion:
    """Elements of a trainer rank's local tensor: ``local[slices]``, its dims put in the order ``dims``, with a dim of 1
    where None; dims of the tensor that aren't named have extent 1 there, and are dropped. ``shape`` is what results."""

    name: str
    slices: tuple[slice, ...]
    dims: tuple[int | None, ...]
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRegion:
    """Elements of an engine rank's tensor: ``as_strided(shape, strides, storage_offset + offset)``."""

    name: str
    offset: int
    strides: Shape
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements that travel together: ``target[...] = source[...].to(wire_dtype)``. What travels has the source's shape;
    the target's differs only where a dim of 1 repeats (``Tensor.copy_`` broadcasts it)."""

    source: SourceRegion
    target: TargetRegion
    wire_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return math.prod(self.source.shape) * self.wire_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Pieces of one layer from one trainer rank to one engine rank, packed one behind the other.

    Attributes:
        number: the message's place in the order of all messages of the plan (with gaps), which every process keeps.
            Each posts its own in that order, so the first that isn't done is posted on both sides: nothing can wait for
            ever.
        source_rank, target_rank: a trainer rank, and an engine rank.
    """

    number: int
    source_rank: int
    target_rank: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return sum(piece.num_bytes for piece in self.pieces)
