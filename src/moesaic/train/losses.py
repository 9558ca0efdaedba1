"""Losses as sums over tokens; the caller divides by a global count.

Shape suffixes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.data.batch import IGNORE_INDEX
from moesaic.parallel.tensor import VocabularyShard


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor, vocabulary: VocabularyShard | None = None) -> Tensor:
    """Sum of the negative log-likelihoods of the labels: 0-D fp32, differentiable.

    NaN where a label is of no column. Nothing of the logits' size is kept for backward but the logits themselves.

    Args:
        logits_BSV: [B, S, V], any floating dtype; computed on in fp32.
        labels_BS: [B, S] int64, the target **of** each position (already shifted); -100 counts nothing.
        vocabulary: which columns the logits have, where a group of ranks shares them; every rank of it must call, with
            the same labels, and gets the same loss, two all-reduces (of B * S numbers, and of twice as many) later. Its
            backward gives each rank the gradient of its own columns, and sends nothing.
    """
    loss: Tensor = _CrossEntropy.apply(logits_BSV.flatten(0, -2), labels_BS.flatten(), vocabulary)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Of logits [N, V], or of [N, V / T] whose columns lie on T ranks: never a gathered [N, V].

    F.cross_entropy keeps its log-probabilities, [N, V] in fp32; here they are made again from the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
        num_columns = logits_NV.size(-1)
        first, size = (0, num_columns) if vocabulary is None else (vocabulary.first, vocabulary.size)
        counts_N = labels_N != IGNORE_INDEX
        columns_N = labels_N - first
        is_mine_N = (columns_N >= 0) & (columns_N < num_columns)
        columns_N1 = columns_N.clamp(0, num_columns - 1)[:, None]
        log_sum_N = torch.logsumexp(logits_NV.float(), dim=-1)
        own_N = logits_NV.gather(-1, columns_N1).squeeze(-1).float().masked_fill(~is_mine_N, 0.0)
        if vocabulary is not None:
            log_sum_N, own_N = _over_ranks(log_sum_N, own_N, vocabulary.group)
        ctx.save_for_backward(logits_NV, log_sum_N, columns_N1, is_mine_N, counts_N)
        is_unknown_N = counts_N & ((labels_N < 0) | (labels_N >= size))
        return ((log_sum_N - own_N) * counts_N).masked_fill(is_unknown_N, float("nan")).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, columns_N1, is_mine_N, counts_N = ctx.saved_tensors
        grad_NV = torch.sub(logits_NV, log_sum_N[:, None]).exp_()  # fp32, as the sums are
        grad_NV.scatter_(-1, columns_N1, grad_NV.gather(-1, columns_N1) - is_mine_N[:, None].to(grad_NV.dtype))
        return grad_NV.mul_((grads[0] * counts_N)[:, None]).to(logits_NV.dtype), None, None


def _over_ranks(log_sum_N: Tensor, own_N: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """From each rank's logarithm of its sum of exponentials, and its label's logit or 0, those of all columns."""
    largest_N = log_sum_N.clone()
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
    sums_2N = torch.stack([(log_sum_N - largest_N).exp(), own_N])
    dist.all_reduce(sums_2N, group=group)
    return largest_N + sums_2N[0].log(), sums_2N[1]


def count_loss_tokens(labels_BS: Tensor) -> Tensor:
    """How many labels count: 0-D int64."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
