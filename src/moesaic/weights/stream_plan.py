"""In which buckets a model is streamed, and who sends what for each. Pure arithmetic, the same buckets on every rank.

parameter -> runs of rows, as short as whole tensors of the files allow -> units -> buckets

Example, gate_up_proj [2, 8, 3] of two experts, each gate and up on its own in the files: two units, rows 0..0 and
1..1 of the parameter, each of two tensors. A tensor of the files that several parameters are cut from makes one unit of
all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, shard_dim
from moesaic.weights.entries import Entry, file_entries
from moesaic.weights.export_plan import replica_of
from moesaic.weights.tiles import Grid, Shape, Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Ranks that hold a box together, each value once; the receiver is one of them.

    Attributes:
        ranks: in the order of their mesh.
        blocks: of each, what it has of the box; global offsets count from where the box begins.
        kind: the same for boxes whose replicas are the same ranks, whichever rank receives.
        num_values: what each rank has.
    """

    ranks: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    kind: object
    num_values: NDArray[np.int64] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Count once: parameters of one kind share their replica."""
        counts = [sum(math.prod(block.size) for block in blocks) for blocks in self.blocks]
        object.__setattr__(self, "num_values", np.array(counts, dtype=np.int64))

    def cut(self, rows: range) -> Replica:
        """The same ranks, of some rows of the box."""
        blocks = tuple(tuple(_in_rows(each, rows)) for each in self.blocks)
        return Replica(ranks=self.ranks, blocks=blocks, kind=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Rows of one parameter that are gathered together.

    Attributes:
        name: the parameter.
        offset, size: where the box lies in it.
        dtype: in which it travels.
        replica: what it is gathered from.
    """

    name: str
    offset: Shape
    size: Shape
    dtype: torch.dtype
    replica: Replica

    @property
    def num_bytes(self) -> int:
        """In its dtype."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor that is yielded.

    Attributes:
        pieces: (index of the box in the unit, what the box has of it).
        is_view: it is a contiguous part of its box, and needs no memory of its own.
    """

    key: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[tuple[int, Entry], ...]
    is_view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The least that can be gathered and yielded on its own."""

    boxes: tuple[Box, ...]
    outputs: tuple[Output, ...]

    @property
    def num_bytes(self) -> int:
        """Of its boxes."""
        return sum(box.num_bytes for box in self.boxes)

    @property
    def num_copied_bytes(self) -> int:
        """Of the largest tensor that isn't a part of a box."""
        sizes = (math.prod(out.shape) * out.dtype.itemsize for out in self.outputs if not out.is_view)
        return max(sizes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Units that are gathered together. ``fingerprint``: equal on all ranks, differs from bucket to bucket."""

    units: tuple[Unit, ...]
    fingerprint: int


def plan_stream(
    state: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    *,
    rank: int,
    dst: int | None,
    max_bucket_bytes: int,
) -> list[Bucket]:
    """Every tensor of ``state`` in buckets, in its order.

    Args:
        grids, shapes, dtypes: as for ``build_shares``.
        rank: the calling rank; others see replicas of their own, and the same buckets.
        dst: the one rank that receives; None: all do.
        max_bucket_bytes: limit of all that a rank holds for a bucket: its boxes, messages, and the tensors cut out.
    """
    units = _build_units(state, grids, shapes, dtypes, rank if dst is None else dst)
    digest = hashlib.blake2b(repr(dst).encode(), digest_size=7)
    buckets = []
    for chosen in _fill(units, max_bucket_bytes):
        for unit in chosen:
            digest.update(repr([(out.key, out.shape, out.dtype) for out in unit.outputs]).encode())
        digest.update(b"end of bucket")
        buckets.append(Bucket(units=tuple(chosen), fingerprint=int.from_bytes(digest.digest())))
    return buckets


def _build_units(
    state: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    receiver: int,
) -> list[Unit]:
    """Runs of rows, those of parameters that a tensor of the files has in common put together."""
    replicas: dict[object, Replica] = {}  # parameters of one kind are cut alike
    members: list[list[tuple[Box, tuple[Entry, ...]]]] = []
    unit_of: dict[str, int] = {}  # key -> index in members
    for name, tensor in state.items():
        for rows, entries in _runs(tensor.shape, file_entries(grids[name], shapes)):
            rest = (0,) * (tensor.ndim - 1)
            offset, size = ((rows.start, *rest), (len(rows), *tensor.shape[1:])) if tensor.ndim else ((), ())
            replica = _replica(tensor, rows, receiver, replicas)
            box = Box(name=name, offset=offset, size=size, dtype=dtypes[name], replica=replica)
            known = sorted({unit_of[entry.key] for entry in entries if entry.key in unit_of})
            index = known[0] if known else len(members)
            if not known:
                members.append([])
            members[index].append((box, entries))
            for other in known[1:]:
                members[index] += members[other]
                members[other] = []
            unit_of |= {entry.key: index for _, its_entries in members[index] for entry in its_entries}
    return [_unit(boxes) for boxes in members if boxes]


def _unit(members: Sequence[tuple[Box, tuple[Entry, ...]]]) -> Unit:
    pieces_of: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for index, (_, entries) in enumerate(members):
        for entry in entries:
            pieces_of[entry.key].append((index, entry))
    outputs = []
    for key, pieces in pieces_of.items():
        box, entry = members[pieces[0][0]][0], pieces[0][1]
        is_view = len(pieces) == 1 and entry.is_whole and _is_contiguous(entry.tiles[0], box.size)
        outputs.append(
            Output(key=key, shape=entry.shape, dtype=box.dtype, pieces=tuple(pieces), is_view=is_view),
        )
    return Unit(boxes=tuple(box for box, _ in members), outputs=tuple(outputs))


def _is_contiguous(tile: Tile, box_size: Shape) -> bool:
    """Whether the tile, its dims as in the file, is one run of the box's memory."""
    order = [dim for dim in tile.dims if dim is not None]
    wide = [dim for dim, size in enumerate(tile.size) if size > 1]
    cut = [dim for dim, size in enumerate(tile.size) if size < box_size[dim]]
    return order == sorted(order) and (not cut or not wide or max(cut) <= wide[0])


def _runs(shape: Shape, entries: Sequence[Entry]) -> Iterator[tuple[range, tuple[Entry, ...]]]:
    """Rows of a parameter, cut wherever no tensor of the files is cut; and these tensors. One run for a scalar."""
    if len(entries) == 1 or not shape:
        yield range(shape[0] if shape else 1), tuple(entries)
        return
    spans = []
    for entry in entries:
        start = min(tile.offset[0] for tile in entry.tiles)
        spans.append((start, max(tile.offset[0] + tile.size[0] for tile in entry.tiles), entry))
    begin, end, inside = 0, 0, list[Entry]()
    for start, stop, entry in sorted(spans, key=lambda span: span[0]):
        if start >= end and inside:
            yield range(begin, end), tuple(inside)
            begin, inside = start, []
        inside.append(entry)
        end = max(end, stop)
    yield range(begin, end), tuple(inside)


def _replica(tensor: torch.Tensor, rows: range, receiver: int, known: dict[object, Replica]) -> Replica:
    """The replica of ``rows`` that ``receiver`` is in."""
    kind: object = (tensor.shape, None)
    if isinstance(tensor, DTensor):
        kind = (tensor.shape, id(tensor.device_mesh), tensor.placements)
    if kind not in known:
        known[kind] = _whole_replica(tensor, receiver)
    if (kind, rows) not in known:
        known[kind, rows] = known[kind].cut(rows)
    return known[kind, rows]


def _whole_replica(tensor: torch.Tensor, receiver: int) -> Replica:
    if not isinstance(tensor, DTensor):  # whole on every rank
        origin = (0,) * tensor.ndim
        block = Block(origin, origin, tuple(tensor.shape))
        return Replica(ranks=(receiver,), blocks=((block,),), kind=None)
    sharded = tuple(axis for axis, placement in enumerate(tensor.placements) if shard_dim(placement) is not None)
    _, ranks, blocks = zip(*replica_of(tensor, receiver), strict=True)
    return Replica(ranks=ranks, blocks=blocks, kind=(id(tensor.device_mesh), sharded))


def _in_rows(blocks: Sequence[Block], rows: range) -> Iterator[Block]:
    for block in blocks:
        if not block.size:
            yield block
            continue
        start = max(block.global_offset[0], rows.start)
        stop = min(block.global_offset[0] + block.size[0], rows.stop)
        if start < stop:
            local = block.local_offset[0] + start - block.global_offset[0]
            yield Block(
                (start - rows.start, *block.global_offset[1:]),
                (local, *block.local_offset[1:]),
                (stop - start, *block.size[1:]),
            )


def _fill(units: Sequence[Unit], max_bytes: int) -> Iterator[list[Unit]]:
    """Units in order, as many to a bucket as ``max_bytes`` allow, at least one."""
    bucket, cost = list[Unit](), _Cost(0)
    for unit in units:
        cost.add(unit)
        if bucket and cost.num_bytes > max_bytes:
            yield bucket
            # The consumer still has the tensor that was yielded last while this bucket is gathered.
            cost = _Cost(max(bucket[-1].num_bytes, bucket[-1].num_copied_bytes))
            cost.add(unit)
            bucket = []
        bucket.append(unit)
    if bucket:
        yield bucket


class _Cost:
    """The most that any rank holds for a bucket beside its shards. Every rank comes to the same number."""

    def __init__(self, num_bytes: int) -> None:
        self._boxes = num_bytes
        self._copied = 0
        self._sent: dict[object, NDArray[np.int64]] = {}

    def add(self, unit: Unit) -> None:
        """One more unit."""
        self._boxes += unit.num_bytes
        self._copied = max(self._copied, unit.num_copied_bytes)
        for box in unit.boxes:
            if len(box.replica.ranks) > 1:
                num_bytes = box.replica.num_values * box.dtype.itemsize
                self._sent[box.replica.kind] = self._sent.get(box.replica.kind, 0) + num_bytes

    @property
    def num_bytes(self) -> int:
        """Boxes, one message that is sent, one that is received; a tensor that is cut out, and the one before it."""
        return self._boxes + 2 * self._copied + 2 * sum(int(sent.max()) for sent in self._sent.values())
