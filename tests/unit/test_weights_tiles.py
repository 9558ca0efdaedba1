"""Grids do what torch does to tensors, and reads fill every rank's blocks exactly."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import moesaic.weights.tiles as tiles_module
from moesaic.ops.placements import Block, blocks_at
from moesaic.weights.load import order_dims
from moesaic.weights.tiles import Grid, MisfitError, concatenate, interleave, plan_reads, stack

FILES = {
    **{f"{e}.gate": torch.arange(12).reshape(4, 3) + 100 * e for e in range(7)},
    **{f"{e}.up": torch.arange(12).reshape(4, 3) + 100 * e + 50 for e in range(7)},
    "stacked": torch.arange(7 * 8 * 3).reshape(7, 8, 3) + 1000,
}


def whole(key: str) -> Grid:
    return Grid.whole(key, FILES[key].shape)


def read_block(grid: Grid, block: Block, files: Mapping[str, torch.Tensor] = FILES) -> torch.Tensor:
    local = torch.full(tuple(o + s for o, s in zip(block.local_offset, block.size, strict=True)), -1)
    num_values = 0
    for read in plan_reads(grid, block):
        values = files[read.key][tuple(slice(r.start, r.stop, r.step) for r in read.source)]
        num_values += values.numel()
        local[read.dest].copy_(order_dims(values, read.dims))
    assert num_values == torch.Size(block.size).numel()
    return local[block.local_slices]


def assemble(grid: Grid) -> torch.Tensor:
    grid.assert_covered()
    origin = (0,) * len(grid.shape)
    return read_block(grid, Block(origin, origin, grid.shape))


GATES, UPS = ([FILES[f"{e}.{part}"] for e in range(7)] for part in ("gate", "up"))
GATE_GRIDS, UP_GRIDS = ([whole(f"{e}.{part}") for e in range(7)] for part in ("gate", "up"))
STACKED, GRID = FILES["stacked"], whole("stacked")
PER_EXPERT = concatenate([stack(GATE_GRIDS, 0), stack(UP_GRIDS, 0)], 1)
CASES: dict[str, tuple[Grid, torch.Tensor]] = {
    "whole": (GRID, STACKED),
    "per expert": (PER_EXPERT, torch.cat([torch.stack(GATES), torch.stack(UPS)], 1)),
    "stacked last": (stack(GATE_GRIDS, 2), torch.stack(GATES, 2)),
    "transposed": (GRID.transpose(1, 2), STACKED.transpose(1, 2)),
    "transposed stack": (stack(GATE_GRIDS, 0).transpose(0, 2), torch.stack(GATES).transpose(0, 2)),
    "halves": (interleave(GRID, 1, inverse=False), torch.cat([STACKED[:, 0::2], STACKED[:, 1::2]], 1)),
    "there and back": (interleave(interleave(PER_EXPERT, 1, inverse=False), 1, inverse=True), assemble(PER_EXPERT)),
    "a cut over parts": (PER_EXPERT.cut(1, range(1, 8, 3)), assemble(PER_EXPERT)[:, 1:8:3]),
    "a cut of a cut": (GRID.cut(1, range(1, 8, 2)).cut(1, range(1, 4, 2)), STACKED[:, 1:8:2][:, 1:4:2]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_grid_is_what_torch_makes(name: str) -> None:
    grid, expected = CASES[name]
    assert grid.shape == tuple(expected.shape)
    assert torch.equal(assemble(grid), expected)


@pytest.mark.parametrize("name", ["whole", "per expert", "transposed", "halves"])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Shard(2), Shard(0))),
        ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
        ((2, 2, 2), (Replicate(), Shard(1), Shard(0))),
        ((3,), (Shard(1),)),
    ],
)
def test_reads_fill_every_rank_exactly(
    name: str, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    grid, full = CASES[name]
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        for block in blocks_at(grid.shape, mesh_shape, coordinate, placements):
            assert torch.equal(read_block(grid, block), full[block.global_slices])


def test_reads_of_the_docstring() -> None:
    grid = concatenate([stack(GATE_GRIDS[:2], 0), stack(UP_GRIDS[:2], 0)], 1)
    assert [(tile.key, tile.offset, tile.size) for tile in grid.tiles] == [
        ("0.gate", (0, 0, 0), (1, 4, 3)),
        ("1.gate", (1, 0, 0), (1, 4, 3)),
        ("0.up", (0, 4, 0), (1, 4, 3)),
        ("1.up", (1, 4, 0), (1, 4, 3)),
    ]
    reads = plan_reads(grid, Block((1, 2, 0), (0, 0, 0), (1, 4, 3)))
    assert [(read.key, read.source, read.dest) for read in reads] == [
        ("1.gate", (range(2, 4), range(3)), (slice(0, 1), slice(0, 2), slice(0, 3))),
        ("1.up", (range(2), range(3)), (slice(0, 1), slice(2, 4), slice(0, 3))),
    ]


def test_a_read_goes_expert_by_expert() -> None:
    (read,) = plan_reads(GRID.transpose(1, 2), Block((2, 0, 0), (1, 0, 0), (3, 3, 8)))
    parts = read.split()
    assert [part.source[0] for part in parts] == [range(2, 3), range(3, 4), range(4, 5)]
    assert [part.dest[0] for part in parts] == [slice(1, 2), slice(2, 3), slice(3, 4)]
    assert all(part.dest[1:] == read.dest[1:] for part in parts)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(MisfitError, match=r"gives \[1, 2, 3\] beside \[1, 4, 3\]"):
        stack([whole("0.gate"), whole("0.up").cut(0, range(2))], 0)
    with pytest.raises(MisfitError, match="no halves"):
        interleave(GRID, 0, inverse=False)


def test_the_file_itself_needs_no_torch() -> None:
    code = (
        "import importlib.util, sys; sys.modules['torch'] = None\n"
        f"spec = importlib.util.spec_from_file_location('tiles', {tiles_module.__file__!r})\n"
        "module = sys.modules['tiles'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(len(module.Grid.whole('lm_head.weight', (2, 3)).tiles))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("1\n", "")
