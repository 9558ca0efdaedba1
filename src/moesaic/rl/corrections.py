"""For tokens that the engine and the trainer give different probabilities: weights, rejection, and what to watch.

rho = pi_train / pi_rollout of a token, with the trainer's log-probabilities of the start of the step, not those of the
update under way (that ratio is the policy loss's own). Exponents are kept within 20. Nothing here has a gradient.

Metrics bear verl's names and values, but for one thing: trajectories without a trained token are left out of the means
over trajectories.

Shape suffixes: B trajectories of the step (of every rank), T tokens after the prompt; S trajectories that have tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.config.rl_check import rejection_bounds
from moesaic.config.rl_sections import CorrectionConfig

MAX_LOG_RATIO = 20.0
SMALLEST_MEAN = 1e-8
"""Weights whose mean is smaller are not divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a step is corrected by.

    Attributes:
        weights_BT: [B, T] fp32 for the policy loss, 0 where the given mask is; None without ``rollout_is``.
        mask_BT: [B, T] bool: the given mask less what was rejected. Losses are summed over it and divided by its counts
            (``aggregation_weights``); advantages are made before, from every token.
        metrics: ``rollout_corr/rollout_is_*`` and ``rollout_corr/rollout_rs_*``.
    """

    weights_BT: Tensor | None
    mask_BT: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig
) -> Correction:
    """Weights and mask of a whole step.

    Weights (``rollout_is``): ``token``: min(rho, C); ``sequence``: min(product of rho, C) at each token of the
    trajectory, C being ``rollout_is_threshold`` (truncated importance sampling, TIS); ``icepop``: rho where it lies
    within ``rollout_is_threshold_lower`` and C, else 0. With ``rollout_is_batch_normalize`` they are divided by their
    mean, over tokens or, of ``sequence``, over trajectories.

    Rejection (``rollout_rs``): every measure must let a token pass. Per token k1 = -log rho, k2 = (log rho)^2 / 2, k3 =
    rho - 1 - log rho; ``token_*`` leaves single tokens out, ``seq_sum_*``, ``seq_mean_*``, ``seq_max_*`` whole
    trajectories. For k1 ``low_high`` bounds pi_rollout / pi_train (one number: ``1/high_high``); of ``seq_mean_k1``
    it's the geometric mean. k2 and k3 have an upper bound only.

    Args:
        old_logprobs_BT: [B, T] of the trainer, at the start of the step.
        rollout_logprobs_BT: [B, T] of the engine.
        mask_BT: [B, T] bool, the model's tokens; elsewhere nothing is read.
        config: what to do.

    Raises:
        ValueError: a threshold is not what its measure takes.
    """
    mask_BT = mask_BT.bool()
    log_ratios_BT = torch.where(mask_BT, old_logprobs_BT.float() - rollout_logprobs_BT.float(), 0.0)
    weights_BT: Tensor | None = None
    metrics: dict[str, float] = {}
    if config.rollout_is is not None:
        weights_BT, metrics = _weights(log_ratios_BT, mask_BT, config)
    kept_BT = mask_BT
    if config.rollout_rs:
        kept_BT, rejected = _reject(log_ratios_BT, mask_BT, config)
        metrics = {**metrics, **rejected}
    return Correction(
        weights_BT=weights_BT,
        mask_BT=kept_BT,
        metrics={f"rollout_corr/{name}": value for name, value in metrics.items()},
    )


@torch.no_grad()
def mismatch_metrics(logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """How far the trainer's policy is from the engine's, over a whole step; {} where no token is trained on.

    ``rollout_corr/``: ``kl`` (mean of log pi_rollout - log pi_train) and ``k3_kl`` (mean of rho - 1 - log rho), both of
    KL(rollout || train); ``training_ppl``, ``rollout_ppl``, their logarithms, ``log_ppl_diff`` (training less rollout;
    with the mean of its absolute values, its largest and smallest) and ``ppl_ratio``, means over trajectories;
    ``chi2_token`` (mean of rho^2, less 1) and ``chi2_seq`` (the same of the products over trajectories).

    ``training/``: ``rollout_probs_diff_mean``, ``_max``, ``_std``: of |pi_train - pi_rollout| over tokens.

    Args:
        logprobs_BT: [B, T] of the trainer.
        rollout_logprobs_BT: [B, T] of the engine.
        mask_BT: [B, T] bool, the model's tokens; elsewhere nothing is read.
    """
    mask_BT = mask_BT.bool()
    if not mask_BT.any():
        return {}
    train_BT, rollout_BT = (torch.where(mask_BT, each, 0.0).float() for each in (logprobs_BT, rollout_logprobs_BT))
    log_ratios_BT = train_BT - rollout_BT
    safe_BT = _bounded(log_ratios_BT)
    train_S, rollout_S = (-_sequence_means(each, mask_BT) for each in (train_BT, rollout_BT))
    sums_S = _bounded(_sequence_sums(log_ratios_BT, mask_BT))
    apart_S = train_S - rollout_S
    corrections = {
        "kl": -_mean(log_ratios_BT, mask_BT),
        "k3_kl": _mean(safe_BT.expm1() - safe_BT, mask_BT),
        "training_ppl": float(train_S.exp().mean()),
        "training_log_ppl": float(train_S.mean()),
        "rollout_ppl": float(rollout_S.exp().mean()),
        "rollout_log_ppl": float(rollout_S.mean()),
        "log_ppl_diff": float(apart_S.mean()),
        "log_ppl_abs_diff": float(apart_S.abs().mean()),
        "log_ppl_diff_max": float(apart_S.max()),
        "log_ppl_diff_min": float(apart_S.min()),
        "ppl_ratio": float(apart_S.exp().mean()),
        "chi2_token": _mean((2 * safe_BT).exp(), mask_BT) - 1,
        "chi2_seq": float((2 * sums_S).exp().mean()) - 1,
    }
    apart_N = (train_BT.exp() - rollout_BT.exp()).abs()[mask_BT].double()
    return {
        **{f"rollout_corr/{name}": value for name, value in corrections.items()},
        "training/rollout_probs_diff_mean": float(apart_N.mean()),
        "training/rollout_probs_diff_max": float(apart_N.max()),
        "training/rollout_probs_diff_std": float(apart_N.std()) if len(apart_N) > 1 else 0.0,
    }


def _weights(log_ratios_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    is_of_sequences = config.rollout_is == "sequence"
    high = config.rollout_is_threshold
    if is_of_sequences:
        log_ratios_BT = log_ratios_BT.sum(dim=-1, keepdim=True).expand_as(log_ratios_BT)
    raw_BT = torch.where(mask_BT, _bounded(log_ratios_BT).exp(), 0.0)
    low = 1 / high
    metrics = {}
    if config.rollout_is == "icepop":
        low = config.rollout_is_threshold_lower
        is_outside_BT = (raw_BT < low) | (raw_BT > high)
        weights_BT = torch.where(is_outside_BT, 0.0, raw_BT)
        metrics["rollout_is_oob_ratio"] = _mean(is_outside_BT, mask_BT)
    else:
        weights_BT = raw_BT.clamp(max=high)
    if mask_BT.any():
        metrics.update(_weight_metrics(weights_BT, raw_BT, mask_BT, low, high))
        # Of whole trajectories, what the weight was before it was cut.
        extremes_BT = raw_BT if is_of_sequences else weights_BT
        metrics["rollout_is_max"] = float(extremes_BT[mask_BT].max())
        metrics["rollout_is_min"] = float(extremes_BT[mask_BT].min())
        if is_of_sequences:
            metrics["rollout_is_ratio_fraction_high"] = metrics["rollout_is_seq_fraction_high"]
            metrics["rollout_is_ratio_fraction_low"] = metrics["rollout_is_seq_fraction_low"]
    if config.rollout_is_batch_normalize:
        means_S = _sequence_means(weights_BT, mask_BT)
        mean = float(means_S.sum()) / max(len(means_S), 1) if is_of_sequences else _mean(weights_BT, mask_BT)
        factor = mean if mean > SMALLEST_MEAN else 1.0
        weights_BT = weights_BT / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights_BT, metrics


def _weight_metrics(weights_BT: Tensor, raw_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> dict[str, float]:
    """Of the weights as they are applied, and of how many were cut; the effective sample size is relative to all."""
    mean, mean_square = _mean(weights_BT, mask_BT), _mean(weights_BT.double().square(), mask_BT)
    means_S, raw_means_S = _sequence_means(weights_BT, mask_BT), _sequence_means(raw_BT, mask_BT)
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(max(mean_square - mean**2, 0.0)),
        "rollout_is_eff_sample_size": mean**2 / mean_square if mean_square > 0 else 0.0,
        "rollout_is_ratio_fraction_high": _mean(raw_BT > high, mask_BT),
        "rollout_is_ratio_fraction_low": _mean(raw_BT < low, mask_BT),
        "rollout_is_seq_mean": float(means_S.mean()),
        "rollout_is_seq_std": float(means_S.std()) if len(means_S) > 1 else 0.0,
        "rollout_is_seq_max": float(means_S.max()),
        "rollout_is_seq_min": float(means_S.min()),
        "rollout_is_seq_max_deviation": float((means_S - 1).abs().max()),
        "rollout_is_seq_fraction_high": float((raw_means_S > high).double().mean()),
        "rollout_is_seq_fraction_low": float((raw_means_S < low).double().mean()),
    }


def _reject(log_ratios_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    kept_BT = mask_BT
    metrics: dict[str, float] = {}
    for measure, threshold in zip(config.rollout_rs, config.rollout_rs_threshold, strict=True):
        low, high = _bounds(measure, threshold)
        values_BT = _measured(measure, _bounded(log_ratios_BT), mask_BT)
        passes_BT = (values_BT >= low) & (values_BT <= high)
        kept_BT = kept_BT & passes_BT
        name = f"rollout_rs_{measure}"
        metrics[f"{name}_masked_fraction"] = _mean(~passes_BT, mask_BT)
        metrics[f"{name}_seq_masked_fraction"] = _touched_fraction(passes_BT, mask_BT)
        if mask_BT.any():
            values_N = values_BT[mask_BT].double()
            metrics[f"{name}_mean"] = float(values_N.mean())
            metrics[f"{name}_max"] = float(values_N.max())
            metrics[f"{name}_min"] = float(values_N.min())
    metrics["rollout_rs_masked_fraction"] = _mean(~kept_BT, mask_BT)
    metrics["rollout_rs_seq_masked_fraction"] = _touched_fraction(kept_BT, mask_BT)
    return kept_BT, metrics


def _bounds(measure: str, threshold: str) -> tuple[float, float]:
    """The least and the largest value that passes: of k1 logarithms, k2 and k3 have no least one."""
    if not measure.endswith("k1"):
        return -math.inf, float(threshold)
    bounds = rejection_bounds(threshold)
    if bounds is None:
        raise ValueError(
            f"correction_config.rollout_rs_threshold: {threshold!r} of {measure} is not low_high, both above 0, nor "
            'one number above 1. Write e.g. "0.5_2.0"'
        )
    return math.log(bounds[0]), math.log(bounds[1])


def _measured(measure: str, log_ratios_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: a measure of each token, or at each token that of its trajectory."""
    level, _, estimator = measure.rpartition("_")
    if estimator == "k1":
        values_BT = -log_ratios_BT
    elif estimator == "k2":
        values_BT = 0.5 * log_ratios_BT.square()
    else:
        values_BT = log_ratios_BT.expm1() - log_ratios_BT
    if level == "token":
        return values_BT
    # Outside of the mask ratios are 1, and every measure is 0.
    if level == "seq_max":
        values_B1 = values_BT.amax(dim=-1, keepdim=True)  # k2 and k3 are not negative
    else:
        values_B1 = values_BT.sum(dim=-1, keepdim=True)
        if level == "seq_mean":
            values_B1 = values_B1 / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    return values_B1.expand_as(values_BT)


def _touched_fraction(kept_BT: Tensor, mask_BT: Tensor) -> float:
    """Of the trajectories that have tokens, those that lost at least one."""
    has_tokens_B = mask_BT.any(dim=-1)
    return float((mask_BT & ~kept_BT).any(dim=-1).sum()) / max(int(has_tokens_B.sum()), 1)


def _bounded(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _mean(values_BT: Tensor, mask_BT: Tensor) -> float:
    """Over the mask; 0 where it is empty."""
    total = torch.where(mask_BT, values_BT, 0).sum(dtype=torch.float64)
    return float(total / mask_BT.sum().clamp(min=1))


def _sequence_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[S] fp64: of each trajectory that has tokens."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=-1, dtype=torch.float64)[mask_BT.any(dim=-1)]


def _sequence_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[S] fp64: of each trajectory that has tokens."""
    return _sequence_sums(values_BT, mask_BT) / mask_BT.sum(dim=-1)[mask_BT.any(dim=-1)]
