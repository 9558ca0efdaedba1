"""Between a rank's run of a sequence and the whole of it, differentiable: what tensor parallelism sends.

    gather_runs   run -> whole      backward: every rank's gradient of the whole is a part of the sum, summed and cut
    share_runs    run -> whole      backward: every rank has the whole's one gradient, and keeps its own run's
    sum_runs      parts -> run      backward: the run's gradient goes to every rank's part

Example, 2 ranks, runs [a] and [b]: ``gather_runs`` gives [a, b] on both. Parts [1, 2] and [10, 20]: ``sum_runs`` gives
[11] on rank 0 and [22] on rank 1. All are collective over their group, in forward and, but for ``share_runs``, in
backward. After ``gather_runs`` the ranks compute different things from the whole, after ``share_runs`` the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.ops.point_to_point import reduce_scatter, start_gather
from moesaic.ops.sequence import run_of

GATHER_TAG, REDUCE_TAG = 3, 4


def _gather(run: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    front = run.movedim(dim, 0).contiguous()
    whole = front.new_empty(group.size(), *front.shape)
    if front.device.type == "cpu":
        whole[group.rank()].copy_(front)
        start_gather(whole.view(group.size(), -1), group, GATHER_TAG).wait()
    else:
        dist.all_gather_into_tensor(whole, front, group=group)
    return whole.flatten(0, 1).movedim(0, dim).contiguous()  # models take views of it


def _sum(parts: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    front = parts.movedim(dim, 0).contiguous()
    run = front.new_empty(front.size(0) // group.size(), *front.shape[1:])
    if front.device.type == "cpu":
        reduce_scatter(run.view(-1), front.view(group.size(), -1), group, REDUCE_TAG)
    else:
        dist.reduce_scatter_tensor(run, front, group=group)
    return run.movedim(0, dim).contiguous()


class _GatherRuns(torch.autograd.Function):
    """``is_shared``: the whole's gradient is the same on every rank, not a part of a sum."""

    @staticmethod
    def forward(ctx: Any, run: Tensor, group: dist.ProcessGroup, dim: int, is_shared: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.is_shared = group, dim, is_shared
        return _gather(run, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_shared:
            return run_of(grads[0], ctx.group.rank(), ctx.group.size(), ctx.dim), None, None, None
        return _sum(grads[0], ctx.group, ctx.dim), None, None, None


class _SumRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _sum(parts, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.group, ctx.dim), None, None


def gather_runs(run: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The runs of all ranks, one after another along ``dim``; every rank's must be equally long. Same dtype."""
    whole: Tensor = _GatherRuns.apply(run, group, dim, False)
    return whole


def share_runs(run: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """As ``gather_runs``, where every rank goes on to compute the same: its gradient of the whole is all of it."""
    whole: Tensor = _GatherRuns.apply(run, group, dim, True)
    return whole


def sum_runs(parts: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's run along ``dim`` of the sum of all ranks' ``parts``, each of the whole. Same dtype.

    ``dim`` must be a multiple of the group's size long.
    """
    run: Tensor = _SumRuns.apply(parts, group, dim)
    return run
