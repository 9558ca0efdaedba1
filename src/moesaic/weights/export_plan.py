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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, blocks_at, find_run_axis, shard_dim
from moesaic.specs import ModelSpec
from moesaic.weights.keys import HubTensor, hub_tensors

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
        entries: the Hub's tensors in the box.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    holders: Holders
    writers: tuple[int, ...]
    stream: int
    entries: tuple[HubTensor, ...]


@dataclass(slots=True, kw_only=True)
class FilePlan:
    """One safetensors file: who writes it, and its tensors one behind the other.

    Attributes:
        writer: rank.
        num_bytes: of all tensors.
        tensors: key -> (dtype, shape, first byte behind the header).
    """

    writer: int
    num_bytes: int = 0
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """All files, and for each share, in the order in which they are run, the file of each of its entries."""

    files: tuple[FilePlan, ...]
    steps: tuple[tuple[Share, tuple[int, ...]], ...]

    def file_name(self, index: int) -> str:
        """``model-00001-of-000NN.safetensors``."""
        return f"model-{index + 1:05d}-of-{len(self.files):05d}.safetensors"


def plan_export(shares: Sequence[Share], *, max_file_bytes: int) -> ExportPlan:
    """Put the entries of all shares, in order, into files of at most ``max_file_bytes`` (more where one tensor is). The
    shares of a stream fill one file after another; with each new file the next of its writers takes over. Pure."""
    files: list[FilePlan] = []
    current: dict[int, int] = {}  # stream -> the file it is filling
    num_files: dict[int, int] = defaultdict(int)
    steps = []
    for share in shares:
        writer: int | None = None  # one writer per share: it gathers the share once
        indices = []
        for entry in share.entries:
            num_bytes = _num_bytes(entry, share.dtype)
            file = files[current[share.stream]] if share.stream in current else None
            fits = (
                file is not None
                and file.num_bytes + num_bytes <= max_file_bytes
                and file.writer in (writer, *share.writers)
            )
            # A tensor that began at an odd offset couldn't be mapped; it happens only where dtypes are mixed.
            if not fits or (file is not None and file.num_bytes % share.dtype.itemsize):
                turn = num_files[share.stream]
                file = FilePlan(writer=share.writers[turn % len(share.writers)] if writer is None else writer)
                num_files[share.stream] += 1
                current[share.stream] = len(files)
                files.append(file)
            assert file is not None
            file.tensors[entry.key] = (share.dtype, entry.shape, file.num_bytes)
            file.num_bytes += num_bytes
            writer = file.writer
            indices.append(current[share.stream])
        steps.append((share, tuple(indices)))
    return ExportPlan(files=tuple(files), steps=tuple(steps))


def build_shares(
    state: Mapping[str, torch.Tensor],
    spec: ModelSpec | None,
    dtypes: Mapping[str, torch.dtype],
    ranks: Sequence[int],
) -> list[Share]:
    """The shares of all parameters, in the order of ``state``. Pure: the same on every rank.

    Args:
        dtypes: of each parameter in the files.
        ranks: all ranks of the model; the first holds what isn't a DTensor.
    """
    split_of: dict[object, list[tuple[range, Holders]]] = {}  # parameters of one kind are split alike
    shares: list[Share] = []
    for name, tensor in state.items():
        entries = tuple(hub_tensors(name, tensor.shape, spec))
        # More than one Hub tensor: a stack of experts, which ranks that hold whole runs of experts write apart.
        axis = find_run_axis(tensor.placements, 0) if isinstance(tensor, DTensor) and len(entries) > 1 else None
        mesh_id = id(tensor.device_mesh) if isinstance(tensor, DTensor) else None
        kind = (tensor.shape, mesh_id, tensor.placements if isinstance(tensor, DTensor) else None, axis)
        if kind not in split_of:
            split_of[kind] = _split(tensor, axis, ranks[0])
        for index, (rows, holders) in enumerate(split_of[kind]):
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
                    entries=entries if whole else tuple(entry for entry in entries if entry.offset[0] in rows),
                )
            )
    return shares


def _split(tensor: torch.Tensor, axis: int | None, root: int) -> list[tuple[range, Holders]]:
    """For each coordinate on mesh ``axis`` (once, if ``None``): rows, and who (first replica) holds what of them."""
    if not isinstance(tensor, DTensor):
        origin = (0,) * tensor.ndim
        return [(range(0), ((root, (Block(origin, origin, tuple(tensor.shape)),)),))]
    mesh_shape = tuple(tensor.device_mesh.shape)
    replicated = [index for index, placement in enumerate(tensor.placements) if shard_dim(placement) is None]
    holders_of: dict[int, list[tuple[int, tuple[Block, ...]]]] = defaultdict(list)
    coordinates = itertools.product(*(range(size) for size in mesh_shape))
    for coordinate, rank in zip(coordinates, tensor.device_mesh.mesh.flatten().tolist(), strict=True):
        blocks = blocks_at(tensor.shape, mesh_shape, coordinate, tensor.placements)
        if blocks and not any(coordinate[index] for index in replicated):
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


def _num_bytes(entry: HubTensor, dtype: torch.dtype) -> int:
    return torch.Size(entry.shape).numel() * dtype.itemsize
