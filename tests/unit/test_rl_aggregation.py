"""The weights that make token losses one number, beside sums written out, and cut in every way."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.config.rl_sections import LossAggMode
from moesaic.rl.aggregation import aggregation_weights, masked_sequence_mean
from tests.unit.rl_tables import draw_tables, seeds, spoil

MODES = get_args(LossAggMode)
FACTOR = 40.0


def written_out(losses_BT: Tensor, mask_BT: Tensor, mode: str) -> float:
    """Trajectory by trajectory."""
    rows = [losses_B[mask_B].double() for losses_B, mask_B in zip(losses_BT, mask_BT, strict=True) if mask_B.any()]
    if mode.startswith("token"):
        total = torch.cat(rows)
        return (total.mean() if mode == "token-mean" else total.sum()).item()
    if mode == "seq-mean-token-mean":
        return torch.stack([row.mean() for row in rows]).mean().item()
    mean = torch.stack([row.sum() for row in rows]).mean().item()
    return mean / FACTOR if mode == "seq-mean-token-sum-norm" else mean


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(seeds)
def test_the_weighted_sum_is_the_mean_written_out(mode, seed):
    tables = draw_tables(seed)
    losses_BT = tables.normal_BT()
    weights_BT = aggregation_weights(tables.mask_BT, mode, scale_factor=FACTOR)
    assert weights_BT.dtype == torch.float32 and not weights_BT[~tables.mask_BT].any()
    expected = written_out(losses_BT, tables.mask_BT, mode)
    assert (weights_BT * losses_BT).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("mode", "expected"), [
    ("token-mean", [[1 / 3, 1 / 3], [1 / 3, 0], [0, 0]]),
    ("token-sum", [[1, 1], [1, 0], [0, 0]]),
    ("seq-mean-token-sum", [[1 / 2, 1 / 2], [1 / 2, 0], [0, 0]]),
    ("seq-mean-token-sum-norm", [[1 / 80, 1 / 80], [1 / 80, 0], [0, 0]]),
    ("seq-mean-token-mean", [[1 / 4, 1 / 4], [1 / 2, 0], [0, 0]]),
])  # fmt: skip
def test_two_tokens_one_token_and_none(mode, expected):
    mask_BT = torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert torch.allclose(
        aggregation_weights(mask_BT, mode, scale_factor=FACTOR), torch.tensor(expected, dtype=torch.float32)
    )


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 7), st.booleans())
def test_loss_and_gradient_are_the_same_however_the_update_is_cut(mode, seed, size, end_to_end):
    tables = draw_tables(seed)
    weights_BT = aggregation_weights(tables.mask_BT, mode, scale_factor=FACTOR)
    whole = tables.normal_BT()
    cut = whole.clone().requires_grad_()
    whole.requires_grad_()
    (weights_BT * whole.square()).sum().backward()
    if end_to_end:  # the trained tokens alone, one behind the other, in another order
        order = torch.randperm(int(tables.mask_BT.sum()), generator=tables.generator)
        parts = zip(cut[tables.mask_BT][order].split(size), weights_BT[tables.mask_BT][order].split(size), strict=True)
    else:
        parts = zip(cut.split(size), weights_BT.split(size), strict=True)
    for losses, weights in parts:
        (weights * losses.square()).sum().backward(retain_graph=end_to_end)
    assert torch.allclose(whole.grad, cut.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_in_which_everything_was_rejected_weighs_nothing(mode):
    assert not aggregation_weights(torch.zeros(3, 4, dtype=torch.bool), mode, scale_factor=FACTOR).any()


@pytest.mark.parametrize("mode", set(MODES) - {"token-sum", "token-mean"})
def test_trajectories_without_tokens_do_not_thin_the_mean(mode):
    tables = draw_tables(0, empty=False)
    more_BT = torch.cat([tables.mask_BT, torch.zeros_like(tables.mask_BT)])
    alone, among = (aggregation_weights(each, mode, scale_factor=FACTOR) for each in (tables.mask_BT, more_BT))
    assert torch.equal(alone, among[: len(alone)])


def test_dr_grpo_needs_its_constant():
    with pytest.raises(ValueError, match="loss_scale_factor is not set. Set it to the longest completion"):
        aggregation_weights(torch.ones(2, 2), "seq-mean-token-sum-norm")


def test_mean_over_trajectories_reads_trained_tokens_only_and_has_no_gradient():
    tables = draw_tables(3)
    mean = masked_sequence_mean(tables.mask_BT)
    values_BT = tables.normal_BT().requires_grad_()
    means_BT = mean(values_BT)
    assert not means_BT.requires_grad and means_BT.shape == values_BT.shape
    assert torch.equal(means_BT, mean(spoil(values_BT.detach(), tables.mask_BT)))
    for values_T, means_T, mask_T in zip(values_BT, means_BT, tables.mask_BT, strict=True):
        expected = values_T[mask_T].mean() if mask_T.any() else torch.tensor(0.0)
        assert torch.allclose(means_T, expected.expand_as(means_T), atol=1e-6)
