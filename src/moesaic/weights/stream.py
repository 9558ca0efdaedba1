"""A sharded model as a stream of whole tensors, named as its files: what any engine's ``load_weights`` takes.

plan (stream_plan.py, the same buckets on every rank): parameters -> units -> buckets
run, bucket by bucket: each rank packs what it has of the bucket, once for all who lack it; all agree to go on; messages
go round the ring of a replica's ranks, r to r + 1, then r to r + 2, ...; the tensors are cut out and yielded

A rank receives what it doesn't hold itself, and nothing twice. Example, 4 ranks of one replica, a bucket of 512 MiB:
each sends its 128 MiB to three others and receives 384 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.ops.placements import Block
from moesaic.weights.agree import announce_stop, find_mesh, raise_together, state_tensors, unwrap
from moesaic.weights.entries import cut_tile, put_tiles
from moesaic.weights.expert_names import ExpertNames, name_experts
from moesaic.weights.export import file_dtypes, find_layout, find_state
from moesaic.weights.stream_plan import Box, Bucket, Output, plan_stream

WHAT = "streaming weights"


def stream_hf_tensors(
    model: PreTrainedModel,
    bucket_mib: float = 512,
    *,
    dtype: torch.dtype | None = None,
    experts: ExpertNames | None = None,
    dst: int | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """(name, whole tensor) of all that ``export_hf`` would write of ``model`` itself, with the same bits; a tied weight
    once. What the folder that it was loaded from holds beside it isn't in the stream: training doesn't change it.

    Every rank of the model's meshes must call it, outside forward and backward, and take the stream to its end, all of
    them in step: between two tensors a rank may do what it likes, but other collectives in the same order as the
    others, and nothing that changes weights. Shards travel by point-to-point messages in the default group. A rank
    that ends before the others (its consumer breaks off or raises, and the generator is closed: use
    ``contextlib.closing``) fails all of them before the next bucket; one that dies or hangs fails them within the
    group's time-out.

    Tensors are contiguous and lie on the meshes' device, also where the shards lie on the host: then only a bucket is
    there at a time. A tensor is the consumer's own to keep, but may share storage with its neighbours of one expert.

    Args:
        bucket_mib: the most that a rank holds beside its shards, in MiB: gathered tensors, messages under way, and the
            tensor that was yielded last. One tensor that needs more goes alone.
        dtype: cast floating-point weights to it (what the family keeps in fp32 stays); default: as they are.
        experts: routed experts' tensors one by one, or stacked as the model holds them; default: as in the files.
        dst: rank in the default group that alone receives and yields; the others send and yield nothing.

    Raises:
        ValueError: as ``export_hf`` does before it sends anything; no such names of ``experts``; ``dst`` isn't a rank
            of the model.
        RuntimeError: another rank failed or stopped; the ranks aren't in step; a stream of this model is under way.
    """
    model = cast(PreTrainedModel, unwrap(model))
    mesh = find_mesh(state_tensors(model).values())
    error: Exception | None = None
    stream: _Stream | None = None
    try:
        stream = _prepare(model, bucket_mib, dtype, experts, dst)
    except Exception as problem:
        error = problem
    raise_together(error, mesh, WHAT)
    assert stream is not None
    return stream.run(model)


def _prepare(
    model: PreTrainedModel,
    bucket_mib: float,
    dtype: torch.dtype | None,
    experts: ExpertNames | None,
    dst: int | None,
) -> _Stream:
    if not bucket_mib > 0:
        raise ValueError(f"bucket_mib={bucket_mib} must be above 0; give what a rank may hold in MiB, for example 512.")
    if experts not in (None, "per_expert", "stacked"):
        raise ValueError(f"experts={experts!r} must be 'per_expert', 'stacked', or left out for the files' own names.")
    state, mesh = find_state(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks: list[int] = [rank] if mesh is None else mesh.mesh.flatten().tolist()
    if dst is not None and dst not in ranks:
        raise ValueError(f"dst={dst} must be one of the model's ranks, {ranks}; name one, or leave dst out for all.")
    grids, shapes = find_layout(model, state)
    if experts is not None:
        grids, shapes = name_experts(model, grids, shapes, experts)
    buckets = plan_stream(
        state,
        grids,
        shapes,
        file_dtypes(model, state, dtype),
        rank=rank,
        dst=dst,
        max_bucket_bytes=int(bucket_mib * 2**20),
    )
    return _Stream(state=state, mesh=mesh, buckets=buckets, rank=rank, dst=dst)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """A planned stream, as the calling rank runs it."""

    state: Mapping[str, torch.Tensor]
    mesh: DeviceMesh | None
    buckets: Sequence[Bucket]
    rank: int
    dst: int | None

    @torch.no_grad()
    def run(self, model: PreTrainedModel) -> Generator[tuple[str, torch.Tensor], None, None]:
        """See ``stream_hf_tensors``."""
        error = None
        is_first = not vars(model).get("is_streaming", False)
        if not is_first:
            error = RuntimeError(f"{WHAT}: a stream of this model is under way. Take it to its end, or close() it.")
        raise_together(error, self.mesh, WHAT)
        cast(Any, model).is_streaming = True
        try:
            for bucket in self.buckets:
                gathered = self._gather(bucket)
                try:
                    yield from _cut_bucket(bucket, gathered)
                except BaseException:  # the consumer breaks off, or there is no memory for its tensor
                    announce_stop(self.mesh)
                    raise
            raise_together(None, self.mesh, WHAT)  # nobody stopped in the last bucket
        finally:
            cast(Any, model).is_streaming = False

    def _gather(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """The bucket's boxes, unit by unit; None on a rank that only sends."""
        error: Exception | None = None
        rings: list[_Ring] = []
        boxes: list[torch.Tensor] | None = None
        try:
            boxes, rings = self._pack(bucket)
        except Exception as problem:
            error = problem
        raise_together(error, self.mesh, WHAT, step=bucket.fingerprint)
        for ring in rings:
            ring.run(boxes)
        return boxes

    def _pack(self, bucket: Bucket) -> tuple[list[torch.Tensor] | None, list[_Ring]]:
        """All memory that the bucket needs, with this rank's own part in its place and in the messages."""
        boxes = [box for unit in bucket.units for box in unit.boxes]
        device = [self._device(self.state[box.name]) for box in boxes]
        is_receiver = self.dst in (None, self.rank)
        gathered = (
            [torch.empty(box.size, dtype=box.dtype, device=where) for box, where in zip(boxes, device, strict=True)]
            if is_receiver
            else None
        )
        rings: dict[tuple[int, ...], _Ring] = {}
        for index, box in enumerate(boxes):
            if self.rank in box.replica.ranks:
                group = tuple(sorted(box.replica.ranks))
                ring = rings.setdefault(group, _Ring(group=group, rank=self.rank, dst=self.dst, device=device[index]))
                ring.add(index, box)
        for ring in rings.values():
            ring.pack([_local(self.state[box.name]) for box in boxes], gathered)
        return gathered, list(rings.values())

    def _device(self, tensor: torch.Tensor) -> torch.device:
        """Where it is sent from: offloaded shards lie on the CPU of a mesh of accelerators, whose backend sends."""
        return tensor.device if self.mesh is None else torch.device(self.mesh.device_type)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of a box (its index in the bucket), and where it begins in a message, in bytes."""

    box: int
    block: Block
    dtype: torch.dtype
    start: int

    def view(self, message: torch.Tensor) -> torch.Tensor:
        """The block in a message."""
        num_bytes = math.prod(self.block.size) * self.dtype.itemsize
        return message[self.start : self.start + num_bytes].view(self.dtype).view(self.block.size)


class _Ring:
    """The exchange of one bucket's boxes between the ranks of one replica.

    Args:
        group: these ranks, ascending, the calling ``rank`` among them.
        dst: the one that receives; None: all.
    """

    def __init__(self, *, group: tuple[int, ...], rank: int, dst: int | None, device: torch.device) -> None:
        self._group = group
        self._rank = rank
        self._receivers = set(group) if dst is None else {dst}
        self._device = device
        self._boxes: list[tuple[int, Box]] = []
        self._parts: dict[int, list[_Part]] = {}
        self._num_bytes: dict[int, int] = {}
        self._sent: torch.Tensor | None = None
        self._received: torch.Tensor | None = None

    def add(self, index: int, box: Box) -> None:
        """A box of this replica, and its place in the bucket."""
        self._boxes.append((index, box))

    def pack(self, local: Sequence[torch.Tensor], gathered: Sequence[torch.Tensor] | None) -> None:
        """Take all memory, and this rank's part from the ``local`` shard of each box to where it goes."""
        self._lay_out()
        own = self._parts[self._rank]
        if own and self._receivers - {self._rank}:
            self._sent = torch.empty(self._num_bytes[self._rank], dtype=torch.uint8, device=self._device)
            for part in own:
                # A copy of its own dtype and device: what lies on the host is cast there, then brought over, once.
                part.view(self._sent).copy_(local[part.box][part.block.local_slices])
        if gathered is None:
            return
        for part in own:
            mine = local[part.box][part.block.local_slices] if self._sent is None else part.view(self._sent)
            gathered[part.box][part.block.global_slices].copy_(mine)
        others = [num_bytes for rank, num_bytes in self._num_bytes.items() if rank != self._rank]
        self._received = torch.empty(max(others, default=0), dtype=torch.uint8, device=self._device)

    def run(self, gathered: Sequence[torch.Tensor] | None) -> None:
        """Send this rank's message to each receiver; receive one message after the other into the boxes."""
        place, size = self._group.index(self._rank), len(self._group)
        for step in range(1, size):
            to, source = self._group[(place + step) % size], self._group[(place - step) % size]
            operations = []
            if self._sent is not None and to in self._receivers:
                operations.append(dist.P2POp(dist.isend, self._sent, to))
            message = None
            if self._received is not None and self._num_bytes[source]:
                message = self._received[: self._num_bytes[source]]
                operations.append(dist.P2POp(dist.irecv, message, source))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            if message is not None and gathered is not None:
                for part in self._parts[source]:
                    gathered[part.box][part.block.global_slices].copy_(part.view(message))

    def _lay_out(self) -> None:
        """Where each block lies in its holder's message: wide dtypes first, so that none begins at an odd offset."""
        self._parts = {rank: [] for rank in self._group}
        self._num_bytes = dict.fromkeys(self._group, 0)
        for index, box in sorted(self._boxes, key=lambda each: -each[1].dtype.itemsize):
            for rank, blocks in zip(box.replica.ranks, box.replica.blocks, strict=True):
                for block in blocks:
                    self._parts[rank].append(_Part(index, block, box.dtype, self._num_bytes[rank]))
                    self._num_bytes[rank] += math.prod(block.size) * box.dtype.itemsize


def _cut_bucket(bucket: Bucket, gathered: list[torch.Tensor] | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors; each unit's boxes are let go behind it."""
    if gathered is None:
        return
    for unit in bucket.units:
        boxes = [gathered.pop(0) for _ in unit.boxes]
        for output in unit.outputs:
            yield output.key, _cut(output, unit.boxes, boxes)


def _cut(output: Output, boxes: Sequence[Box], gathered: Sequence[torch.Tensor]) -> torch.Tensor:
    index, entry = output.pieces[0]
    if entry.is_whole:
        return cut_tile(entry.tiles[0], boxes[index].offset, gathered[index]).contiguous()
    whole = torch.empty(output.shape, dtype=output.dtype, device=gathered[index].device)
    for index, entry in output.pieces:
        put_tiles(entry, boxes[index].offset, gathered[index], whole)
    return whole


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
