"""How the losses of tokens become the one loss of an optimizer update: a weight for each token, made beforehand.

The weights need only the mask of the whole update, so every rank makes them alike, before any forward; each then sums
``weight * loss`` over the tokens that it has. So neither the loss nor its gradient depends on how the update is cut
into micro-batches, packed, or laid out over ranks.

Shape suffixes: B trajectories of one optimizer update (all of them, of every rank), T tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.config.rl_sections import LossAggMode


def aggregation_weights(mask_BT: Tensor, mode: LossAggMode, *, scale_factor: float | None = None) -> Tensor:
    """[B, T] fp32: the update's loss is the sum of token loss times weight; 0 where the mask is.

    With n_i the trained tokens of trajectory i, N the sum of them, and S how many trajectories have any:

    ====================== =====================
    mode                    weight of a token
    ====================== =====================
    token-mean              1 / N
    token-sum               1
    seq-mean-token-sum      1 / S
    seq-mean-token-sum-norm 1 / (S scale_factor)
    seq-mean-token-mean     1 / (S n_i)
    ====================== =====================

    A trajectory without a trained token counts in none of them: the mask is the one after rejection
    (``moesaic.rl.corrections``), so a rejected token is neither in a sum nor in what the sum is divided by. DAPO
    (2503.14476) has token-mean, GRPO (2402.03300) and GSPO (2507.18071) seq-mean-token-mean, Dr.GRPO (2503.20783)
    seq-mean-token-sum-norm.

    Args:
        mask_BT: [B, T] bool, the tokens that are trained on.
        mode: which of the table.
        scale_factor: the constant of seq-mean-token-sum-norm; the other modes don't read it.

    Raises:
        ValueError: seq-mean-token-sum-norm without its constant: the longest completion of a step would be another
            number each step.
    """
    mask_BT = mask_BT.bool()
    counts_B1 = mask_BT.sum(dim=-1, keepdim=True, dtype=torch.float64)
    num_tokens = counts_B1.sum().clamp(min=1)
    num_sequences = (counts_B1 > 0).sum().clamp(min=1).double()
    if mode == "token-mean":
        weights = 1 / num_tokens
    elif mode == "token-sum":
        weights = torch.ones_like(num_tokens)
    elif mode == "seq-mean-token-sum":
        weights = 1 / num_sequences
    elif mode == "seq-mean-token-sum-norm":
        if scale_factor is None:
            raise ValueError(
                f"loss_agg_mode: {mode} divides by a constant, and loss_scale_factor is not set. Set it to the longest "
                "completion (rollout.sampling.max_tokens)"
            )
        weights = 1 / (num_sequences * scale_factor)
    elif mode == "seq-mean-token-mean":
        weights = 1 / (num_sequences * counts_B1.clamp(min=1))
    else:
        raise ValueError(f"loss_agg_mode: {mode} is not one of token-*, seq-mean-token-*")
    return torch.where(mask_BT, weights, 0.0).float()


def masked_sequence_mean(mask_BT: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives every token the mean of [B, T] over the trained tokens of its trajectory: [B, T], detached.

    0 in a trajectory that has none. What lies where the mask is 0, NaN too, is not read.
    """
    mask_BT = mask_BT.bool()
    counts_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)

    def mean(values_BT: Tensor) -> Tensor:
        sums_B1 = torch.where(mask_BT, values_BT.detach(), 0.0).sum(dim=-1, keepdim=True)
        return (sums_B1 / counts_B1).expand_as(values_BT)

    return mean
