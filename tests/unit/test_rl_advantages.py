"""Advantages, beside the formulas written out for single trajectories, and what must hold of all of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.config.rl_sections import GROUP_ESTIMATORS, AdvEstimator
from moesaic.rl.advantages import ESTIMATORS, Advantages, compute_advantages, whiten
from moesaic.rl.groups import filter_groups
from moesaic.rl.overlong import overlong_penalties
from tests.unit.rl_tables import Tables, draw_tables, seeds, spoil

ALL = get_args(AdvEstimator)


def compute(name: AdvEstimator, tables: Tables, rewards_BT: torch.Tensor, **changes: object) -> Advantages:
    given_inputs = {
        "token_rewards_BT": rewards_BT,
        "mask_BT": tables.mask_BT,
        "groups_B": tables.groups_B,
        "values_BT": tables.advantages_BT,
        "baselines_B": tables.advantages_BT[:, 0],
        "gamma": 0.9,
        "lam": 0.8,
    }
    return compute_advantages(name, **{**given_inputs, **changes})


def of_one_group(name: AdvEstimator, rewards: list[float], lengths: list[int] | None = None) -> list[float]:
    """Of each trajectory, that of its first token."""
    lengths_B = torch.tensor(lengths or [1] * len(rewards))
    mask_BT = torch.arange(4) < lengths_B[:, None]
    rewards_BT = torch.zeros(mask_BT.shape).scatter(1, lengths_B[:, None] - 1, torch.tensor(rewards)[:, None])
    found = compute_advantages(name, token_rewards_BT=rewards_BT, mask_BT=mask_BT, groups_B=torch.zeros(len(rewards)))
    assert torch.equal(found.advantages_BT, torch.where(mask_BT, found.advantages_BT[:, :1], 0.0))
    return found.advantages_BT[:, 0].tolist()


def test_the_table_has_every_name_of_the_recipe_and_says_which_need_groups():
    assert set(ESTIMATORS) == set(ALL)
    assert {name for name, each in ESTIMATORS.items() if each.needs_groups} == set(GROUP_ESTIMATORS)


def test_estimators_of_outcomes_by_hand():
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0]  # mean 1, squares 0 1 1 0 4: deviation sqrt(6 / 4)
    above = [0.0, -1.0, -1.0, 0.0, 2.0]
    deviation = 1.5**0.5
    assert of_one_group("dr_grpo", rewards) == pytest.approx(above)
    assert of_one_group("grpo", rewards) == pytest.approx([each / (deviation + 1e-6) for each in above])
    assert of_one_group("rloo", rewards) == pytest.approx([each * 5 / 4 for each in above])
    # The baseline is weighted by lengths: (1 x 1 + 4 x 0 + 3 x 3) / 8.
    assert of_one_group("opo", [1.0, 0.0, 3.0], [1, 4, 3]) == pytest.approx([-0.25, -1.25, 1.75])
    # One token each: the mean of the whitened is 0, the deviation that of a sample.
    assert of_one_group("reinforce_plus_plus_baseline", rewards) == pytest.approx([x / deviation for x in above])


def test_rloo_is_the_mean_of_the_others():
    rewards = [0.3, -1.0, 2.0, 0.7]
    others = [(sum(rewards) - reward) / 3 for reward in rewards]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert of_one_group("rloo", rewards) == pytest.approx(expected)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_gae_is_the_sum_written_out_and_turns_of_others_are_passed_over(seed):
    tables = draw_tables(seed)
    rewards_BT, gamma, lam = tables.normal_BT(), 0.9, 0.8
    found = compute("gae", tables, rewards_BT)
    raw_BT = torch.zeros_like(rewards_BT)
    for row, mask_T in enumerate(tables.mask_BT):
        rewards = rewards_BT[row][mask_T].double()
        values = torch.cat([tables.advantages_BT[row][mask_T].double(), torch.zeros(1)])
        deltas = rewards + gamma * values[1:] - values[:-1]
        raw = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        raw_BT[row, mask_T] = torch.tensor(raw, dtype=torch.float32)
    expected_BT = torch.where(tables.mask_BT, raw_BT + tables.advantages_BT, 0.0)
    assert torch.allclose(found.returns_BT, expected_BT, atol=1e-5)
    trained = raw_BT[tables.mask_BT]
    whitened = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    assert torch.allclose(found.advantages_BT[tables.mask_BT], whitened, atol=1e-4)


def test_returns_of_reinforce_plus_plus_and_remax_by_hand():
    mask_BT = torch.tensor([[1, 1, 0, 1]])
    rewards_BT = torch.tensor([[1.0, 0.0, 9.0, 2.0]])  # that of a token no model wrote is not read
    inputs = {"token_rewards_BT": rewards_BT, "mask_BT": mask_BT, "groups_B": torch.zeros(1)}
    plus = compute_advantages("reinforce_plus_plus", gamma=0.5, **inputs)
    assert plus.returns_BT.tolist() == [[1.5, 1.0, 0.0, 2.0]]
    remax = compute_advantages("remax", baselines_B=torch.tensor([0.5]), **inputs)
    assert remax.returns_BT.tolist() == [[3.0, 2.0, 0.0, 2.0]]
    assert remax.advantages_BT.tolist() == [[2.5, 1.5, 0.0, 1.5]]
    assert compute_advantages("on_policy_distillation", **inputs).advantages_BT.tolist() == [[1.0, 0.0, 0.0, 2.0]]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(seeds)
def test_permuted_trajectories_have_their_advantages_permuted(name, seed):
    tables = draw_tables(seed)
    rewards_BT = tables.outcomes_BT(torch.randn(len(tables.groups_B), generator=tables.generator))
    order_B = torch.randperm(len(tables.groups_B), generator=tables.generator)
    found = compute(name, tables, rewards_BT)
    permuted = compute(
        name, tables, rewards_BT[order_B], mask_BT=tables.mask_BT[order_B], groups_B=tables.groups_B[order_B],
        values_BT=tables.advantages_BT[order_B], baselines_B=tables.advantages_BT[order_B, 0],
    )  # fmt: skip
    assert torch.allclose(found.advantages_BT[order_B], permuted.advantages_BT, rtol=0, atol=2e-6)
    assert torch.allclose(found.returns_BT[order_B], permuted.returns_BT, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ALL)
def test_what_lies_outside_of_the_mask_is_not_read(name):
    tables = draw_tables(4)
    rewards_BT = tables.outcomes_BT(tables.advantages_BT[:, 1])
    clean = compute(name, tables, rewards_BT)
    spoilt = compute(name, tables, rewards_BT, values_BT=spoil(tables.advantages_BT, tables.mask_BT))
    for one, other in ((clean.advantages_BT, spoilt.advantages_BT), (clean.returns_BT, spoilt.returns_BT)):
        assert torch.equal(one, other) and one.isfinite().all() and not one[~tables.mask_BT].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(max_examples=20, deadline=None)
@given(st.floats(-3, 3, width=32), seeds)
def test_equal_rewards_give_no_advantage_though_rounding_differs(name, reward, seed):
    tables = draw_tables(seed)
    noise_B = torch.rand(len(tables.groups_B), generator=tables.generator) * 1e-8
    rewards_BT = tables.outcomes_BT(reward * (1 + 10 * noise_B) + noise_B / 10)
    assert not compute(name, tables, rewards_BT).advantages_BT.any()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_whitening_equal_returns_does_not_blow_rounding_up(name):
    tables = draw_tables(5)
    noise_BT = torch.rand(tables.mask_BT.shape, generator=tables.generator) * 1e-8
    rewards_BT = tables.outcomes_BT(torch.full((len(tables.groups_B),), 0.5)) + noise_BT
    found = compute(name, tables, rewards_BT, gamma=1.0, lam=1.0, values_BT=torch.zeros_like(noise_BT))
    assert found.advantages_BT.abs().max() < 1e-2


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_has_no_advantage_and_is_counted(name):
    tables = draw_tables(6, empty=False)
    rewards_BT = tables.outcomes_BT(tables.advantages_BT[:, 0])
    groups_B = torch.full_like(tables.groups_B, 5)
    groups_B[0], groups_B[-1] = 100, 1
    found = compute(name, tables, rewards_BT, groups_B=groups_B)
    assert found.num_singletons == 2
    assert not found.advantages_BT[0].any() and not found.advantages_BT[-1].any()
    # The others are as if it weren't there.
    rest = compute(
        name, tables, rewards_BT[1:-1], mask_BT=tables.mask_BT[1:-1], groups_B=groups_B[1:-1],
        values_BT=None, baselines_B=None,
    )  # fmt: skip
    assert torch.equal(found.advantages_BT[1:-1], rest.advantages_BT) and rest.advantages_BT.any()


@pytest.mark.parametrize("name", ALL)
def test_sums_over_tokens_of_halves_are_taken_in_full(name):
    tables = draw_tables(6)
    rewards_BT, values_BT = (tables.normal_BT().bfloat16() for _ in range(2))
    halves = compute(name, tables, rewards_BT, values_BT=values_BT)
    full = compute(name, tables, rewards_BT.float(), values_BT=values_BT.float())
    assert torch.equal(halves.advantages_BT, full.advantages_BT) and torch.equal(halves.returns_BT, full.returns_BT)


def test_others_count_no_groups_of_one():
    tables = draw_tables(6)
    names = set(ALL) - set(GROUP_ESTIMATORS)
    alone_B = torch.arange(len(tables.groups_B))
    found = [compute(name, tables, tables.normal_BT() * tables.mask_BT, groups_B=alone_B) for name in names]
    assert all(each.num_singletons == 0 and each.advantages_BT.any() for each in found)


@pytest.mark.parametrize(("name", "missing"), [("gae", "values_BT"), ("remax", "baselines_B")])
def test_missing_inputs_are_named(name, missing):
    tables = draw_tables(0)
    with pytest.raises(ValueError, match=f"adv_estimator: {name} needs {missing}"):
        compute(name, tables, tables.normal_BT(), **{missing: None})


def test_whitening_one_token_or_none_is_zero():
    values_BT = torch.tensor([[3.0, float("nan")]])
    assert whiten(values_BT, torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    assert whiten(values_BT, torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_groups_are_filtered_whole():
    rewards_B = torch.tensor([1.0, 0.3, 1.0, 0.0, 0.1 + 0.2, 1.0, 5.0, 0.3])
    groups_B = torch.tensor([7, 3, 7, 7, 3, 9, 11, 3])
    #                        differ in 7; 3 differs by rounding; 9 and 11 are alone
    assert filter_groups(rewards_B, groups_B).tolist() == [True, False, True, True, False, False, False, False]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1e-9, 0.5, 1.0]), st.integers(0, 4)), min_size=1, max_size=20))
def test_a_group_is_kept_just_where_grpo_has_something_to_learn(rows):
    rewards_B, groups_B = (torch.tensor(each) for each in zip(*rows, strict=True))
    keep_B = filter_groups(rewards_B, groups_B)
    mask_BT = torch.ones(len(rows), 1, dtype=torch.bool)
    found = compute_advantages("grpo", token_rewards_BT=rewards_B[:, None], mask_BT=mask_BT, groups_B=groups_B)
    for group in groups_B.unique():
        of_group_B = groups_B == group
        assert keep_B[of_group_B].all() == keep_B[of_group_B].any() == bool(found.advantages_BT[of_group_B].any())


def test_the_last_tokens_of_a_long_completion_cost():
    lengths_B = torch.tensor([1, 80, 85, 90, 100, 130])
    penalties_B = overlong_penalties(lengths_B, max_tokens=100, buffer_len=20, factor=2.0)
    assert penalties_B.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0] and penalties_B.dtype == torch.float32
