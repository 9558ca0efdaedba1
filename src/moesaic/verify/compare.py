"""A rank's shards against the reference's files: each rank reads what it holds, and only numbers are gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, local_blocks, shard_dim

# Columns of what a rank measures of one tensor.
_DIFFERENCE, _LARGEST, _CROSS, _OWN, _THEIRS, _BROKEN, _COPIES = range(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One tensor on all ranks together; a = ours, b = the reference.

    Attributes:
        error: max|a-b| / max|b|; infinite where a value isn't finite, or the names differ.
        ratio: sum(a b) / sum(b b) over what all ranks hold, so that least squares fit a = ratio * b; None where b is
            zero. Where each rank has only its own part of a sum over n ranks, it is 1/n exactly.
        cosine: of a and b in the same sense: 1 where a is a multiple of b.
        power: sum of a's squares, each distinct value once.
        reference_power: the same of b.
        rank: the one with the largest difference.
        placements: how it lies here, e.g. ``efsdp: S(1); ep: S(0)``.
    """

    name: str
    error: float
    ratio: float | None
    cosine: float | None
    power: float
    reference_power: float
    rank: int
    placements: str


class Comparison:
    """Compares tensors of one kind (``start``, ``gradient``, ``weight``), on every rank alike."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, f"{prefix}/"
        with safe_open(path, framework="pt") as file:
            self.names = sorted(key.removeprefix(self._prefix) for key in file.keys() if key.startswith(self._prefix))

    def measure(self, ours: Mapping[str, Tensor], everything: Mapping[str, Tensor]) -> list[Measured]:
        """Every tensor of the reference, and those that only this side has. Every rank must call it, with equal names.

        Args:
            ours: by name; one that is missing counts as zeros (a gradient that nothing computed).
            everything: what tells how a tensor lies where it is missing in ``ours``.
        """
        names = [*self.names, *sorted(set(ours) - set(self.names))]
        unknown = [name for name in self.names if name not in everything]
        assert not unknown, f"the model has no {unknown}"
        with safe_open(self._path, framework="pt") as file:
            rows = [self._measure_one(file, name, ours.get(name), ours.get(name, everything[name])) for name in names]
        gathered = [torch.zeros(len(names), 7, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(rows, dtype=torch.float64).reshape(len(names), 7))
        table = torch.stack(gathered, dim=1)  # [names, ranks, columns]
        return [
            _combine(name, ranks.tolist(), _layout(everything[name])) for name, ranks in zip(names, table, strict=True)
        ]

    @torch.no_grad()
    def _measure_one(self, file: safe_open, name: str, ours: Tensor | None, like: Tensor) -> list[float]:
        row = [0.0] * 7
        row[_COPIES] = dist.get_world_size() / _num_parts(like)
        local = None if ours is None else (ours.to_local() if isinstance(ours, DTensor) else ours).detach()
        for block in _blocks(like):
            mine = None if local is None else local[block.local_slices].cpu().double()
            theirs = self._read(file, name, block)
            if mine is None:
                mine = torch.zeros(block.size, dtype=torch.float64)
            theirs = torch.zeros_like(mine) if theirs is None else theirs.double()
            if mine.shape != theirs.shape:
                row[_BROKEN] = 1
                continue
            row[_BROKEN] = max(row[_BROKEN], float(not (mine.isfinite().all() and theirs.isfinite().all())))
            row[_DIFFERENCE] = max(row[_DIFFERENCE], (mine - theirs).abs().max().item())
            row[_LARGEST] = max(row[_LARGEST], theirs.abs().max().item())
            row[_CROSS] += (mine * theirs).sum().item()
            row[_OWN] += mine.square().sum().item()
            row[_THEIRS] += theirs.square().sum().item()
        return row

    def _read(self, file: safe_open, name: str, block: Block) -> Tensor | None:
        """This rank's part of the reference's tensor; None where it has none."""
        if name not in self.names:
            return None
        if not block.size:
            scalar: Tensor = file.get_tensor(self._prefix + name)
            return scalar
        part: Tensor = file.get_slice(self._prefix + name)[block.global_slices]
        return part


def _blocks(tensor: Tensor) -> Sequence[Block]:
    if isinstance(tensor, DTensor):
        return local_blocks(tensor.shape, tensor.device_mesh, tensor.placements)
    start = (0,) * tensor.ndim
    return [Block(global_offset=start, local_offset=start, size=tuple(tensor.shape))] if tensor.numel() else []


def _num_parts(tensor: Tensor) -> int:
    """Ranks over which the values of a tensor are split; all others hold copies."""
    if not isinstance(tensor, DTensor):
        return 1
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(axis) for axis, placement in axes if shard_dim(placement) is not None)


def _layout(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole on every rank"
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return "; ".join(f"{axis}: {placement}" for axis, placement in axes)


def _combine(name: str, ranks: list[list[float]], placements: str) -> Measured:
    difference, largest = max(row[_DIFFERENCE] for row in ranks), max(row[_LARGEST] for row in ranks)
    cross, own, theirs = (sum(row[column] for row in ranks) for column in (_CROSS, _OWN, _THEIRS))
    copies = ranks[0][_COPIES]
    error = 0.0 if difference == 0 else difference / max(largest, 1e-30)
    is_finite = not any(row[_BROKEN] for row in ranks) and math.isfinite(error)
    return Measured(
        name=name,
        error=error if is_finite else math.inf,
        ratio=cross / theirs if theirs and is_finite else None,
        cosine=cross / math.sqrt(own * theirs) if own and theirs and is_finite else None,
        power=own / copies if is_finite else math.inf,
        reference_power=theirs / copies if is_finite else math.inf,
        rank=max(range(len(ranks)), key=lambda rank: (ranks[rank][_BROKEN], ranks[rank][_DIFFERENCE])),
        placements=placements,
    )
