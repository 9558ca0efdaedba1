"""How much better than expected each token was: rewards become advantages, on the host, from a whole step.

Where implementations of one name differ, it is decided here once:

- A group of one trajectory has advantage 0 under every estimator that compares within groups, and is counted.
- A group whose rewards are equal but for rounding (``moesaic.rl.groups``) has no reward above its baseline.
- GRPO divides by the standard deviation of a sample (over size - 1) plus 1e-6.
- Whitening divides by the deviation of a sample (Bessel's correction), with 1e-8 added to the variance.
- Tokens that no model wrote, between turns, are passed over: values and sums go through them undiscounted.
- Where the mask is 0 advantages and returns are 0, whatever lies there in the values.

A trajectory's reward is the sum of its row of token rewards, wherever in it they are: a reward still counts within its
group though a mask leaves its token out. GAE, REINFORCE++ and ReMax go token by token, and read rewards of trained
tokens only: outcomes belong on the last token that the model wrote.

Shape suffixes: B trajectories of the step, T tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.config.rl_sections import AdvEstimator
from moesaic.rl.groups import Groups

GRPO_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What an estimator makes of a step.

    Attributes:
        advantages_BT: [B, T] fp32, 0 where the mask is.
        returns_BT: [B, T] fp32, what a critic is to learn; the advantages where the estimator has no returns.
        num_singletons: groups of one trajectory; 0 where the estimator has no groups.
    """

    advantages_BT: Tensor
    returns_BT: Tensor
    num_singletons: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What estimators read; the arguments of ``compute_advantages``, in fp32."""

    token_rewards_BT: Tensor
    mask_BT: Tensor
    groups: Groups
    values_BT: Tensor | None
    baselines_B: Tensor | None
    gamma: float
    lam: float

    @property
    def rewards_B(self) -> Tensor:
        """fp64: of whole trajectories."""
        return self.token_rewards_BT.sum(dim=-1, dtype=torch.float64)

    @property
    def trained_rewards_BT(self) -> Tensor:
        """Those of trained tokens, 0 elsewhere."""
        return torch.where(self.mask_BT, self.token_rewards_BT, 0.0)

    def on_tokens(self, advantages_B: Tensor) -> Tensor:
        """[B, T] fp32: one number per trajectory, at each of its trained tokens."""
        return torch.where(self.mask_BT, advantages_B.float()[:, None], 0.0)


AdvantagesAndReturns = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way to make advantages, and what it needs.

    Attributes:
        function: the formula.
        needs_values: a critic's, [B, T].
        needs_baselines: the reward of each prompt's greedy completion, [B].
        needs_groups: several completions per prompt.
    """

    function: Callable[[AdvantageInputs], AdvantagesAndReturns]
    needs_values: bool = False
    needs_baselines: bool = False
    needs_groups: bool = False


def compute_advantages(
    estimator: AdvEstimator,
    *,
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    values_BT: Tensor | None = None,
    baselines_B: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """Advantages and returns of a whole step, by the estimator's name; no gradient goes through them.

    Args:
        estimator: of ``ESTIMATORS``.
        token_rewards_BT: [B, T], outcomes on the model's last token, KL already taken off; finite everywhere. Of
            ``on_policy_distillation``: ``moesaic.rl.distillation.reverse_kl_advantages``.
        mask_BT: [B, T] bool, the model's tokens.
        groups_B: [B], numbers that tell prompts apart.
        values_BT: [B, T] of the critic, each before its token. Read by gae alone.
        baselines_B: [B], reward of the prompt's greedy completion. Read by remax alone.
        gamma: discount per token, of gae and reinforce_plus_plus.
        lam: gae's decay.

    Raises:
        ValueError: an input that the estimator needs is not given.
    """
    entry = ESTIMATORS[estimator]
    needed = {"values_BT": (entry.needs_values, values_BT), "baselines_B": (entry.needs_baselines, baselines_B)}
    missing = [name for name, (needs, given) in needed.items() if needs and given is None]
    if missing:
        raise ValueError(f"adv_estimator: {estimator} needs {', '.join(missing)}, which it was not given")
    inputs = AdvantageInputs(
        token_rewards_BT=token_rewards_BT.detach().float(),
        mask_BT=mask_BT.bool(),
        groups=Groups.of(groups_B),
        values_BT=None if values_BT is None else values_BT.detach().float(),
        baselines_B=baselines_B,
        gamma=gamma,
        lam=lam,
    )
    advantages_BT, returns_BT = entry.function(inputs)
    return Advantages(
        advantages_BT=torch.where(inputs.mask_BT, advantages_BT, 0.0).float(),
        returns_BT=torch.where(inputs.mask_BT, returns_BT, 0.0).float(),
        num_singletons=inputs.groups.num_singletons if entry.needs_groups else 0,
    )


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: less the mean over the mask, over the deviation; 0 where the mask is, and where it has one token only."""
    mask_BT = mask_BT.bool()
    count = mask_BT.sum().double()
    mean = torch.where(mask_BT, values_BT, 0.0).sum(dtype=torch.float64) / count.clamp(min=1)
    centered_BT = torch.where(mask_BT, values_BT - mean.to(values_BT.dtype), 0.0)
    variance = centered_BT.square().sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    return centered_BT * torch.rsqrt(variance + WHITEN_EPSILON).to(values_BT.dtype)


def _gae(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """1506.02438: a_t = delta_t + gamma lam a_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; returns are a + V; then a is
    whitened. Tokens outside of the mask hand V_(t+1) and a_(t+1) on."""
    assert inputs.values_BT is not None
    columns = [each.unbind(dim=-1) for each in (inputs.token_rewards_BT, inputs.values_BT, inputs.mask_BT)]
    next_B = last_B = inputs.token_rewards_BT.new_zeros(len(inputs.mask_BT))
    reversed_columns = []
    for rewards_B, values_B, mask_B in zip(*(reversed(each) for each in columns), strict=True):
        advantage_B = rewards_B + inputs.gamma * next_B - values_B + inputs.gamma * inputs.lam * last_B
        next_B = torch.where(mask_B, values_B, next_B)
        last_B = torch.where(mask_B, advantage_B, last_B)
        reversed_columns.append(last_B)
    advantages_BT = torch.stack(reversed_columns[::-1], dim=-1)
    return whiten(advantages_BT, inputs.mask_BT), advantages_BT + inputs.values_BT


def _above_group_mean(inputs: AdvantageInputs) -> Tensor:
    """[B] fp64: R_i less its group's mean; 0 where the group has one trajectory, or one reward."""
    above_B = inputs.rewards_B - inputs.groups.means_B(inputs.rewards_B)
    return above_B.masked_fill(inputs.groups.are_equal_B(inputs.rewards_B), 0.0)


def _outcome(inputs: AdvantageInputs, advantages_B: Tensor) -> AdvantagesAndReturns:
    advantages_BT = inputs.on_tokens(advantages_B)
    return advantages_BT, advantages_BT


def _grpo(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2402.03300: (R_i - mean) / (deviation + 1e-6)."""
    return _outcome(inputs, _above_group_mean(inputs) / (inputs.groups.deviations_B(inputs.rewards_B) + GRPO_EPSILON))


def _dr_grpo(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2503.20783: R_i - mean. Its loss is not divided by lengths either: ``seq-mean-token-sum-norm``."""
    return _outcome(inputs, _above_group_mean(inputs))


def _rloo(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2402.14740: R_i less the mean of the group's others."""
    sizes_B = inputs.groups.sizes_B
    return _outcome(inputs, _above_group_mean(inputs) * sizes_B / (sizes_B - 1).clamp(min=1))


def _opo(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2505.23585: R_i less the group's mean weighted by lengths."""
    lengths_B = inputs.mask_BT.sum(dim=-1).double()
    lengths_of_group_B = inputs.groups.sums_B(lengths_B).clamp(min=1)
    above_B = inputs.rewards_B - inputs.groups.sums_B(lengths_B * inputs.rewards_B) / lengths_of_group_B
    return _outcome(inputs, above_B.masked_fill(inputs.groups.are_equal_B(inputs.rewards_B), 0.0))


def _reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2501.03262: the discounted sum of the rewards from each token on, whitened over the step."""
    running_B = inputs.token_rewards_BT.new_zeros(len(inputs.mask_BT))
    columns = [each.unbind(dim=-1) for each in (inputs.token_rewards_BT, inputs.mask_BT)]
    reversed_columns = []
    for rewards_B, mask_B in zip(*(reversed(each) for each in columns), strict=True):
        running_B = torch.where(mask_B, rewards_B + inputs.gamma * running_B, running_B)
        reversed_columns.append(running_B)
    returns_BT = torch.stack(reversed_columns[::-1], dim=-1)
    return whiten(returns_BT, inputs.mask_BT), returns_BT


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2501.03262: R_i - mean of the group, whitened over the step's tokens. Groups of one are not among them."""
    compared_BT = inputs.mask_BT & ~inputs.groups.is_single_B[:, None]
    advantages_BT = whiten(inputs.on_tokens(_above_group_mean(inputs)), compared_BT)
    return advantages_BT, advantages_BT


def _remax(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """2310.10505: the sum of the rewards from each token on, less the reward of the greedy completion."""
    assert inputs.baselines_B is not None
    returns_BT = inputs.trained_rewards_BT.flip(-1).cumsum(-1).flip(-1)
    return returns_BT - inputs.baselines_B[:, None], returns_BT


def _on_policy_distillation(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Each token's own reward, of ``reverse_kl_advantages``: no discount, no baseline, no whitening."""
    return inputs.trained_rewards_BT, inputs.trained_rewards_BT


ESTIMATORS: Mapping[AdvEstimator, Estimator] = {
    "gae": Estimator(function=_gae, needs_values=True),
    "grpo": Estimator(function=_grpo, needs_groups=True),
    "dr_grpo": Estimator(function=_dr_grpo, needs_groups=True),
    "rloo": Estimator(function=_rloo, needs_groups=True),
    "reinforce_plus_plus": Estimator(function=_reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(function=_reinforce_plus_plus_baseline, needs_groups=True),
    "remax": Estimator(function=_remax, needs_baselines=True),
    "opo": Estimator(function=_opo, needs_groups=True),
    "on_policy_distillation": Estimator(function=_on_policy_distillation),
}
