"""A second opinion on reshard plans: element by element, and a run of all processes in one by what the plan says."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.ops.placements import local_shape
from moesaic.reshard.layout import Copy, Held, Message, Piece, SourceLayout, SourceRegion, TargetLayout, TargetRegion
from moesaic.reshard.packing import copy_rounded, pack, select, unpack
from moesaic.reshard.transfers import ProcessView, ReshardPlan

Locals = list[dict[str, Tensor]]


def random_values(source: SourceLayout, seed: int = 0) -> dict[str, Tensor]:
    """A whole tensor for each of the source's."""
    generator = torch.Generator().manual_seed(seed)
    return {held.name: torch.randn(held.shape, generator=generator).to(held.dtype) for held in source.tensors}


def shard_values(source: SourceLayout, whole: Mapping[str, Tensor]) -> Locals:
    """Each trainer rank's local tensors."""
    result: Locals = [{} for _ in range(source.num_ranks)]
    for held in source.tensors:
        blocks = defaultdict(list)
        for holding in held.holdings:
            for rank, block in holding.holders:
                blocks[rank].append(block)
        for rank, its_blocks in blocks.items():
            local = torch.full(local_shape(its_blocks, len(held.shape)), float("nan"), dtype=held.dtype)
            for block in its_blocks:
                local[block.local_slices] = whole[held.name][block.global_slices]
            result[rank][held.name] = local
    return result


def read_positions(copy: Copy, shape: Sequence[int]) -> np.ndarray:
    """Flat index in the source of each element of a copy."""
    grid = np.indices(copy.shape)
    where = [np.full(copy.shape, start) for start in copy.source_start]
    for dim, (source_dim, step) in enumerate(zip(copy.source_dims, copy.source_steps, strict=True)):
        if source_dim is not None:
            where[source_dim] = where[source_dim] + step * grid[dim]
    flat = np.zeros(copy.shape, np.int64)
    for index, size in zip(where, shape, strict=True):
        assert (index >= 0).all() and (index < size).all()
        flat = np.asarray(flat * size + index)
    return flat


def written_positions(shape: Sequence[int], offset: int, strides: Sequence[int]) -> np.ndarray:
    """Flat position in the target's memory of each element of a strided region."""
    grid = np.indices(shape)
    return np.asarray(
        sum((stride * index for stride, index in zip(strides, grid, strict=True)), np.full(shape, offset))
    )


def load_whole(layout: TargetLayout, source: SourceLayout, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the engine rank has after loading whole tensors, rounded first as the export rounds."""
    wires = {held.name: held.wire_dtype for held in source.tensors}
    result = {tensor.name: torch.full(tensor.shape, float("nan"), dtype=tensor.dtype) for tensor in layout.tensors}
    for copy in layout.copies:
        values = whole[copy.source].to(wires[copy.source]).reshape(-1)
        read = torch.from_numpy(read_positions(copy, whole[copy.source].shape))
        written = torch.from_numpy(written_positions(copy.shape, copy.target_offset, copy.target_strides))
        flat = result[copy.target].view(-1)
        flat[written] = values[read].to(flat.dtype)
    for fill in layout.fills:
        written = torch.from_numpy(written_positions(fill.shape, fill.target_offset, fill.target_strides))
        result[fill.target].view(-1)[written] = fill.value
    return result


def missing_bytes(layout: TargetLayout, source: SourceLayout, at_hand: int | None) -> int:
    """The bound, by sets of single elements."""
    held_by_name = {held.name: held for held in source.tensors}
    dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
    needed: dict[tuple[str, int], set[int]] = defaultdict(set)
    for copy in layout.copies:
        held = held_by_name[copy.source]
        size = held.wire_dtype_to(dtypes[copy.target]).itemsize
        needed[copy.source, size].update(read_positions(copy, held.shape).reshape(-1).tolist())
    return sum(
        size * len(elements - own_positions(held_by_name[name], at_hand)) for (name, size), elements in needed.items()
    )


def own_positions(held: Held, rank: int | None) -> set[int]:
    """Flat indices of the elements that a trainer rank holds."""
    flat = np.arange(int(np.prod(held.shape, dtype=np.int64))).reshape(held.shape)
    blocks = [block for holding in held.holdings for holder, block in holding.holders if holder == rank]
    return set(itertools.chain.from_iterable(flat[block.global_slices].reshape(-1).tolist() for block in blocks))


def take(region: SourceRegion, local: Tensor) -> Tensor:
    """The elements of a region as they travel."""
    part = local[region.slices]
    kept = [dim for dim in region.dims if dim is not None]
    dropped = [dim for dim in range(part.ndim) if dim not in kept]
    assert all(part.shape[dim] == 1 for dim in dropped)
    part = part.permute(kept + dropped).reshape([part.shape[dim] for dim in kept])
    for dim, source_dim in enumerate(region.dims):
        if source_dim is None:
            part = part.unsqueeze(dim)
    assert tuple(part.shape) == region.shape
    return part


def packed(message: Message, local: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
    """What comes out of a message's bytes, at the other end."""
    buffer = torch.full((message.num_bytes,), 0xFF, dtype=torch.uint8)
    pack(message, local, buffer)
    parts = list(unpack(message, buffer.clone()))
    assert {id(piece) for piece, _ in parts} == {id(piece) for piece in message.pieces}
    assert len(parts) == len(message.pieces) and sum(part.nbytes for _, part in parts) == message.num_bytes
    return parts


def count(region: TargetRegion, counts: Tensor) -> None:
    """``counts`` has how often each element of the target was written."""
    written = torch.from_numpy(written_positions(region.shape, region.offset, region.strides))
    counts.view(-1).index_add_(0, written.reshape(-1), torch.ones(written.numel(), dtype=counts.dtype))


def run_in_one_process(
    plan: ReshardPlan, layouts: Sequence[TargetLayout], values: Locals
) -> tuple[list[dict[str, Tensor]], list[ProcessView]]:
    """Deliver everything, as bytes; every process has one message posted at a time. Each engine rank's tensors."""
    views = [plan.messages_of(process) for process in range(plan.num_processes)]
    targets = [{t.name: torch.full(t.shape, float("nan"), dtype=t.dtype) for t in layout.tensors} for layout in layouts]
    counts = [{t.name: torch.zeros(t.shape, dtype=torch.int32) for t in layout.tensors} for layout in layouts]

    def deliver(piece: Piece, part: Tensor, rank: int, target: int) -> None:
        expected = take(piece.source, values[rank][piece.source.name]).to(piece.wire_dtype)
        assert torch.equal(part.to(piece.wire_dtype), expected) and expected.nbytes == piece.num_bytes
        region, tensor = piece.target, targets[target][piece.target.name]
        memory = tensor.as_strided(region.shape, region.strides, region.offset)
        copy_rounded(memory, part.expand(region.shape), piece.wire_dtype, max_bytes=0)
        count(region, counts[target][region.name])

    for view in views:
        for name, shape, dtype in view.source_shards:
            shard = values[view.source_rank or 0][name]
            assert (tuple(shard.shape), shard.dtype) == (shape, dtype)
        for piece in view.local:
            assert view.source_rank is not None and view.target_rank is not None
            part = select(values[view.source_rank][piece.source.name], piece)
            deliver(piece, part, view.source_rank, view.target_rank)
    for message in post_one_at_a_time(views):
        for piece, part in packed(message, values[message.source_rank]):
            deliver(piece, part, message.source_rank, message.target_rank)
    for layout, target, written_to in zip(layouts, targets, counts, strict=True):
        for fill in layout.fills:
            written = torch.from_numpy(written_positions(fill.shape, fill.target_offset, fill.target_strides))
            target[fill.target].view(-1)[written] = fill.value
            written_to[fill.target].view(-1)[written] += 1
        for copy in layout.copies:
            written = torch.from_numpy(written_positions(copy.shape, copy.target_offset, copy.target_strides))
            assert (written_to[copy.target].view(-1)[written] == 1).all(), f"{copy.target}: not each element just once"
    return targets, views


def post_one_at_a_time(views: Sequence[ProcessView]) -> list[Message]:
    """The messages in an order in which they get through where each process waits for its first. Both ends agree."""
    queues = [sorted([*view.sends, *view.receives], key=lambda m: m.number, reverse=True) for view in views]
    for view in views:
        numbers = [message.number for message in (*view.sends, *view.receives)]
        assert len(set(numbers)) == len(numbers)
        assert list(view.sends) == sorted(view.sends, key=lambda m: m.number)
        assert list(view.receives) == sorted(view.receives, key=lambda m: m.number)
    done: list[Message] = []
    ready = list(range(len(queues)))
    while ready:
        process = ready.pop()
        if not queues[process]:
            continue
        message = queues[process][-1]
        ends = {views[0].source_process[message.source_rank], views[0].target_process[message.target_rank]}
        assert process in ends and len(ends) == 2
        if all(queues[end] and queues[end][-1] == message for end in ends):
            for end in ends:
                queues[end].pop()
            ready.extend(ends)
            done.append(message)
    assert not any(queues), "processes wait for each other"
    return done


def check(plan: ReshardPlan, source: SourceLayout, layouts: list[TargetLayout], at_hand: list[int | None]) -> None:
    """Values, counts of bytes and the bound are right; ``at_hand``: the trainer rank in each engine rank's process."""
    whole = random_values(source)
    targets, views = run_in_one_process(plan, layouts, shard_values(source, whole))
    for index, layout in enumerate(layouts):
        for name, expected in load_whole(layout, source, whole).items():
            assert torch.equal(targets[index][name].nan_to_num(-7.0), expected.nan_to_num(-7.0)), (index, name)
    sent, received = [0] * plan.num_ranks, [0] * plan.num_targets
    for view in views:
        assert view.fingerprint == plan.fingerprint
        for message in view.sends:
            sent[message.source_rank] += message.num_bytes
            assert message.num_bytes <= plan.peak_buffer_bytes
        received_there = sum(message.num_bytes for message in view.receives)
        if view.target_rank is not None:
            received[view.target_rank] = received_there
            assert sum(piece.num_bytes for piece in view.local) == plan.bytes_local(view.target_rank)
    assert sent == [plan.bytes_sent(rank) for rank in range(plan.num_ranks)]
    assert received == [plan.bytes_received(target) for target in range(plan.num_targets)]
    bounds = [missing_bytes(layout, source, rank) for layout, rank in zip(layouts, at_hand, strict=True)]
    assert bounds == [plan.lower_bound(target) for target in range(plan.num_targets)]
    traffic = plan.traffic()
    assert traffic.sum(axis=1).tolist() == sent and traffic.sum(axis=0).tolist() == received
