"""All-to-all over one process group, differentiable: backward is the same exchange with the split sizes swapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _exchange(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    # The functional op, not dist.all_to_all_single: selective checkpointing sees its output and can keep it.
    out = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(out)
    return waited


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def all_to_all_rows(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows: ``sent[r]`` rows go to rank r of the group, ``received[r]`` come from it, in rank order.

    Collective over ``group``: every rank of it must call, also one that has no rows, in forward and in backward.

    Example, 2 ranks, rank 0 holds a b c with sent [1, 2], rank 1 holds d with sent [1, 0]: rank 0 gets a d
    (received [1, 1]), rank 1 gets b c (received [2, 0]).

    Args:
        x: [sum(sent), ...].

    Returns:
        [sum(received), ...], same dtype.
    """
    out: Tensor = _AllToAll.apply(x, received, sent, group)
    return out


def all_to_all_counts(counts_PC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row p of ``counts`` goes to rank p; row r of the result came from rank r. Collective over ``group``.

    [P, C] int64 in and out.
    """
    size = counts_PC.size(0)
    return _exchange(counts_PC, [1] * size, [1] * size, group)
