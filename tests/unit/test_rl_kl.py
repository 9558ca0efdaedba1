"""Estimates of the divergence: values, gradients, means over a whole distribution, and the adapted coefficient."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.config.rl_sections import KlConfig, KlEstimator
from moesaic.rl.kl import KlController, apply_kl_in_reward, kl_penalty
from tests.unit.rl_tables import draw_tables, seeds, spoil

ESTIMATORS = get_args(KlEstimator)
PROBABILITIES, REFERENCE = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])


def value_and_slope(estimator: KlEstimator, difference: float) -> tuple[float, float]:
    logprob, ref_logprob = torch.tensor(difference - 1, requires_grad=True), torch.tensor(-1.0, requires_grad=True)
    value = kl_penalty(logprob, ref_logprob, estimator)
    value.backward()
    assert logprob.grad is not None and ref_logprob.grad is None
    return value.item(), logprob.grad.item()


@pytest.mark.parametrize(("estimator", "value", "slope"), [
    ("k1", 0.5, 1.0),
    ("k2", 0.125, 0.5),
    ("k3", 0.1065307, 1 - 0.6065307),
    ("k3+", 0.1065307, 0.5),
])  # fmt: skip
def test_by_hand(estimator, value, slope):
    assert value_and_slope(estimator, 0.5) == pytest.approx((value, slope), rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.floats(-100, 100, width=32))
def test_k3_is_not_negative_and_bounded_and_k3_plus_has_the_gradient_of_k2(difference):
    value, slope = value_and_slope("k3", difference)
    measured = torch.tensor(difference - 1).item() + 1  # as fp32 has it
    assert 0 <= value <= 10
    assert slope == pytest.approx(1 - math.exp(-measured) if 0 < value < 10 else 0.0, rel=1e-5, abs=1e-6)
    value_plus, slope_plus = value_and_slope("k3+", difference)
    assert value_plus == value and slope_plus == pytest.approx(measured, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_the_mean_is_the_divergence(estimator):
    """Over everything the policy may write, each as often as it does; k2 is biased."""
    divergence = (PROBABILITIES * (PROBABILITIES / REFERENCE).log()).sum().item()
    estimates = kl_penalty(PROBABILITIES.log(), REFERENCE.log(), estimator)
    assert (PROBABILITIES * estimates).sum().item() == pytest.approx(divergence, rel=1e-5)


@pytest.mark.parametrize(("estimator", "is_right"), [("k1", False), ("k2", True), ("k3", False), ("k3+", True)])
def test_whose_mean_gradient_is_that_of_the_divergence(estimator, is_right):
    exact, estimated = (PROBABILITIES.log().requires_grad_() for _ in range(2))
    logprobs = exact.log_softmax(-1)
    (logprobs.exp() * (logprobs - REFERENCE.log())).sum().backward()
    (PROBABILITIES * kl_penalty(estimated.log_softmax(-1), REFERENCE.log(), estimator)).sum().backward()
    assert torch.allclose(exact.grad, estimated.grad, rtol=1e-4, atol=1e-6) == is_right
    if estimator == "k1":
        assert estimated.grad.abs().max() < 1e-6  # as a loss it would do nothing


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_garbage_outside_of_the_mask_never_leaks(estimator):
    tables = draw_tables(1)
    mask_BT = tables.mask_BT
    clean_BT, spoilt_BT = tables.logprobs_BT.clone(), spoil(tables.logprobs_BT, mask_BT)
    clean_BT.requires_grad_(), spoilt_BT.requires_grad_()
    clean = kl_penalty(clean_BT, tables.old_logprobs_BT, estimator, mask_BT)
    spoilt = kl_penalty(spoilt_BT, spoil(tables.old_logprobs_BT, mask_BT), estimator, mask_BT)
    clean.sum().backward(), spoilt.sum().backward()
    assert torch.equal(clean, spoilt) and not clean[~mask_BT].any()
    assert torch.equal(clean_BT.grad, spoilt_BT.grad) and not clean_BT.grad[~mask_BT].any() and clean_BT.grad.any()


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k4 is not one of"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_in_the_reward_k1_takes_the_log_ratio_of_the_trajectory(seed):
    tables = draw_tables(seed)
    rewards_BT = tables.outcomes_BT(tables.advantages_BT[:, 0])
    mask_BT = tables.mask_BT
    old_BT, ref_BT = (spoil(each, mask_BT) for each in (tables.old_logprobs_BT, tables.logprobs_BT))
    found = apply_kl_in_reward(rewards_BT, old_BT, ref_BT, mask_BT, estimator="k1", coef=0.3)
    log_ratios_BT = (tables.old_logprobs_BT - tables.logprobs_BT) * mask_BT
    expected_B = (rewards_BT - 0.3 * log_ratios_BT).sum(dim=-1)
    assert torch.allclose(found.token_rewards_BT.sum(dim=-1), expected_B, atol=1e-5)
    assert torch.equal(found.token_rewards_BT[~mask_BT], rewards_BT[~mask_BT])
    means = [row[mask].mean().item() for row, mask in zip(log_ratios_BT, mask_BT, strict=True) if mask.any()]
    assert found.mean_kl == pytest.approx(sum(means) / len(means), abs=1e-6)


def test_the_coefficient_follows_the_target():
    controller = KlController(KlConfig(coef=0.1, target=0.5, horizon=1000))
    controller.update(0.55, 100)  # a tenth too far, a tenth of the horizon
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(50.0, 100)  # far too far: a fifth at most
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, 100)
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    controller.update(0.0, 1_000_000)  # more than the horizon counts as the horizon: it stays positive
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98 * 0.8)


@pytest.mark.parametrize("mean_kl", [math.nan, math.inf, -math.inf])
def test_a_measure_that_is_not_finite_leaves_the_coefficient(mean_kl):
    """An update of such a step is skipped and the run goes on; a coefficient of NaN would skip all that follow."""
    controller = KlController(KlConfig(coef=0.1, target=0.5, horizon=10))
    controller.update(mean_kl, 10)
    assert controller.coef == 0.1


def test_a_coefficient_is_resumed_and_a_fixed_one_is_the_recipes():
    config = KlConfig(coef=0.1, target=0.5, horizon=10)
    controller, resumed = KlController(config), KlController(config)
    controller.update(1.0, 10)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef == pytest.approx(0.12)
    fixed = KlController(KlConfig(coef=0.2))
    fixed.update(100.0, 10)
    assert fixed.coef == 0.2
    fixed.load_state_dict(controller.state_dict())
    assert fixed.coef == 0.2
