"""Losses as sums over tokens; the caller divides by a global count.

Shape suffixes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.batch import IGNORE_INDEX
from moesaic.parallel.tensor import VocabularyShard


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor, vocabulary: VocabularyShard | None = None) -> Tensor:
    """Sum of the negative log-likelihoods of the labels: 0-D fp32, differentiable.

    Args:
        logits_BSV: [B, S, V], any floating dtype; computed on in fp32.
        labels_BS: [B, S] int64, the target **of** each position (already shifted); -100 counts nothing.
        vocabulary: which columns the logits have, where a group of ranks shares them; every rank of it must call, with
            the same labels, and gets the same loss, two all-reduces of B * S numbers later. Its backward gives each
            rank the gradient of its own columns, and sends nothing. NaN where a label is of no rank's columns.
    """
    if vocabulary is not None:
        loss: Tensor = _LossOfColumns.apply(logits_BSV.float().flatten(0, -2), labels_BS.flatten(), vocabulary)
        return loss
    return F.cross_entropy(
        logits_BSV.float().flatten(0, -2), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


class _LossOfColumns(torch.autograd.Function):
    """Cross-entropy of logits [N, V / T] whose columns lie on T ranks; never a gathered [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, vocabulary: VocabularyShard) -> Tensor:
        first, group = vocabulary.first, vocabulary.group
        largest_N = logits_NV.amax(dim=-1)
        dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
        columns_N = labels_N - first
        is_mine_N = (columns_N >= 0) & (columns_N < logits_NV.size(-1))
        columns_N = columns_N.clamp(0, logits_NV.size(-1) - 1)
        own_N = logits_NV.gather(-1, columns_N[:, None]).squeeze(-1).masked_fill(~is_mine_N, 0.0)
        sums_2N = torch.stack([(logits_NV - largest_N[:, None]).exp().sum(dim=-1), own_N])
        dist.all_reduce(sums_2N, group=group)
        log_sum_N = largest_N + sums_2N[0].log()
        counts_N = labels_N != IGNORE_INDEX
        ctx.save_for_backward(logits_NV, log_sum_N, columns_N, is_mine_N, counts_N)
        is_unknown_N = counts_N & ((labels_N < 0) | (labels_N >= vocabulary.size))
        return ((log_sum_N - sums_2N[1]) * counts_N).masked_fill(is_unknown_N, float("nan")).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, columns_N, is_mine_N, counts_N = ctx.saved_tensors
        grad_NV = (logits_NV - log_sum_N[:, None]).exp()
        grad_NV.scatter_add_(-1, columns_N[:, None], -is_mine_N.to(grad_NV.dtype)[:, None])
        return grad_NV * (grads[0] * counts_N)[:, None], None, None


def count_loss_tokens(labels_BS: Tensor) -> Tensor:
    """How many labels count: 0-D int64."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
