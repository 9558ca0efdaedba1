"""Blocks of sharded tensors against DTensor and FSDP2 themselves: a rank's blocks must be what it really holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moesaic.ops.placements import Block, blocks_at, find_run_axis, local_blocks, local_shape, shard_dim

R = Replicate()


def strided(dim: int, split_factor: int) -> Placement:
    return _StridedShard(dim, split_factor=split_factor)


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group that never sends anything: sharding without communication sees rank's own shard."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_holds(full: torch.Tensor, blocks: Sequence[Block], local: torch.Tensor) -> None:
    """``blocks`` cover ``local`` exactly once, with the values that they name in ``full``."""
    rebuilt = torch.full_like(local, -1)
    for block in blocks:
        assert (rebuilt[block.local_slices] == -1).all(), "blocks overlap"
        rebuilt[block.local_slices] = full[block.global_slices]
    assert torch.equal(rebuilt, local)
    assert sum(torch.Size(block.size).numel() for block in blocks) == local.numel()
    assert all(min(block.size, default=1) > 0 for block in blocks)
    if blocks:
        assert local_shape(blocks, full.ndim) == tuple(local.shape)


def test_shard_dim_sees_strided_shards() -> None:
    assert not strided(1, 2).is_shard()  # why the helper exists; remove it when this fails
    assert [shard_dim(p) for p in (Shard(2), strided(1, 2), R, Partial())] == [2, 1, None, None]


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((8, 6), (4,), (Shard(0),)),
        ((7, 6), (4,), (Shard(0),)),  # 2 2 2 1
        ((5, 3), (4,), (Shard(0),)),  # 2 2 1 0
        ((2, 3), (4,), (Shard(0),)),  # 1 1 0 0
        ((4, 7), (3,), (Shard(1),)),
        ((4, 3), (2,), (R,)),
        ((8, 6, 4), (2, 2), (Shard(1), Shard(0))),
        ((7, 6, 4), (2, 4), (Shard(1), Shard(0))),
        ((7, 6, 4), (2, 4), (R, Shard(0))),
        ((8, 6), (2, 2), (Shard(0), Shard(0))),
        ((7, 5), (2, 3), (Shard(0), Shard(0))),
        ((8, 6), (2, 2), (strided(0, 2), Shard(0))),
        ((7, 4), (2, 4), (strided(0, 4), Shard(0))),
        ((12, 4), (2, 2, 3), (Shard(1), strided(0, 3), Shard(0))),
        ((16, 4), (2, 2, 2), (R, strided(0, 2), Shard(0))),
        ((16, 4), (2, 2, 2), (strided(0, 4), Shard(0), Shard(0))),
        ((16,), (2,), (strided(0, 4),)),  # four disjoint intervals
        ((9,), (4,), (strided(0, 2),)),
        ((6, 4), (2, 2), (strided(0, 3), strided(1, 2))),  # six disjoint boxes
        ((4, 8), (2, 2), (strided(1, 2), Shard(1))),
        ((8,), (2, 2), (Shard(0), strided(0, 2))),
        ((0, 4), (2,), (Shard(0),)),
        ((), (2,), (R,)),
    ],
)
def test_blocks_are_what_dtensor_gives(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    world_size = torch.Size(mesh_shape).numel()
    covered = torch.zeros_like(full)
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            local = full
            for axis, placement in enumerate(placements):  # the definition: axis by axis from the left
                if isinstance(placement, (Shard, _StridedShard)):
                    chunks, _ = placement._split_tensor(local, mesh_shape[axis], with_padding=False)
                    local = chunks[mesh.get_local_rank(axis)]
            blocks = local_blocks(shape, mesh, placements)
            coordinate = mesh.get_coordinate()
            if not any(isinstance(placement, _StridedShard) for placement in placements):
                assert torch.equal(local, distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
        assert coordinate is not None
        assert blocks == blocks_at(shape, mesh_shape, coordinate, placements)
        assert_holds(full, blocks, local)
        for block in blocks:
            covered[block.global_slices] += 1
    num_replicas = [size for size, placement in zip(mesh_shape, placements, strict=True) if placement == R]
    assert (covered == torch.Size(num_replicas).numel()).all()


@pytest.mark.parametrize(
    ("num_experts", "edp", "efsdp", "ep"),
    [
        (8, 2, 2, 2),
        (7, 1, 1, 4),
        (7, 1, 2, 4),
        (7, 1, 3, 2),  # efsdp 2 2 0 on the first ep rank, 1 1 1 on the second: DTensor's own reading is wrong here
        (2, 1, 4, 2),  # more shards than experts
        (5, 1, 2, 3),
    ],
)
@pytest.mark.parametrize("fsdp_dim", [0, 1])
def test_blocks_are_what_fully_shard_holds(num_experts: int, edp: int, efsdp: int, ep: int, fsdp_dim: int) -> None:
    full = torch.arange(num_experts * 12 * 2, dtype=torch.float32).reshape(num_experts, 12, 2)
    world_size = edp * efsdp * ep
    covered = torch.zeros_like(full)
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            mesh = init_device_mesh("cpu", (edp, efsdp, ep), mesh_dim_names=("edp", "efsdp", "ep"))
            module = nn.Module()
            module.weight = nn.Parameter(distribute_tensor(full, mesh["ep"], [Shard(0)], src_data_rank=None))
            fsdp_mesh = mesh["efsdp"] if edp == 1 else mesh["edp", "efsdp"]
            fully_shard(module, mesh=fsdp_mesh, shard_placement_fn=lambda _: Shard(fsdp_dim))
            weight = module.weight
            assert isinstance(weight, DTensor)
            assert [shard_dim(placement) for placement in weight.placements[-2:]] == [fsdp_dim, 0]
            # The root mesh knows where the rank is; the one that FSDP derives is cached across the simulated ranks.
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            where = coordinate[-weight.device_mesh.ndim :]
            blocks = blocks_at(weight.shape, tuple(weight.device_mesh.shape), where, weight.placements)
            local = weight.to_local().detach()
        assert_holds(full, blocks, local)
        for block in blocks:
            covered[block.global_slices] += 1
    assert (covered == edp).all()


def test_the_axis_of_contiguous_runs() -> None:
    assert find_run_axis((Shard(1), Shard(0)), 0) == 1
    assert find_run_axis((strided(0, 2), Shard(0)), 0) == 1
    assert find_run_axis((Shard(0), R), 0) == 0
    assert find_run_axis((Shard(0), Shard(0)), 0) is None
    assert find_run_axis((strided(0, 2), R), 0) is None
    assert find_run_axis((Shard(0), strided(0, 2)), 0) is None
    assert find_run_axis((Shard(1), R), 0) is None


def test_example_of_the_docstring() -> None:
    placements = (strided(0, 2), Shard(0))
    assert blocks_at((8,), (2, 2), (1, 0), placements) == (Block((2,), (0,), (2,)),)
    two = blocks_at((8,), (2, 2), (1, 0), (strided(0, 2), R))
    assert two == (Block((2,), (0,), (2,)), Block((6,), (2,), (2,)))


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with simulated_rank(3, 4):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        assert local_blocks((4,), mesh, (Shard(0),)) == ()


def test_partial_tensors_have_no_blocks() -> None:
    with pytest.raises(AssertionError, match="partial"):
        blocks_at((4,), (2,), (0,), (Partial(),))


def test_random_placements_cover_the_tensor_once() -> None:
    """All placements of two axes on a 2-D tensor, sizes 0..6: a check of the arithmetic alone, without DTensor."""
    choices = [R, Shard(0), Shard(1), strided(0, 2), strided(1, 3)]
    for rows, placements in itertools.product(range(7), itertools.product(choices, repeat=2)):
        covered = torch.zeros(rows, 5)
        for coordinate in itertools.product(range(2), range(3)):
            for block in blocks_at((rows, 5), (2, 3), coordinate, placements):
                covered[block.global_slices] += 1
        num_replicas = [size for size, placement in zip((2, 3), placements, strict=True) if placement == R]
        assert (covered == torch.Size(num_replicas).numel()).all(), (rows, placements)
