"""Losses as sums over tokens; the caller divides by a global count.

Shape suffixes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.data.batch import IGNORE_INDEX
from moesaic.parallel.tensor import VocabularyShard

CHUNK_NUMBERS = 2**24
"""Numbers of a softmax that are there at once: 64 MiB in fp32."""


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor, vocabulary: VocabularyShard | None = None) -> Tensor:
    """Sum of the negative log-likelihoods of the labels: 0-D fp32, differentiable. See ``token_losses``."""
    return token_losses(logits_BSV, labels_BS, vocabulary).sum()


def token_losses(
    logits_BSV: Tensor, labels_BS: Tensor, vocabulary: VocabularyShard | None = None, temperature: float = 1.0
) -> Tensor:
    """Negative log-likelihood of each label, [B, S] fp32, differentiable; 0 where there is none.

    NaN where a label is of no column. Nothing of the logits' size is kept for backward but the logits themselves, and
    a softmax in fp32 is never there whole: at a vocabulary of 150,000 it would be most of a step's memory.

    Args:
        logits_BSV: [B, S, V], any floating dtype; computed on in fp32.
        labels_BS: [B, S] int64, the target **of** each position (already shifted); -100 counts nothing.
        vocabulary: which columns the logits have, where a group of ranks shares them; every rank of it must call, with
            the same labels, and gets the same losses, two all-reduces (of B * S numbers, and of twice as many) later.
            Its backward gives each rank the gradient of its own columns, and sends nothing.
        temperature: the logits are divided by it.
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_BSV.flatten(0, -2), labels_BS.flatten(), vocabulary, temperature)
    return losses_N.view(labels_BS.shape)


class _CrossEntropy(torch.autograd.Function):
    """Of logits [N, V], or of [N, V / T] whose columns lie on T ranks: never a gathered [N, V].

    F.cross_entropy keeps its log-probabilities, [N, V] in fp32; here they are made again from the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, vocabulary: VocabularyShard | None, temperature: float
    ) -> Tensor:
        num_columns = logits_NV.size(-1)
        first, size = (0, num_columns) if vocabulary is None else (vocabulary.first, vocabulary.size)
        counts_N = labels_N != IGNORE_INDEX
        columns_N = labels_N - first
        is_mine_N = (columns_N >= 0) & (columns_N < num_columns)
        columns_N1 = columns_N.clamp(0, num_columns - 1)[:, None]
        log_sum_N = log_sums(logits_NV, temperature)
        own_N = scaled(logits_NV.gather(-1, columns_N1).squeeze(-1), temperature).masked_fill(~is_mine_N, 0.0)
        if vocabulary is not None:
            log_sum_N, own_N = log_sum_over_ranks(log_sum_N, own_N, vocabulary.group)
        ctx.save_for_backward(logits_NV, log_sum_N, columns_N1, is_mine_N, counts_N)
        ctx.temperature = temperature
        is_unknown_N = counts_N & ((labels_N < 0) | (labels_N >= size))
        return ((log_sum_N - own_N) * counts_N).masked_fill(is_unknown_N, float("nan"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, columns_N1, is_mine_N, counts_N = ctx.saved_tensors
        grad_N = scaled(grads[0] * counts_N, ctx.temperature)
        grad_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            part = log_probabilities(logits_NV[rows], log_sum_N[rows], ctx.temperature).exp_()
            columns = columns_N1[rows]
            part.scatter_(-1, columns, part.gather(-1, columns) - is_mine_N[rows, None].to(part.dtype))
            grad_NV[rows] = part.mul_(grad_N[rows, None])
        return grad_NV, None, None, None


def chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Rows, so many at a time that their softmax has ``CHUNK_NUMBERS``."""
    num_rows = max(1, CHUNK_NUMBERS // logits_NV.size(-1))
    for first in range(0, logits_NV.size(0), num_rows):
        yield slice(first, first + num_rows)


def log_sums(logits_NV: Tensor, temperature: float) -> Tensor:
    """[N] fp32: the logarithm of the sum of exponentials of the columns there are."""
    parts = [torch.logsumexp(scaled(logits_NV[rows], temperature), dim=-1) for rows in chunks(logits_NV)]
    return torch.cat(parts) if parts else logits_NV.new_zeros(0, dtype=torch.float32)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits / temperature; themselves where nothing changes."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def log_probabilities(logits_NV: Tensor, log_sum_N: Tensor, temperature: float) -> Tensor:
    """A new [N, V] fp32: of the columns there are, given the logarithm of the sum of all exponentials."""
    if temperature == 1.0:
        return torch.sub(logits_NV, log_sum_N[:, None])
    return scaled(logits_NV, temperature).sub_(log_sum_N[:, None])


def log_sum_over_ranks(log_sum_N: Tensor, others: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """From each rank's logarithm of its sum of exponentials that of all columns; ``others`` [N] or [K, N] are summed.

    Every rank of ``group`` must call: two all-reduces.
    """
    largest_N = log_sum_N.clone()
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
    sums = torch.cat([(log_sum_N - largest_N).exp()[None], others.view(-1, log_sum_N.numel())])
    dist.all_reduce(sums, group=group)
    return largest_N + sums[0].log(), sums[1:].view_as(others)


def count_loss_tokens(labels_BS: Tensor) -> Tensor:
    """How many labels count: 0-D int64."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
