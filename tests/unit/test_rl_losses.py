"""Losses of tokens: what they are by hand, where they meet each other, and what never leaks."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moesaic.config.rl_sections import AlgorithmConfig, LossMode
from moesaic.rl.aggregation import masked_sequence_mean
from moesaic.rl.losses import POLICY_LOSSES, PolicyTerms, TokenLosses, policy_loss, value_loss, vf_explained_variance
from tests.unit.rl_tables import Tables, draw_tables, seeds, spoil

MODES = get_args(LossMode)
OPTIONS = AlgorithmConfig()
OPEN = AlgorithmConfig(clip_ratio_low=1e9, clip_ratio_high=1e9, clip_ratio_c=None, cispo_ratio_max=1e9)


def loss_and_gradient(
    mode: LossMode, tables: Tables, options: AlgorithmConfig = OPTIONS, **changes: Tensor
) -> tuple[TokenLosses, Tensor]:
    """The losses of the drawn tables, and the gradient of their sum by ``logprobs``."""
    mask_BT = changes.get("mask", tables.mask_BT)
    given_terms = {
        "logprobs": tables.logprobs_BT,
        "old_logprobs": tables.old_logprobs_BT,
        "advantages": tables.advantages_BT,
        "mask": mask_BT,
    }
    terms = {**given_terms, **changes}
    logprobs_BT = terms.pop("logprobs").clone().requires_grad_()
    found = policy_loss(
        mode, PolicyTerms(logprobs=logprobs_BT, sequence_mean=masked_sequence_mean(mask_BT), **terms), options
    )
    found.losses.sum().backward()
    assert logprobs_BT.grad is not None
    return found, logprobs_BT.grad


def of_ratio(
    mode: LossMode, ratio: float, advantage: float, options: AlgorithmConfig = OPTIONS
) -> tuple[float, float, dict[str, float]]:
    """Loss, its gradient by the log-probability, and metrics of one token whose old probability is 0.4."""
    old = torch.tensor([[0.4]]).log()
    logprobs = (old + torch.tensor(ratio).log()).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    terms = PolicyTerms(
        logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([[advantage]]), mask=mask,
        sequence_mean=masked_sequence_mean(mask),
    )  # fmt: skip
    found = policy_loss(mode, terms, options)
    found.losses.sum().backward()
    assert logprobs.grad is not None
    return found.losses.item(), logprobs.grad.item(), {name: each.item() for name, each in found.metrics.items()}


def test_the_table_has_every_name_of_the_recipe():
    assert set(POLICY_LOSSES) == set(MODES)


CLIP_HIGHER = AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), [
    (1.25, 2.0, -2.5, -2.5, 0),  # within the upper bound
    (1.40, 2.0, -2.56, 0.0, 1),  # above it: no more to gain
    (0.50, 2.0, -1.0, -1.0, 0),  # below the lower one, but to be raised
    (0.90, -2.0, 1.8, 1.8, 0),
    (0.50, -2.0, 1.6, 0.0, 1),  # low enough
    (1.40, -2.0, 2.8, 2.8, 0),  # above, and to be lowered
    (4.00, -2.0, 6.0, 0.0, 0),  # dual clip: at most 3 times the advantage
])  # fmt: skip
def test_ppo_clips_where_it_should(ratio, advantage, loss, gradient, clipped):
    found = of_ratio("vanilla", ratio, advantage, CLIP_HIGHER)
    assert found[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert found[2]["actor/pg_clipfrac"] == clipped
    assert found[2]["actor/pg_clipfrac_lower"] == (ratio > 3)
    assert of_ratio("vanilla", 4.0, -2.0, CLIP_HIGHER.model_copy(update={"clip_ratio_c": None}))[:2] == pytest.approx(
        (8.0, 8.0), rel=1e-5
    )


def test_the_others_by_hand():
    logprob = torch.tensor(0.8).log().item()  # of ratio 2, that is probability 0.8 after 0.4
    bounds = AlgorithmConfig(cispo_ratio_min=0.5, cispo_ratio_max=1.5)
    assert of_ratio("cispo", 2.0, 3.0, bounds)[:2] == pytest.approx((-1.5 * 3 * logprob, -1.5 * 3))
    assert of_ratio("cispo", 2.0, 3.0, bounds)[2]["actor/pg_clipfrac"] == 1
    assert of_ratio("cispo", 0.25, -3.0, bounds)[1] == pytest.approx(0.5 * 3)
    assert of_ratio("gpg", 2.0, 3.0)[:2] == pytest.approx((-3 * logprob, -3.0))
    gate = torch.sigmoid(torch.tensor(1.0)).item()
    assert of_ratio("sapo", 2.0, 3.0)[:2] == pytest.approx((-3 * gate * 4, -3 * 4 * gate * (1 - gate) * 2))
    gate = torch.sigmoid(torch.tensor(1.05)).item()
    assert of_ratio("sapo", 2.0, -3.0)[0] == pytest.approx(3 * gate * 4 / 1.05)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_kept"), [(2, 1, False), (2, -1, True), (0.4, -1, False), (0.4, 1, True)]
)
def test_dppo_keeps_tokens_that_moved_less_or_the_other_way(ratio, advantage, is_kept):
    """From 0.4 to 0.8 or 0.16, with bounds of 0.2."""
    loss, gradient, metrics = of_ratio("dppo_tv", ratio, advantage)
    assert gradient == pytest.approx(-advantage * ratio if is_kept else 0.0, rel=1e-5)
    assert (loss != 0) == is_kept and metrics["actor/pg_clipfrac"] == (not is_kept)
    assert of_ratio("dppo_tv", 2, 1, AlgorithmConfig(dppo_delta_high=0.5))[1] == pytest.approx(-2.0)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10, deadline=None)
@given(seeds)
def test_no_advantage_no_gradient(mode, seed):
    tables = draw_tables(seed)
    found, gradient = loss_and_gradient(mode, tables, advantages=torch.zeros_like(tables.advantages_BT))
    assert not found.losses.any() and not gradient.any()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10, deadline=None)
@given(seeds)
def test_on_the_old_policy_every_loss_has_the_gradient_of_reinforce(mode, seed):
    tables = draw_tables(seed)
    _, gradient = loss_and_gradient(mode, tables, logprobs=tables.old_logprobs_BT)
    expected_BT = torch.where(tables.mask_BT, -tables.advantages_BT, 0.0)
    if mode == "sapo":  # the slope of its gate at 1 is 1, for either temperature
        assert torch.allclose(gradient, expected_BT, rtol=1e-5)
    else:
        assert torch.allclose(gradient, expected_BT, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_gspo_on_single_tokens_is_ppo(seed):
    tables = draw_tables(seed)
    mask_BT = tables.mask_BT & (torch.arange(tables.mask_BT.size(1)) == 1)
    options = AlgorithmConfig(clip_ratio_c=None)
    (gspo, by_gspo), (ppo, by_ppo) = (
        loss_and_gradient(mode, tables, options, mask=mask_BT) for mode in ("gspo", "vanilla")
    )
    assert torch.allclose(gspo.losses, ppo.losses, rtol=1e-5, atol=1e-6) and torch.allclose(by_gspo, by_ppo, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_gspo_has_the_gradient_of_the_ratio_of_trajectories(seed):
    """One advantage per trajectory, averaged over its tokens: -A s, and s = exp(mean log r) differentiated through."""
    tables = draw_tables(seed, empty=False)
    per_row_B1 = tables.advantages_BT[:, :1]
    found, gradient = loss_and_gradient("gspo", tables, OPEN, advantages=per_row_B1.expand_as(tables.advantages_BT))
    counts_B1 = tables.mask_BT.sum(dim=-1, keepdim=True)
    logprobs_BT = tables.logprobs_BT.clone().requires_grad_()
    log_ratios_BT = (logprobs_BT - tables.old_logprobs_BT) * tables.mask_BT
    direct_B1 = -per_row_B1 * (log_ratios_BT.sum(dim=-1, keepdim=True) / counts_B1).exp()
    direct_B1.sum().backward()
    assert torch.allclose(found.losses.sum(dim=-1, keepdim=True) / counts_B1, direct_B1, rtol=1e-5)
    assert torch.allclose(gradient / counts_B1, logprobs_BT.grad, rtol=1e-4, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_unclipped_losses_are_reinforce_times_the_ratio(seed):
    tables = draw_tables(seed)
    ratios_BT = (tables.logprobs_BT - tables.old_logprobs_BT).exp()
    expected_BT = torch.where(tables.mask_BT, -tables.advantages_BT * ratios_BT, 0.0)
    for mode in ("cispo", "vanilla"):
        found, gradient = loss_and_gradient(mode, tables, OPEN)
        assert torch.allclose(gradient, expected_BT, rtol=1e-5)
        assert not found.metrics["actor/pg_clipfrac"].any()


def test_bounds_at_their_extremes():
    tables = draw_tables(0)
    tight = AlgorithmConfig(clip_ratio_low=1e-9, clip_ratio_high=1e-9, cispo_ratio_min=1.0, cispo_ratio_max=1.0)
    # PPO: a token moves only back toward the old policy, else nothing is left of its gradient.
    moved_on_BT = (tables.logprobs_BT > tables.old_logprobs_BT) == (tables.advantages_BT > 0)
    _, gradient = loss_and_gradient("vanilla", tables, tight)
    assert torch.equal(gradient != 0, tables.mask_BT & ~moved_on_BT)
    # CISPO: every weight is 1, which is REINFORCE.
    assert torch.allclose(loss_and_gradient("cispo", tables, tight)[1], loss_and_gradient("gpg", tables)[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_flat", [False, True])
def test_garbage_outside_of_the_mask_never_leaks(mode, is_flat):
    tables = draw_tables(1)
    mask_BT = tables.mask_BT
    tensors = {
        "logprobs": tables.logprobs_BT, "old_logprobs": tables.old_logprobs_BT,
        "advantages": tables.advantages_BT, "rollout_weights": tables.normal_BT().abs(),
    }  # fmt: skip
    clean, by_clean = loss_and_gradient(mode, tables, **tensors)
    spoilt = {name: spoil(each, mask_BT) for name, each in tensors.items()}
    logprobs = spoilt.pop("logprobs").requires_grad_()
    mean_BT = masked_sequence_mean(mask_BT)

    def spoilt_mean(values: Tensor) -> Tensor:  # of flat tokens nothing need be said of those outside of the mask
        return spoil(mean_BT(values.view(mask_BT.shape)), mask_BT).view(values.shape)

    shaped = {"logprobs": logprobs, "mask": mask_BT, **spoilt}
    if is_flat:
        shaped = {name: each.flatten() for name, each in shaped.items()}
    found = policy_loss(mode, PolicyTerms(sequence_mean=spoilt_mean, **shaped), OPTIONS)
    (found.losses * torch.ones_like(found.losses)).sum().backward()
    assert torch.equal(found.losses.view(mask_BT.shape), clean.losses) and torch.equal(logprobs.grad, by_clean)
    assert by_clean[mask_BT].any() and not by_clean[~mask_BT].any()
    for name, metric in found.metrics.items():
        assert torch.equal(metric.view(mask_BT.shape), clean.metrics[name]) and not metric.requires_grad


def test_weights_multiply_and_are_not_differentiated():
    tables = draw_tables(2)
    weights_BT = tables.normal_BT().abs().requires_grad_()
    for mode in MODES:
        (plain, by_plain), (found, gradient) = (
            loss_and_gradient(mode, tables, **extra) for extra in ({}, {"rollout_weights": weights_BT})
        )
        assert torch.allclose(found.losses, plain.losses * weights_BT) and weights_BT.grad is None
        assert torch.allclose(gradient, by_plain * weights_BT.detach())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_go_to_what_is_trained_alone(mode):
    tables = draw_tables(2)
    others = {name: getattr(tables, f"{name}_BT").clone().requires_grad_() for name in ("old_logprobs", "advantages")}
    _, gradient = loss_and_gradient(mode, tables, **others)
    values, old_values, returns = (tables.normal_BT().requires_grad_() for _ in range(3))
    value_loss(values, old_values, returns, tables.mask_BT, cliprange=0.5).losses.sum().backward()
    assert gradient.any() and values.grad.any()
    assert all(each.grad is None for each in (*others.values(), old_values, returns))


@pytest.mark.parametrize("mode", MODES)
def test_far_policies_stay_finite(mode):
    tables = draw_tables(3)
    for shift in (-300.0, 300.0):
        found, gradient = loss_and_gradient(mode, tables, logprobs=tables.old_logprobs_BT + shift)
        assert found.losses.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(("value", "loss", "gradient", "clipped"), [
    (1.2, 0.5 * 0.64, -0.8, 0),  # near the old value of 1; the return is 2
    (1.9, 0.5 * 0.25, 0.0, 1),  # past what it may move: nothing more to gain
    (0.2, 0.5 * 3.24, -1.8, 0),  # moved the wrong way: comes back at full force
])  # fmt: skip
def test_values_are_clipped_around_the_old_ones(value, loss, gradient, clipped):
    values = torch.tensor([value, float("nan")], requires_grad=True)
    found = value_loss(
        values,
        torch.tensor([1.0, float("nan")]),
        torch.tensor([2.0, float("inf")]),
        torch.tensor([1, 0]),
        cliprange=0.5,
    )
    found.losses.sum().backward()
    assert values.grad is not None
    assert found.losses.tolist() == pytest.approx([loss, 0.0]) and values.grad.tolist() == pytest.approx(
        [gradient, 0.0]
    )
    assert found.metrics["critic/vf_clipfrac"].tolist() == [clipped, 0]


def test_explained_variance():
    tables = draw_tables(7)
    returns_BT = tables.normal_BT()
    spoilt_BT = spoil(returns_BT, tables.mask_BT)
    assert vf_explained_variance(returns_BT, spoilt_BT, tables.mask_BT) == pytest.approx(1, abs=1e-4)
    assert vf_explained_variance(torch.full_like(returns_BT, 3), spoilt_BT, tables.mask_BT) == pytest.approx(
        0, abs=1e-4
    )
    assert vf_explained_variance(-returns_BT, returns_BT, tables.mask_BT) == pytest.approx(-3, abs=1e-3)
    assert vf_explained_variance(returns_BT, returns_BT, torch.zeros_like(returns_BT)) == 0
    # Returns that are all equal: 1 - 1e-5 / 1e-5.
    values_BT = torch.tensor([[-1.0, 1.0]]) * (0.5e-5) ** 0.5
    assert vf_explained_variance(values_BT, torch.zeros(1, 2), torch.ones(1, 2)) == pytest.approx(0, abs=1e-4)
