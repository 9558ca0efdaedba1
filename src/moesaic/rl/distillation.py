"""Learning from a teacher on what the student itself wrote.

Shape suffixes: B trajectories, T tokens after the prompt, K tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.rl.losses import TokenLosses


@torch.no_grad()
def reverse_kl_advantages(
    student_logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    clamp: float | None = None,
    coef: float = 1.0,
) -> Tensor:
    """[B, T] fp32 advantages, for any policy loss: ``coef`` times (teacher less student) at each token.

    The student wrote the tokens, so this is minus an estimate of KL(student || teacher), each token blamed for its own
    part (K. Lu, "On-Policy Distillation", Thinking Machines, 2025). Nothing is discounted or whitened. They are the
    ``token_rewards_BT`` of the estimator ``on_policy_distillation``.

    Args:
        student_logprobs_BT: [B, T], the old ones: fixed for the step.
        teacher_logprobs_BT: [B, T], of the same tokens.
        mask_BT: [B, T] bool; elsewhere the result is 0.
        clamp: the difference is kept within it, before ``coef``.
        coef: a factor.
    """
    mask_BT = mask_BT.bool()
    student_BT, teacher_BT = (
        torch.where(mask_BT, each, 0.0).float() for each in (student_logprobs_BT, teacher_logprobs_BT)
    )
    differences_BT = teacher_BT - student_BT
    if clamp is not None:
        differences_BT = differences_BT.clamp(-clamp, clamp)
    return coef * differences_BT


def forward_kl_topk(
    student_logprobs_K: Tensor, teacher_logprobs_K: Tensor, mask: Tensor, *, clamp: float | None = None
) -> TokenLosses:
    """KL(teacher || student) over the K likeliest tokens of the teacher, of each position: a loss.

    Sum over K of p_teacher (log p_teacher - log p_student). Neither is normalized to those K, so that the student
    learns the mass beyond them as well; the sum may then fall below 0, where it is cut, with no gradient.

    Metrics: ``distillation/student_mass``, ``distillation/teacher_mass``: probability of those K.

    Args:
        student_logprobs_K: [..., K] at the teacher's tokens, over the whole vocabulary, differentiable.
        teacher_logprobs_K: [..., K].
        mask: [...] bool; elsewhere loss and gradient are 0.
        clamp: the most that one position counts.
    """
    mask = mask.bool()
    student_K, teacher_K = (
        torch.where(mask[..., None], each, 0.0).float() for each in (student_logprobs_K, teacher_logprobs_K.detach())
    )
    probabilities_K = teacher_K.exp()
    # A token that the teacher rules out adds nothing, though its logarithm is infinite.
    parts_K = torch.where(probabilities_K > 0, probabilities_K * (teacher_K - student_K), 0.0)
    losses = parts_K.sum(dim=-1).clamp(min=0.0, max=clamp)
    metrics = {
        "distillation/student_mass": student_K.detach().exp().sum(dim=-1),
        "distillation/teacher_mass": probabilities_K.sum(dim=-1),
    }
    return TokenLosses(
        losses=torch.where(mask, losses, 0.0),
        metrics={name: torch.where(mask, each, 0.0) for name, each in metrics.items()},
    )
