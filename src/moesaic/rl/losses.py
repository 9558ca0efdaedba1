"""Losses of single tokens: of the policy, and of the critic. What they sum up to is ``moesaic.rl.aggregation``'s.

Every function takes tensors of one shape, [B, T] or flat [N], and gives losses of that shape: 0 where the mask is, with
no gradient there, whatever lies there (NaN, infinities).

Throughout, r = exp(logprobs - old_logprobs), its exponent kept within 20; A the advantage; sg() stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.config.rl_sections import AlgorithmConfig, LossMode

MAX_LOG_RATIO = 20.0
GSPO_MAX_LOG_RATIO = 10.0
DPPO_MAX_RATIO = 20.0
"""DPPO's weight of a token is cut here: far out, since what is cut biases the gradient (2602.04879, section 5.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a policy loss is made of; all tensors of one shape.

    Attributes:
        logprobs: of the policy that is trained, differentiable.
        old_logprobs: of the policy at the start of the step; the engine's under ``bypass_mode``.
        advantages: one per token.
        mask: bool, the tokens that are trained on.
        sequence_mean: gives every token the detached mean over the trained tokens of its trajectory
            (``moesaic.rl.aggregation.masked_sequence_mean``; over a context-parallel group where tokens are split).
        rollout_weights: weights for what engine and trainer disagree on (``moesaic.rl.corrections``), never
            differentiated.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    rollout_weights: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of tokens, and what is watched beside them.

    Attributes:
        losses: fp32, differentiable, 0 where the mask is.
        metrics: by verl's name, of the same shape, detached, 0 where the mask is; their mean over trained tokens is the
            metric.
    """

    losses: Tensor
    metrics: dict[str, Tensor]


def policy_loss(mode: LossMode, terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """The policy loss of each token, times ``rollout_weights`` where given.

    Metrics: ``actor/ppo_kl`` (old less new log-probability), ``actor/pg_clipfrac`` of losses that clip,
    ``actor/pg_clipfrac_lower`` (dual clip; DPPO's cut weights).

    Args:
        mode: of ``POLICY_LOSSES``.
        terms: of the tokens at hand, any part of an update.
        options: bounds and temperatures.
    """
    mask = terms.mask.bool()
    clean = replace(
        terms,
        mask=mask,
        logprobs=torch.where(mask, terms.logprobs, 0.0).float(),
        old_logprobs=torch.where(mask, terms.old_logprobs.detach(), 0.0).float(),
        advantages=torch.where(mask, terms.advantages.detach(), 0.0).float(),
    )
    found = POLICY_LOSSES[mode](clean, options)
    losses = found.losses
    if terms.rollout_weights is not None:
        losses = losses * torch.where(mask, terms.rollout_weights.detach(), 0.0)
    metrics = {"actor/ppo_kl": -_log_ratios(clean), **found.metrics}
    return TokenLosses(losses=torch.where(mask, losses, 0.0), metrics=_watched(metrics, mask))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float) -> TokenLosses:
    """The critic's loss of each token: half of max((V - R)^2, (V' - R)^2), V' being V kept within ``cliprange`` of what
    it was at the start of the step (1707.06347's clipping, of values). Metric: ``critic/vf_clipfrac``."""
    mask = mask.bool()
    values = torch.where(mask, values, 0.0).float()
    old_values, returns = (torch.where(mask, each.detach(), 0.0).float() for each in (old_values, returns))
    near_values = values.clamp(old_values - cliprange, old_values + cliprange)
    squares, near_squares = (values - returns).square(), (near_values - returns).square()
    return TokenLosses(
        losses=0.5 * torch.maximum(squares, near_squares),
        metrics=_watched({"critic/vf_clipfrac": near_squares > squares}, mask),
    )


@torch.no_grad()
def vf_explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """``critic/vf_explained_var``: 1 - Var(R - V) / (Var(R) + 1e-5) over the mask, of the old values. 1 is a critic
    that knows; 0 or less one that a constant would do as well as. 0 where the mask has fewer than two tokens."""
    returns_N, values_N = (each[mask_BT.bool()].double() for each in (returns_BT, values_BT))
    if len(returns_N) < 2:
        return 0.0
    return float(1 - (returns_N - values_N).var() / (returns_N.var() + 1e-5))


def _watched(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    return {name: torch.where(mask, each.detach().float(), 0.0) for name, each in metrics.items()}


def _log_ratios(terms: PolicyTerms) -> Tensor:
    return (terms.logprobs - terms.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratios: Tensor, advantages: Tensor, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clipped term is the larger one."""
    free = -advantages * ratios
    held = -advantages * ratios.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return torch.maximum(free, held), held > free


def _vanilla(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """PPO (1707.06347) with bounds of their own below and above (DAPO, 2503.14476); where A < 0 the loss is at most
    -A ``clip_ratio_c`` (dual clip, 1912.09729)."""
    losses, is_clipped = _clipped(_log_ratios(terms).exp(), terms.advantages, options)
    metrics = {"actor/pg_clipfrac": is_clipped}
    if options.clip_ratio_c is not None:
        ceilings = -terms.advantages * options.clip_ratio_c
        is_negative = terms.advantages < 0
        metrics["actor/pg_clipfrac_lower"] = is_negative & (losses > ceilings)
        losses = torch.where(is_negative, torch.minimum(losses, ceilings), losses)
    return TokenLosses(losses=losses, metrics=metrics)


def _gspo(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """2507.18071: PPO with the ratio of the whole trajectory, s = exp(mean of log r), and each token's own gradient:
    s logprobs' gradient, by s exp(logprobs - sg(logprobs)); s is cut at exp(10). Its authors sum it up by
    seq-mean-token-mean."""
    means = terms.sequence_mean(terms.logprobs.detach() - terms.old_logprobs)
    log_ratios = terms.logprobs - terms.logprobs.detach() + means.detach()
    losses, is_clipped = _clipped(log_ratios.clamp(max=GSPO_MAX_LOG_RATIO).exp(), terms.advantages, options)
    return TokenLosses(losses=losses, metrics={"actor/pg_clipfrac": is_clipped})


def _cispo(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """2506.13585: -sg(clip(r)) A logprobs: a token's weight is cut, its gradient never is. The bounds
    ``cispo_ratio_min`` and ``cispo_ratio_max`` are of the ratio itself, not distances from 1."""
    ratios = _log_ratios(terms).detach().exp()
    weights = ratios.clamp(options.cispo_ratio_min, options.cispo_ratio_max)
    return TokenLosses(
        losses=-weights * terms.advantages * terms.logprobs, metrics={"actor/pg_clipfrac": weights != ratios}
    )


def _gpg(terms: PolicyTerms, _: AlgorithmConfig) -> TokenLosses:
    """REINFORCE: -A logprobs (GPG, 2504.02546)."""
    return TokenLosses(losses=-terms.advantages * terms.logprobs, metrics={})


def _sapo(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """2511.20347: -A sigmoid(tau (r - 1)) 4 / tau: a gate that closes softly, with a tau for A > 0 and one for the
    rest. Its authors sum it up by seq-mean-token-mean."""
    taus = torch.where(terms.advantages > 0, options.sapo_tau_pos, options.sapo_tau_neg)
    gates = torch.sigmoid(taus * (_log_ratios(terms).exp() - 1)) * (4 / taus)
    return TokenLosses(losses=-gates * terms.advantages, metrics={})


def _dppo_tv(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLosses:
    """2602.04879: -A sg(min(r, 20)) logprobs of tokens whose probability has not moved too far the way that A pushes
    it: up by at most ``dppo_delta_high`` where A > 0, else down by at most ``dppo_delta_low``."""
    ratios = _log_ratios(terms).detach().exp()
    moves = terms.logprobs.detach().exp() - terms.old_logprobs.exp()
    is_near = torch.where(terms.advantages > 0, moves <= options.dppo_delta_high, moves >= -options.dppo_delta_low)
    losses = -terms.advantages * ratios.clamp(max=DPPO_MAX_RATIO) * terms.logprobs * is_near
    metrics = {"actor/pg_clipfrac": ~is_near, "actor/pg_clipfrac_lower": is_near & (ratios > DPPO_MAX_RATIO)}
    return TokenLosses(losses=losses, metrics=metrics)


POLICY_LOSSES: Mapping[LossMode, Callable[[PolicyTerms, AlgorithmConfig], TokenLosses]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "cispo": _cispo,
    "gpg": _gpg,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
}
