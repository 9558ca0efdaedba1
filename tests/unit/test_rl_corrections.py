"""Weights, rejection and metrics for what engine and trainer disagree on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moesaic.config.rl_sections import CorrectionConfig
from moesaic.rl.corrections import Correction, correct, mismatch_metrics
from tests.unit.rl_tables import Tables, draw_tables, seeds, spoil

# pi_train / pi_rollout of two trajectories, the second one token shorter.
RATIOS_BT = torch.tensor([[0.25, 1.0, 4.0], [1.5, 0.8, 7.0]])
MASK_BT = torch.tensor([[1, 1, 1], [1, 1, 0]])
MEASURES = [
    f"{level}_k{number}"
    for level, numbers in (("token", "123"), ("seq_sum", "123"), ("seq_mean", "123"), ("seq_max", "23"))
    for number in numbers
]


def corrected(**options: object) -> Correction:
    rollout_BT = torch.full_like(RATIOS_BT, -1.0)
    return correct(rollout_BT + RATIOS_BT.log(), rollout_BT, MASK_BT, CorrectionConfig(**options))


def weights(**options: object) -> list[list[float]]:
    found = corrected(**options).weights_BT
    assert found is not None and found.dtype == torch.float32
    return [[round(each, 5) for each in row] for row in found.tolist()]


def kept(*measures: str, thresholds: tuple[str, ...]) -> list[list[int]]:
    return corrected(rollout_rs=measures, rollout_rs_threshold=thresholds).mask_BT.int().tolist()


def test_off_is_neither_weights_nor_rejection():
    found = corrected()
    assert found.weights_BT is None and torch.equal(found.mask_BT, MASK_BT.bool()) and not found.metrics


def test_weights_by_hand():
    assert weights(rollout_is="token") == [[0.25, 1.0, 2.0], [1.5, 0.8, 0.0]]
    assert weights(rollout_is="token", rollout_is_threshold=0.9) == [[0.25, 0.9, 0.9], [0.9, 0.8, 0.0]]
    assert weights(rollout_is="sequence") == [[1.0, 1.0, 1.0], [1.2, 1.2, 0.0]]
    assert weights(rollout_is="sequence", rollout_is_threshold=1.1) == [[1.0, 1.0, 1.0], [1.1, 1.1, 0.0]]
    assert weights(rollout_is="icepop") == [[0.0, 1.0, 0.0], [1.5, 0.8, 0.0]]
    # A ratio at a bound is within it.
    assert weights(rollout_is="icepop", rollout_is_threshold_lower=1.0) == [[0.0, 1.0, 0.0], [1.5, 0.0, 0.0]]
    assert weights(rollout_is="icepop", rollout_is_threshold=1.0) == [[0.0, 1.0, 0.0], [0.0, 0.8, 0.0]]
    # The exponent of a product is cut, not those of its factors.
    apart_BT = torch.tensor([[30.0, -29.5]])
    of_product = correct(apart_BT, torch.zeros(1, 2), torch.ones(1, 2), CorrectionConfig(rollout_is="sequence"))
    assert of_product.weights_BT[0].tolist() == pytest.approx([math.exp(0.5)] * 2)


def test_differences_of_halves_are_taken_in_full():
    train_BT, rollout_BT = torch.tensor([[-8.0, -3.17]]).bfloat16(), torch.tensor([[-0.0317, -0.0432]]).bfloat16()
    config = CorrectionConfig(rollout_is="token")
    of_halves, of_the_same = (
        correct(cast(train_BT), cast(rollout_BT), torch.ones(1, 2), config).weights_BT
        for cast in (torch.Tensor.bfloat16, torch.Tensor.float)
    )
    assert torch.equal(of_halves, of_the_same)


def test_batch_normalized_weights_have_a_mean_of_one():
    of_tokens = torch.tensor(weights(rollout_is="token", rollout_is_batch_normalize=True))
    assert of_tokens.sum().item() / 5 == pytest.approx(1, abs=1e-5)
    of_sequences = torch.tensor(weights(rollout_is="sequence", rollout_is_batch_normalize=True))
    assert of_sequences[:, 0].mean().item() == pytest.approx(1, abs=1e-5)
    # A trajectory without a token is no part of the mean.
    tables = draw_tables(1)
    config = CorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
    among = correct(tables.logprobs_BT, tables.old_logprobs_BT, tables.mask_BT, config).weights_BT
    assert not tables.mask_BT[2].any() and among.amax(dim=-1).sum().item() / (len(among) - 1) == pytest.approx(1)
    # Where everything was cut to 0 there is nothing to divide by.
    bounds = {"rollout_is_threshold_lower": 8.0, "rollout_is_threshold": 9.0}
    assert weights(rollout_is="icepop", rollout_is_batch_normalize=True, **bounds) == [[0.0] * 3] * 2


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_truncation_at_its_limits(seed):
    tables = draw_tables(seed)
    arguments = (tables.logprobs_BT, tables.old_logprobs_BT, tables.mask_BT)
    ratios_BT = torch.where(tables.mask_BT, (tables.logprobs_BT - tables.old_logprobs_BT).exp(), 0.0)
    no_bound = correct(*arguments, CorrectionConfig(rollout_is="token", rollout_is_threshold=1e30))
    assert torch.allclose(no_bound.weights_BT, ratios_BT)
    nothing = correct(*arguments, CorrectionConfig(rollout_is="token", rollout_is_threshold=1e-6))
    assert torch.equal(nothing.weights_BT, 1e-6 * tables.mask_BT)
    agreed = correct(tables.old_logprobs_BT, *arguments[1:], CorrectionConfig(rollout_is="sequence"))
    assert torch.equal(agreed.weights_BT, tables.mask_BT.float())


def test_rejection_by_hand():
    # k1 bounds pi_rollout / pi_train, which is 4, 1, 1/4 and 2/3, 1.25.
    assert kept("token_k1", thresholds=("0.5_1.2",)) == [[0, 1, 0], [1, 0, 0]]
    assert kept("token_k1", thresholds=("1.3",)) == [[0, 1, 0], [0, 1, 0]]  # 1/1.3 to 1.3
    assert kept("token_k2", thresholds=("0.9",)) == [[0, 1, 0], [1, 1, 0]]  # log(4)^2 / 2 = 0.96
    # rho - 1 - log rho: 0.636, 0, 1.614 and 0.095, 0.023
    assert kept("token_k3", thresholds=("0.7",)) == [[1, 1, 0], [1, 1, 0]]
    assert kept("seq_max_k3", thresholds=("0.7",)) == [[0, 0, 0], [1, 1, 0]]
    assert kept("seq_sum_k3", thresholds=("0.11",)) == [[0, 0, 0], [0, 0, 0]]
    assert kept("seq_mean_k3", thresholds=("0.11",)) == [[0, 0, 0], [1, 1, 0]]
    assert kept("seq_mean_k2", thresholds=("0.5",)) == [[0, 0, 0], [1, 1, 0]]
    assert kept("seq_max_k2", thresholds=("1.0",)) == [[1, 1, 1], [1, 1, 0]]
    # Products: 1 and 1 / 1.2; its root is 1 / 1.095.
    assert kept("seq_sum_k1", thresholds=("0.9_1.1",)) == [[1, 1, 1], [0, 0, 0]]
    assert kept("seq_mean_k1", thresholds=("0.9_1.1",)) == [[1, 1, 1], [1, 1, 0]]


def test_all_measures_must_let_a_token_pass_and_each_sees_every_token():
    assert kept("token_k1", "seq_sum_k1", thresholds=("0.5_1.2", "0.9_1.1")) == [[0, 1, 0], [0, 0, 0]]
    assert kept("seq_sum_k1", "token_k1", thresholds=("0.9_1.1", "0.5_1.2")) == [[0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("measure", MEASURES)
def test_agreement_rejects_nothing_and_garbage_never_leaks(measure):
    tables = draw_tables(1)
    config = CorrectionConfig(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs=(measure,),
        rollout_rs_threshold=("0.9_1.1" if measure.endswith("k1") else "0.01",),
    )  # fmt: skip
    spoilt_BT = spoil(tables.logprobs_BT, tables.mask_BT)
    assert torch.equal(correct(spoilt_BT, spoilt_BT, tables.mask_BT, config).mask_BT, tables.mask_BT)
    clean, spoilt = (
        correct(trained_BT, rollout_BT, tables.mask_BT, config)
        for trained_BT, rollout_BT in (
            (tables.logprobs_BT, tables.old_logprobs_BT),
            (spoilt_BT, spoil(tables.old_logprobs_BT, tables.mask_BT)),
        )
    )
    assert torch.equal(clean.weights_BT, spoilt.weights_BT) and torch.equal(clean.mask_BT, spoilt.mask_BT)
    assert clean.metrics == spoilt.metrics and all(math.isfinite(each) for each in clean.metrics.values())
    assert not torch.equal(clean.mask_BT, tables.mask_BT)


def test_metrics_of_weights_and_rejection_by_hand():
    metrics = corrected(rollout_is="icepop", rollout_rs=("token_k1",), rollout_rs_threshold=("0.5_1.2",)).metrics
    found = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    squares = 1 + 2.25 + 0.64
    assert found["rollout_is_mean"] == pytest.approx(3.3 / 5)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(3.3**2 / squares / 5)
    assert found["rollout_is_std"] == pytest.approx((squares / 5 - 0.66**2) ** 0.5)
    assert (found["rollout_is_max"], found["rollout_is_min"]) == (1.5, 0.0)
    assert found["rollout_is_oob_ratio"] == pytest.approx(2 / 5)
    assert found["rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    assert found["rollout_rs_token_k1_seq_masked_fraction"] == 1.0
    assert found["rollout_rs_token_k1_max"] == pytest.approx(math.log(4))
    whole = corrected(rollout_is="sequence", rollout_is_threshold=1.1).metrics
    assert whole["rollout_corr/rollout_is_max"] == pytest.approx(1.2, rel=1e-5)  # before it was cut
    assert whole["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5


@pytest.mark.parametrize(("measure", "threshold"), [
    ("token_k1", "2.0_0.5"), ("token_k1", "0.5"), ("seq_sum_k1", "a_b"), ("seq_mean_k1", "0_2"), ("token_k3", "0.1_x")
])  # fmt: skip
def test_thresholds_that_say_nothing_are_refused(measure, threshold):
    with pytest.raises(ValueError, match=threshold):
        kept(measure, thresholds=(threshold,))


def test_each_measure_has_a_threshold():
    with pytest.raises(ValueError, match="shorter"):
        kept("token_k1", "token_k2", thresholds=("0.5_2.0",))


def mismatch(tables: Tables, logprobs_BT: Tensor, rollout_BT: Tensor) -> dict[str, float]:
    found = mismatch_metrics(logprobs_BT, rollout_BT, tables.mask_BT)
    assert all(math.isfinite(each) for each in found.values())
    return found


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_mismatch_written_out(seed):
    tables = draw_tables(seed)
    train_BT, rollout_BT, mask_BT = tables.logprobs_BT, tables.old_logprobs_BT, tables.mask_BT
    found = mismatch(tables, spoil(train_BT, mask_BT), spoil(rollout_BT, mask_BT))
    train, rollout = train_BT[mask_BT].double(), rollout_BT[mask_BT].double()
    rows = [(a[m].double(), b[m].double()) for a, b, m in zip(train_BT, rollout_BT, mask_BT, strict=True) if m.any()]
    apart = (train.exp() - rollout.exp()).abs()
    apart_S = torch.stack([(b - a).mean() for a, b in rows])
    expected = {
        "rollout_corr/kl": (rollout - train).mean(),
        "rollout_corr/k3_kl": ((train - rollout).exp() - 1 - (train - rollout)).mean(),
        "rollout_corr/training_ppl": torch.stack([(-a.mean()).exp() for a, _ in rows]).mean(),
        "rollout_corr/rollout_log_ppl": torch.stack([-b.mean() for _, b in rows]).mean(),
        "rollout_corr/log_ppl_diff": apart_S.mean(),
        "rollout_corr/log_ppl_abs_diff": apart_S.abs().mean(),
        "rollout_corr/ppl_ratio": apart_S.exp().mean(),
        "rollout_corr/chi2_token": (2 * (train - rollout)).exp().mean() - 1,
        "rollout_corr/chi2_seq": torch.stack([(2 * (a - b).sum()).exp() for a, b in rows]).mean() - 1,
        "training/rollout_probs_diff_mean": apart.mean(),
        "training/rollout_probs_diff_max": apart.max(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: each.item() for name, each in expected.items()}, rel=1e-4, abs=1e-5
    )
    if len(apart) > 1:
        assert found["training/rollout_probs_diff_std"] == pytest.approx(apart.std().item(), abs=1e-6)


def test_where_they_agree_nothing_is_off():
    tables = draw_tables(5)
    found = mismatch(tables, tables.logprobs_BT, tables.logprobs_BT)
    ones = {"rollout_corr/ppl_ratio"}
    absolute = {name for name in found if name.endswith(("training_ppl", "rollout_ppl", "_log_ppl"))}
    assert {name for name, each in found.items() if each != 0} == ones | absolute and found[
        "rollout_corr/ppl_ratio"
    ] == 1


def test_far_apart_stays_finite_and_no_token_is_no_metric():
    tables = draw_tables(5)
    rollout_BT = tables.logprobs_BT - 200
    mismatch(tables, tables.logprobs_BT, rollout_BT)
    thresholds = tuple("0.5_2.0" if measure.endswith("k1") else "1.0" for measure in MEASURES)
    config = CorrectionConfig(rollout_is="sequence", rollout_rs=tuple(MEASURES), rollout_rs_threshold=thresholds)
    found = correct(tables.logprobs_BT, rollout_BT, tables.mask_BT, config)
    assert all(math.isfinite(each) for each in found.metrics.values()) and not found.mask_BT.any()
    assert torch.equal(found.weights_BT, 2.0 * tables.mask_BT)
    assert mismatch_metrics(tables.logprobs_BT, tables.logprobs_BT, torch.zeros_like(tables.mask_BT)) == {}
