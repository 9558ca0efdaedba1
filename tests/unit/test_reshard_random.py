"""Plans between random layouts: any mesh and placements to any strided copies, ranks of both sides in one process."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moesaic.reshard.blocks import find_holdings
from moesaic.reshard.layout import Copy, Held, Holding, SourceLayout, TargetLayout, TargetTensor
from moesaic.reshard.transfers import ReshardPlan, plan_transfers
from tests.reshard_plans import check, missing_bytes


def random_holdings(rng: random.Random, shape: tuple[int, ...], num_ranks: int) -> tuple[Holding, ...]:
    """A random mesh over ranks in random order, sharded as FSDP2 would (strided where axes to the right shard too)."""
    mesh_shape: list[int] = []
    left = num_ranks
    while left > 1:
        size = rng.choice([size for size in range(2, left + 1) if left % size == 0])
        mesh_shape.append(size)
        left //= size
    placements: list[Placement] = []
    split = [1] * len(shape)
    for size in reversed(mesh_shape):
        dim = rng.choice([None, *range(len(shape))])
        if dim is None:
            placements.insert(0, Replicate())
        else:
            placements.insert(0, Shard(dim) if split[dim] == 1 else _StridedShard(dim, split_factor=split[dim]))
            split[dim] *= size
    return find_holdings(shape, mesh_shape, rng.sample(range(num_ranks), num_ranks), placements)


def random_copies(rng: random.Random, held: Held, target: str) -> tuple[list[Copy], int]:
    """Copies of one tensor into one target without overlaps there: steps, permuted dims, repeats. And its size."""
    copies, offset = [], 0
    for _ in range(rng.randint(1, 2)):
        start: list[int] = []
        dims: list[int | None] = []
        steps: list[int] = []
        shape: list[int] = []
        for dim, size in enumerate(held.shape):
            begin = rng.randrange(size)
            start.append(begin)
            if rng.random() < 0.85:
                step = rng.choice([1, 1, 2, 3])
                dims.append(dim)
                steps.append(step)
                shape.append(rng.randint(1, (size - 1 - begin) // step + 1))
        if rng.random() < 0.3:
            where = rng.randint(0, len(dims))
            dims.insert(where, None)
            steps.insert(where, rng.choice([0, 1]))
            shape.insert(where, rng.randint(1, 3))
        order = rng.sample(range(len(dims)), len(dims))
        strides, stride = [0] * len(dims), rng.choice([1, 1, 2])
        for dim in rng.sample(range(len(dims)), len(dims)):
            strides[dim] = stride
            stride *= shape[order[dim]]
        copies.append(
            Copy(
                source=held.name,
                target=target,
                shape=tuple(shape[dim] for dim in order),
                source_start=tuple(start),
                source_dims=tuple(dims[dim] for dim in order),
                source_steps=tuple(steps[dim] for dim in order),
                target_offset=offset,
                target_strides=tuple(strides),
            )
        )
        offset += stride
    return copies, offset


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 3, 4, 6, 8, 12])
    tensors = []
    for index in range(rng.randint(1, 4)):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice([torch.float32, torch.bfloat16])
        holdings = random_holdings(rng, shape, num_ranks)
        wire = rng.choice([dtype, torch.bfloat16])
        tensors.append(
            Held(name=f"l.{index // 2}.{index}", shape=shape, dtype=dtype, wire_dtype=wire, holdings=holdings)
        )
    source = SourceLayout(num_ranks=num_ranks, tensors=tuple(tensors))
    layouts = []
    for _ in range(rng.randint(1, 3)):
        copies, described = [], []
        for held in rng.sample(tensors, rng.randint(1, len(tensors))):
            its_copies, size = random_copies(rng, held, f"to {held.name}")
            copies += its_copies
            dtype = rng.choice([torch.float32, torch.bfloat16])
            described.append(TargetTensor(name=f"to {held.name}", shape=(size,), dtype=dtype))
        layouts.append(TargetLayout(tensors=tuple(described), copies=tuple(copies), fills=()))
    layouts = [rng.choice(layouts) for _ in range(rng.randint(1, 5))]
    processes = rng.sample(range(num_ranks + 3 + len(layouts)), len(layouts))
    plan = plan_transfers(
        source,
        layouts,
        target_process=processes,
        max_message_bytes=rng.choice([16, 40, 100, 10**6]),
        min_share_bytes=rng.choice([16, 40, 10**6]),
    )
    at_hand = [process if process < num_ranks else None for process in processes]
    check_bytes_may_repeat(plan, source, layouts, at_hand)


def check_bytes_may_repeat(
    plan: ReshardPlan, source: SourceLayout, layouts: list[TargetLayout], at_hand: list[int | None]
) -> None:
    """Random copies may read one element twice: then it is sent twice, and never more often than copies read it."""
    check(plan, source, layouts, at_hand)
    for target, layout in enumerate(layouts):
        alone = sum(
            missing_bytes(dataclasses.replace(layout, copies=(copy,)), source, at_hand[target])
            for copy in layout.copies
        )
        assert plan.bytes_received(target) == alone >= plan.lower_bound(target)
