"""Heads for positions: the all-to-all between a rank that holds its positions of all heads, and one that holds all
positions of its heads. Differentiable: backward is the same exchange of the gradients.

Shape suffixes: P ranks of the group, B rows, H heads, S positions of the whole sequence, D numbers of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """Part p of dim 0 goes to rank p; part r of the result came from rank r. Applied twice, it is the identity.

    Example, 2 ranks, rank 0 holds ab, rank 1 cd: forward brings rank 0 ac and rank 1 bd. Gradients of those arrive as
    AC and BD, and the same exchange takes each back to where its number came from: rank 0 AB, rank 1 CD.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Not the functional op: activation checkpointing keeps what that returns, which is meant for experts' tokens.
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def heads_to_positions(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each of ``parts`` [B, H, S/P, D], own positions of all heads -> [B, H/P, S, D], all positions of own heads.

    One exchange for all of them; H (which P must divide) and D may differ from part to part. Rank p gets the p-th run
    of heads. Collective over ``group``: every rank must call it, in forward and in backward.

    Example, 2 ranks, 2 heads, 4 positions (head, position): rank 0 holds 00 01 10 11, rank 1 holds 02 03 12 13; then
    rank 0 has 00 01 02 03, and rank 1 has 10 11 12 13.
    """
    size = group.size()
    shapes = [(part.size(1) // size, part.size(3)) for part in parts]
    assert all(part.size(1) % size == 0 for part in parts), f"heads {[p.size(1) for p in parts]} over {size} ranks"
    # [B, H, s, D] -> [P, B, s, H/P * D]
    packed = [part.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for part in parts]
    received_PBsN: Tensor = _Exchange.apply(torch.cat(packed, dim=-1), group)
    whole_BSN = received_PBsN.transpose(0, 1).flatten(1, 2)
    split = whole_BSN.split([heads * width for heads, width in shapes], dim=-1)
    return [part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(split, shapes, strict=True)]


def positions_to_heads(x_BSHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [B, S, H/P, D], all positions of own heads -> [B, S/P, H, D], own positions of all heads.

    Collective over ``group``: every rank must call it, in forward and in backward.
    """
    sent = x_BSHD.unflatten(1, (group.size(), -1)).transpose(0, 1)
    received: Tensor = _Exchange.apply(sent, group)  # [P, B, S/P, H/P, D]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def repeat_heads(x_BHSD: Tensor, num_ranks: int) -> Tensor:
    """Each head as often as it takes for ``num_ranks`` to divide their number; copies of a head are neighbours.

    Example: 2 heads a b for 4 ranks become a a b b; 3 heads for 2 ranks a a b b c c; 4 heads for 2 ranks stay.
    """
    times = num_ranks // math.gcd(x_BHSD.size(1), num_ranks)
    return x_BHSD if times == 1 else x_BHSD.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
