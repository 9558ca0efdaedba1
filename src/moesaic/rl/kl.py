"""Estimates of how far the policy is from its reference, on tokens that the policy wrote; in the loss or in the reward.

Shape suffixes: B trajectories, T tokens after the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.config.rl_sections import KlConfig, KlEstimator

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_RELATIVE_ERROR = 0.2


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, mask: Tensor | None = None) -> Tensor:
    """KL(policy || reference), estimated at each token: fp32, of the inputs' shape, differentiable in ``logprobs``.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1, where the exponent is kept within 20
    and the value within 10 (J. Schulman, "Approximating KL divergence", 2020). The mean of k1 and k3 is the
    divergence, but that of their gradients is not its gradient; k2's is. So ``k3+`` has k3's value and k2's gradient,
    d times that of logprobs.

    Args:
        logprobs: of the policy, any shape.
        ref_logprobs: of the reference, of the same shape; no gradient goes to it.
        estimator: which one.
        mask: of the same shape. Where it is 0 nothing is read: the result is 0, and so is the gradient.
    """
    if mask is not None:
        logprobs, ref_logprobs = (torch.where(mask.bool(), each, 0.0) for each in (logprobs, ref_logprobs))
    differences = logprobs.float() - ref_logprobs.detach().float()
    if estimator == "k1":
        return differences
    halved_squares = 0.5 * differences.square()
    if estimator == "k2":
        return halved_squares
    negated = (-differences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (negated.expm1() - negated).clamp(0.0, MAX_K3)
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        return k3.detach() + (halved_squares - halved_squares.detach())
    raise ValueError(f"kl_config.estimator: {estimator} is not one of k1, k2, k3, k3+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlInReward:
    """Rewards that the divergence was taken from.

    Attributes:
        token_rewards_BT: [B, T] fp32.
        mean_kl: over each trajectory's tokens, then over trajectories; ``actor/reward_kl_penalty``, and what
            ``KlController.update`` wants.
    """

    token_rewards_BT: Tensor
    mean_kl: float


@torch.no_grad()
def apply_kl_in_reward(
    token_rewards_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    estimator: KlEstimator,
    coef: float,
) -> KlInReward:
    """Each trained token's reward, less ``coef`` times the divergence there (1909.08593); for k1 the sum over a
    trajectory is then its reward less ``coef`` times its log-probability over the reference's.

    Args:
        token_rewards_BT: [B, T].
        old_logprobs_BT: [B, T] of the policy that wrote the tokens, as the trainer computes them.
        ref_logprobs_BT: [B, T] of the reference.
        mask_BT: [B, T] bool. Elsewhere the reward stays; trajectories without a token don't count in the mean.
        estimator: which one.
        coef: ``KlController.coef``.
    """
    mask_BT = mask_BT.bool()
    kl_BT = kl_penalty(old_logprobs_BT, ref_logprobs_BT, estimator, mask_BT)
    counts_B = mask_BT.sum(dim=-1)
    means_B = kl_BT.sum(dim=-1, dtype=torch.float64) / counts_B.clamp(min=1)
    mean = means_B.sum() / (counts_B > 0).sum().clamp(min=1)
    return KlInReward(token_rewards_BT=token_rewards_BT - coef * kl_BT, mean_kl=float(mean))


class KlController:
    """The coefficient of the divergence in the reward: fixed, or adapted toward ``target`` (1909.08593).

    Each update multiplies it by 1 + e n / horizon: e is how far the measured divergence is off, relative to the target,
    kept within 0.2; n the trajectories that were measured, at most ``horizon``.
    """

    def __init__(self, config: KlConfig) -> None:
        self.coef = config.coef
        self._target = config.target
        self._horizon = config.horizon

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """After a step's rewards were made with ``coef``: their divergence, and of how many trajectories it is. One
        that isn't finite says nothing, and would stay in the coefficient for ever."""
        if self._target is None or not math.isfinite(mean_kl):
            return
        error = min(max(mean_kl / self._target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * min(num_sequences / self._horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a ``state_dict``; a fixed coefficient stays the recipe's."""
        if self._target is not None:
            self.coef = state["coef"]
