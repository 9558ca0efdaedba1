"""What an export writes: which rank gathers what, and which file each tensor goes to. Pure arithmetic on placements.

A stack of experts that is split over ranks by expert (ep) makes one share per ep rank, so that the ep ranks write at
the same time; everything else is one share. Example, 4 ranks (efsdp 2, ep 2), gate_up_proj [4, 2I, H] placed as
(Shard(1), Shard(0)):

    share of experts 0..1: rank 2 sends its rows to rank 0, which writes ...experts.0.gate_proj.weight, ...
    share of experts 2..3: rank 3 sends its rows to rank 1
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, blocks_at, find_run_axis, shard_dim
from moesaic.weights.entries import Entry, file_entries
from moesaic.weights.quantized import Stored
from moesaic.weights.tiles import Grid, Shape

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Holders = tuple[tuple[int, tuple[Block, ...]], ...]  # (rank, its blocks), each part of a tensor once


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one writer writes of one parameter.

    Attributes:
        name: the parameter.
        offset, size: the box of it.
        dtype: in the file.
        holders: (rank, its blocks), every part of the box once.
        writers: ranks that may write it.
        stream: shares of one stream follow one another in the same files.
        entries: the files' tensors that are filled from the box.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    holders: Holders
    writers: tuple[int, ...]
    stream: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One tensor in a file: dtype as the header has it, shape, and its bytes, counted from behind the header."""

    dtype: str
    shape: Shape
    start: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class FilePlan:
    """One safetensors file: who writes it (a rank), the size of all its tensors, and these, one behind the other."""

    writer: int
    num_bytes: int = 0
    tensors: dict[str, FileEntry] = field(default_factory=dict)

    def add(self, key: str, dtype: str, shape: Shape, num_bytes: int) -> None:
        """One more tensor, behind the last."""
        self.tensors[key] = FileEntry(dtype=dtype, shape=shape, start=self.num_bytes, num_bytes=num_bytes)
        self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """All files; for each share, in the order in which they are run, the file of each of its entries; and the file of
    each tensor that is copied from where the model was loaded."""

    files: tuple[FilePlan, ...]
    steps: tuple[tuple[Share, tuple[int, ...]], ...]
    copies: tuple[tuple[Stored, int], ...] = ()

    def file_name(self, index: int) -> str:
        """``model-00001-of-000NN.safetensors``."""
        return f"model-{index + 1:05d}-of-{len(self.files):05d}.safetensors"


def plan_export(
    shares: Sequence[Share],
    *,
    max_file_bytes: int,
    kept: Sequence[Stored] = (),
    unpacked: torch.dtype = torch.float32,
    ranks: Sequence[int] = (0,),
) -> ExportPlan:
    """Put the entries of all shares, in order, into files of at most ``max_file_bytes`` (more where one tensor is). The
    shares of a stream fill one file after another; with each new file the next of its writers takes over. Pure.

    Args:
        kept: tensors to copy, into files of their own, which the ``ranks`` write in turn.
        unpacked: dtype of those among them that were quantised.
    """
    files: list[FilePlan] = []
    current: dict[int, int] = {}  # stream -> the file it is filling
    num_files: dict[int, int] = defaultdict(int)
    placed: dict[str, int] = {}  # a tensor of several parameters is placed with the first of them
    steps = []
    for share in shares:
        known = [files[placed[entry.key]].writer for entry in share.entries if entry.key in placed]
        writer: int | None = known[0] if known else None  # one writer per share: it gathers the share once
        indices: list[int] = []
        for entry in share.entries:
            num_bytes = math.prod(entry.shape) * share.dtype.itemsize
            if entry.key not in placed:
                file = files[current[share.stream]] if share.stream in current else None
                writers = share.writers if writer is None else (writer,)
                if file is None or file.writer not in writers or not _fits(file, num_bytes, share, max_file_bytes):
                    file = FilePlan(writer=writers[num_files[share.stream] % len(writers)])
                    num_files[share.stream] += 1
                    current[share.stream] = len(files)
                    files.append(file)
                file.add(entry.key, SAFETENSORS_DTYPES[share.dtype], entry.shape, num_bytes)
                placed[entry.key] = current[share.stream]
            index = placed[entry.key]
            writer = files[index].writer
            assert all(files[other].writer == writer for other in indices), f"{entry.key} is pieced together twice"
            indices.append(index)
        steps.append((share, tuple(indices)))
    copies = _plan_copies(kept, files, max_file_bytes, unpacked, ranks)
    return ExportPlan(files=tuple(files), steps=tuple(steps), copies=tuple(copies))


def _fits(file: FilePlan, num_bytes: int, share: Share, max_file_bytes: int) -> bool:
    # A tensor that began at an odd offset couldn't be mapped; it happens only where dtypes are mixed.
    return file.num_bytes + num_bytes <= max_file_bytes and not file.num_bytes % share.dtype.itemsize


def _plan_copies(
    kept: Sequence[Stored],
    files: list[FilePlan],
    max_file_bytes: int,
    unpacked: torch.dtype,
    ranks: Sequence[int],
) -> list[tuple[Stored, int]]:
    """Add files for ``kept``. As bytes, whatever their dtype; quantised ones unpacked: beside plain weights no
    config.json would say how to read them."""
    copies = []
    first = len(files)
    # Wide ones first, so that none begins at an odd offset.
    by_width = sorted(kept, key=lambda stored: -_width(stored, unpacked))
    for stored in by_width:
        num_bytes = math.prod(stored.shape) * unpacked.itemsize if stored.scales else stored.values.num_bytes
        if len(files) == first or files[-1].num_bytes + num_bytes > max_file_bytes:
            files.append(FilePlan(writer=ranks[(len(files) - first) % len(ranks)]))
        dtype = SAFETENSORS_DTYPES[unpacked] if stored.scales else stored.values.dtype
        files[-1].add(stored.key, dtype, stored.shape, num_bytes)
        copies.append((stored, len(files) - 1))
    return copies


def _width(stored: Stored, unpacked: torch.dtype) -> int:
    """Bytes of a value."""
    return unpacked.itemsize if stored.scales else stored.values.num_bytes // max(1, math.prod(stored.shape))


def build_shares(
    state: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    ranks: Sequence[int],
) -> list[Share]:
    """The shares of all parameters, in the order of ``state``. Pure: the same on every rank.

    Args:
        grids: of each parameter, over the files' tensors.
        shapes: of these tensors.
        dtypes: of each parameter in the files.
        ranks: all ranks of the model; the first holds what isn't a DTensor.
    """
    split_of: dict[object, list[tuple[range, Holders]]] = {}  # parameters of one kind are split alike
    shares: list[Share] = []
    for name, tensor in state.items():
        entries = file_entries(grids[name], shapes)
        axis, kind = _run_axis(tensor, entries)
        if (kind, axis) not in split_of:
            split_of[kind, axis] = _split(tensor, axis, ranks[0])
        parts = [(rows, holders, _in_rows(entries, rows)) for rows, holders in split_of[kind, axis]]
        if axis is not None and sum(len(inside) for _, _, inside in parts) < len(entries):
            axis = None  # a tensor reaches over two runs: one rank gathers the whole parameter
            parts = [(rows, holders, ()) for rows, holders in _split(tensor, None, ranks[0])]
        for index, (rows, holders, inside) in enumerate(parts):
            whole = axis is None
            shares.append(
                Share(
                    name=name,
                    offset=(0,) * tensor.ndim if whole else (rows.start, *(0 for _ in tensor.shape[1:])),
                    size=tuple(tensor.shape) if whole else (len(rows), *tensor.shape[1:]),
                    dtype=dtypes[name],
                    holders=holders,
                    writers=tuple(ranks) if whole else tuple(rank for rank, _ in holders),
                    stream=0 if whole else 1 + index,
                    entries=entries if whole else inside,
                )
            )
    return shares


def _run_axis(tensor: torch.Tensor, entries: Sequence[Entry]) -> tuple[int | None, object]:
    """The mesh axis whose ranks write a parameter apart, mostly a stack of experts; and what makes two split alike."""
    if not isinstance(tensor, DTensor):
        return None, tensor.shape
    axis = find_run_axis(tensor.placements, 0) if len(entries) > 1 else None
    return axis, (tensor.shape, id(tensor.device_mesh), tensor.placements)


def _in_rows(entries: Sequence[Entry], rows: range) -> tuple[Entry, ...]:
    """Those that lie in ``rows`` of the parameter with all their parts."""
    return tuple(
        entry
        for entry in entries
        if all(tile.offset and rows.start <= tile.offset[0] <= rows.stop - tile.size[0] for tile in entry.tiles)
    )


def _split(tensor: torch.Tensor, axis: int | None, root: int) -> list[tuple[range, Holders]]:
    """For each coordinate on mesh ``axis`` (once, if ``None``): rows, and who (first replica) holds what of them."""
    if not isinstance(tensor, DTensor):
        origin = (0,) * tensor.ndim
        return [(range(0), ((root, (Block(origin, origin, tuple(tensor.shape)),)),))]
    holders_of: dict[int, list[tuple[int, tuple[Block, ...]]]] = defaultdict(list)
    for coordinate, rank, blocks in replica_of(tensor, int(tensor.device_mesh.mesh.flatten()[0])):
        if blocks:
            holders_of[0 if axis is None else coordinate[axis]].append((rank, blocks))
    result = []
    for _, holders in sorted(holders_of.items()):
        blocks = tuple(block for _, its_blocks in holders for block in its_blocks)
        rows = range(0)
        if axis is not None:
            rows = range(min(b.global_offset[0] for b in blocks), max(b.global_offset[0] + b.size[0] for b in blocks))
            held = sum(math.prod(block.size) for block in blocks)
            assert held == len(rows) * math.prod(tensor.shape[1:]), f"{tensor.placements}: experts aren't in one run"
        result.append((rows, tuple(holders)))
    return result


def replica_of(tensor: DTensor, rank: int) -> Iterator[tuple[tuple[int, ...], int, tuple[Block, ...]]]:
    """Those that hold a whole ``tensor`` together with ``rank``, itself among them: (coordinate, rank, its blocks),
    blocks perhaps none, in the mesh's order. Each value once. Pure."""
    mesh_shape = tuple(tensor.device_mesh.shape)
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    coordinates = list(itertools.product(*(range(size) for size in mesh_shape)))
    own = coordinates[ranks.index(rank)]
    replicated = [axis for axis, placement in enumerate(tensor.placements) if shard_dim(placement) is None]
    for coordinate, holder in zip(coordinates, ranks, strict=True):
        if all(coordinate[axis] == own[axis] for axis in replicated):
            yield coordinate, holder, blocks_at(tensor.shape, mesh_shape, coordinate, tensor.placements)
