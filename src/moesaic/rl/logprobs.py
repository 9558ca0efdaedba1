"""What policy losses read off logits: log-probabilities and entropies, in fp32, of whole or of shared vocabularies.

Of a vocabulary that ranks share every rank of the group must call, with the same rows, and gets the same numbers; in
backward each gets the gradient of its own columns, and nothing is sent. Nothing of the logits' size is kept for
backward but the logits, and the numbers in between are never all there at once: a softmax in fp32 of a vocabulary of
150,000 would be most of a step's memory.

Shape suffixes: N tokens, V vocabulary (or a rank's columns of it), K ids of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.parallel.tensor import VocabularyShard
from moesaic.train.losses import chunks, log_probabilities, log_sum_over_ranks, log_sums, scaled, token_losses


def token_logprobs(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard | None = None, temperature: float = 1.0
) -> Tensor:
    """Log-probability of each label: fp32, differentiable; 0 where the label is -100.

    Args:
        logits: [..., V], any floating dtype, divided by ``temperature`` first.
        labels: [...] int64, the target **of** each position.
        vocabulary: see the module; two all-reduces.
    """
    return -token_losses(logits, labels, vocabulary, temperature)


def token_entropy(logits: Tensor, vocabulary: VocabularyShard | None = None, temperature: float = 1.0) -> Tensor:
    """Entropy of each token's distribution, in nats: [...] fp32 of logits [..., V], differentiable.

    Of a shared vocabulary three all-reduces.
    """
    entropies_N: Tensor = _Entropy.apply(logits.flatten(0, -2), vocabulary, temperature)
    return entropies_N.view(logits.shape[:-1])


def logprobs_at(
    logits: Tensor, ids: Tensor, vocabulary: VocabularyShard | None = None, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of K tokens at each position: fp32, differentiable.

    Args:
        logits: [..., V].
        ids: [..., K] int64, of the whole vocabulary.
        vocabulary: see the module; two all-reduces.
    """
    logprobs_NK: Tensor = _LogprobsAt.apply(logits.flatten(0, -2), ids.flatten(0, -2), vocabulary, temperature)
    return logprobs_NK.view(ids.shape)


@torch.no_grad()
def topk_logprobs(
    logits: Tensor, k: int, vocabulary: VocabularyShard | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The K likeliest tokens of each position: log-probabilities [..., K] fp32, falling, and ids [..., K] int64.

    Not differentiable. Of a shared vocabulary two all-reduces and two all-gathers of [N, K].

    Raises:
        ValueError: the vocabulary has fewer tokens.
    """
    logits_NV = logits.flatten(0, -2)
    size = logits_NV.size(-1) if vocabulary is None else vocabulary.size
    if k > size:
        raise ValueError(f"topk={k}: the vocabulary has {size} tokens; choose fewer")
    log_sum_N = log_sums(logits_NV, temperature)
    best_NK, ids_NK = logits_NV.topk(min(k, logits_NV.size(-1)), dim=-1)
    if vocabulary is not None:
        log_sum_N, _ = log_sum_over_ranks(log_sum_N, torch.zeros_like(log_sum_N), vocabulary.group)
        # The last rank may have fewer columns than K.
        missing = k - best_NK.size(1)
        best_NK = torch.nn.functional.pad(best_NK, (0, missing), value=float("-inf"))
        ids_NK = torch.nn.functional.pad(ids_NK + vocabulary.first, (0, missing))
        all_best, all_ids = (_gather_columns(each, vocabulary.group) for each in (best_NK, ids_NK))
        best_NK, order_NK = all_best.topk(k, dim=-1)
        ids_NK = all_ids.gather(-1, order_NK)
    shape = (*logits.shape[:-1], k)
    return (scaled(best_NK, temperature) - log_sum_N[:, None]).view(shape), ids_NK.view(shape)


class _Entropy(torch.autograd.Function):
    """H = -sum p log p, whose gradient to a logit is -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, vocabulary: VocabularyShard | None, temperature: float) -> Tensor:
        log_sum_N = logits_NV.new_empty(logits_NV.size(0), dtype=torch.float32)
        entropy_N = torch.empty_like(log_sum_N)
        for rows in chunks(logits_NV):
            log_sum_N[rows] = torch.logsumexp(scaled(logits_NV[rows], temperature), dim=-1)
            logs = log_probabilities(logits_NV[rows], log_sum_N[rows], temperature)
            entropy_N[rows] = -_times_logs(logs.exp(), logs).sum(dim=-1)
        if vocabulary is not None:
            # A rank's columns have a share w of the probability, and within them the entropy h: H = sum w (h - log w).
            own_N = log_sum_N
            log_sum_N, _ = log_sum_over_ranks(own_N, torch.zeros_like(own_N), vocabulary.group)
            log_shares_N = own_N - log_sum_N
            shares_N = log_shares_N.exp()
            entropy_N = torch.where(shares_N > 0, shares_N * (entropy_N - log_shares_N), 0.0)
            dist.all_reduce(entropy_N, group=vocabulary.group)
        ctx.save_for_backward(logits_NV, log_sum_N, entropy_N)
        ctx.temperature = temperature
        return entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, entropy_N = ctx.saved_tensors
        grad_N = -scaled(grads[0], ctx.temperature)
        grad_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            logs = log_probabilities(logits_NV[rows], log_sum_N[rows], ctx.temperature)
            probabilities = logs.exp()
            slopes = _times_logs(probabilities, logs).add_(probabilities.mul_(entropy_N[rows, None]))
            grad_NV[rows] = slopes.mul_(grad_N[rows, None])
        return grad_NV, None, None


class _LogprobsAt(torch.autograd.Function):
    """As the cross-entropy of one label, of K of them."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_NK: Tensor, vocabulary: VocabularyShard | None, temperature: float
    ) -> Tensor:
        first = 0 if vocabulary is None else vocabulary.first
        columns_NK = ids_NK - first
        is_mine_NK = (columns_NK >= 0) & (columns_NK < logits_NV.size(-1))
        columns_NK = columns_NK.clamp(0, logits_NV.size(-1) - 1)
        log_sum_N = log_sums(logits_NV, temperature)
        own_NK = scaled(logits_NV.gather(-1, columns_NK), temperature).masked_fill(~is_mine_NK, 0.0)
        if vocabulary is not None:
            log_sum_N, own_KN = log_sum_over_ranks(log_sum_N, own_NK.T.contiguous(), vocabulary.group)
            own_NK = own_KN.T
        ctx.save_for_backward(logits_NV, log_sum_N, columns_NK, is_mine_NK)
        ctx.temperature = temperature
        return own_NK - log_sum_N[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, columns_NK, is_mine_NK = ctx.saved_tensors
        grad_NK = scaled(grads[0], ctx.temperature)
        grad_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            part = log_probabilities(logits_NV[rows], log_sum_N[rows], ctx.temperature).exp_()
            part.mul_(-grad_NK[rows].sum(dim=-1, keepdim=True))
            part.scatter_add_(-1, columns_NK[rows], grad_NK[rows] * is_mine_NK[rows])
            grad_NV[rows] = part
        return grad_NV, None, None, None


def _times_logs(probabilities: Tensor, logs: Tensor) -> Tensor:
    """p log p, 0 where p is 0; in place of ``logs``."""
    return logs.clamp_(min=-1e30).mul_(probabilities)


def _gather_columns(own_NK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ranks * K]: of all ranks, side by side."""
    parts = [torch.empty_like(own_NK) for _ in range(group.size())]
    dist.all_gather(parts, own_NK.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
