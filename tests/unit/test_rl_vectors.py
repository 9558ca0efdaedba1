"""Every formula of ``moesaic.rl`` beside verl's and TRL's own functions, whose results ``tools/make_vectors.py`` froze.

1e-6 of the largest number of each tensor, for values and for gradients. Where peers differ from each other or from what
is written down here (docs/rl.md), the difference itself is tested: what theirs gives, and what ours does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.config.rl_sections import AlgorithmConfig, CorrectionConfig, KlConfig
from moesaic.rl.advantages import ESTIMATORS, Advantages, compute_advantages
from moesaic.rl.aggregation import aggregation_weights, masked_sequence_mean
from moesaic.rl.corrections import correct, mismatch_metrics
from moesaic.rl.distillation import forward_kl_topk, reverse_kl_advantages
from moesaic.rl.groups import filter_groups
from moesaic.rl.kl import KlController, apply_kl_in_reward, kl_penalty
from moesaic.rl.logprobs import logprobs_at, token_entropy, token_logprobs
from moesaic.rl.losses import POLICY_LOSSES, PolicyTerms, TokenLosses, policy_loss, value_loss
from moesaic.rl.overlong import overlong_penalties
from tools.vectors import Case, Vectors, load_vectors, relative_error

FOLDER = Path(__file__).parent / "vectors"
TOLERANCE = 1e-6
VERL, TRL = load_vectors(FOLDER / "verl.safetensors"), load_vectors(FOLDER / "trl.safetensors")


def cases(vectors: Vectors, kind: str, **options: Any) -> list[Any]:
    """As parameters of a test."""
    found = [case for case in vectors.of_kind(kind).values() if options.items() <= case.options.items()]
    assert found
    return [pytest.param(case, id=case.name) for case in found]


def assert_equal(found: Tensor | float, expected: Tensor, what: str = "") -> None:
    error = relative_error(torch.as_tensor(found, dtype=torch.float64), expected.double())
    assert error <= TOLERANCE, f"{what} off by {error:.1e}: {found}, not {expected}"


def grad_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def mean(metric_BT: Tensor, mask_BT: Tensor) -> float:
    return float(metric_BT.sum(dtype=torch.float64) / mask_BT.sum())


def test_the_files_say_what_made_them() -> None:
    assert {"verl": VERL.made_by["verl"], "trl": TRL.made_by["trl"]} == {"verl": "0.9.1", "trl": "1.16.0"}
    steps = load_vectors(FOLDER / "trl_steps.safetensors")
    for vectors in (VERL, TRL, steps):
        assert {"torch", "transformers", "seed", "cpu"} <= vectors.made_by.keys()
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 500_000


def test_every_estimator_and_policy_loss_has_vectors() -> None:
    with_vectors = {case.options["adv_estimator"] for case in VERL.of_kind("advantages").values()}
    # Distillation has a kind of its own.
    assert with_vectors == ESTIMATORS.keys() - {"on_policy_distillation"}
    assert {case.options["loss_mode"] for case in VERL.of_kind("policy_loss").values()} == POLICY_LOSSES.keys()


# -- aggregation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(VERL, "agg_loss"))
def test_aggregation_is_verls(case: Case) -> None:
    weights = aggregation_weights(
        case.inputs["mask"].bool(), case.options["loss_agg_mode"], scale_factor=case.options["loss_scale_factor"]
    )
    assert_equal((case.inputs["losses"] * weights).sum(), case.outputs["loss"])
    assert_equal(weights, case.outputs["grad"])


# -- advantages --------------------------------------------------------------------------------------------------------


def advantages_of(case: Case) -> Advantages:
    return compute_advantages(
        case.options["adv_estimator"],
        token_rewards_BT=case.inputs["token_rewards"],
        mask_BT=case.inputs["mask"].bool(),
        groups_B=case.inputs["groups"],
        values_BT=case.inputs.get("values"),
        baselines_B=case.inputs.get("baselines"),
        **{name: case.options[name] for name in ("gamma", "lam") if name in case.options},
    )


WITHOUT_SINGLETONS = [each for each in cases(VERL, "advantages") if "singleton" not in each.id]
WITH_SINGLETONS = [each for each in cases(VERL, "advantages") if "singleton" in each.id]


@pytest.mark.parametrize("case", WITHOUT_SINGLETONS)
def test_advantages_are_verls(case: Case) -> None:
    """On the model's tokens; elsewhere ours are 0 and verl's GAE has what whitening makes of nothing."""
    found, mask = advantages_of(case), case.inputs["mask"]
    assert found.num_singletons == 0
    assert_equal(found.advantages_BT, case.outputs["advantages"] * mask, "advantages")
    assert_equal(found.returns_BT, case.outputs["returns"] * mask, "returns")


@pytest.mark.parametrize("case", WITH_SINGLETONS)
def test_a_group_of_one_is_0_here_and_not_in_verl(case: Case) -> None:
    """verl compares the reward of such a group with 0 (but for its vectorized RLOO); other groups are the same, except
    under whitening, which spreads it over the step."""
    found, mask, theirs = advantages_of(case), case.inputs["mask"], case.outputs["advantages"]
    sizes = torch.bincount(case.inputs["groups"])[case.inputs["groups"]]
    assert found.num_singletons == 1 and int((sizes == 1).sum()) == 1
    assert not found.advantages_BT[sizes == 1].any()
    if case.name.endswith("vectorized"):
        assert not theirs[sizes == 1].any()
    else:
        assert (theirs * mask)[sizes == 1].any()
    if case.options["adv_estimator"] != "reinforce_plus_plus_baseline":
        assert_equal(found.advantages_BT[sizes > 1], (theirs * mask)[sizes > 1])


@pytest.mark.parametrize("case", cases(TRL, "advantages"))
def test_advantages_are_trls_but_for_what_is_added_to_the_deviation(case: Case) -> None:
    """``group``: TRL adds 1e-4 to it where verl and we add 1e-6. ``batch``: one deviation for the step; not offered."""
    rewards = case.inputs["rewards"]
    groups = torch.arange(4).repeat_interleave(4)
    given = {"token_rewards_BT": rewards[:, None], "mask_BT": torch.ones(16, 1).bool(), "groups_B": groups}
    above = compute_advantages("dr_grpo", **given).advantages_BT[:, 0]
    if case.name == "none":
        assert_equal(above, case.outputs["advantages"])
    elif case.name == "group":
        deviations = rewards.view(4, 4).std(dim=1).repeat_interleave(4)
        ours = compute_advantages("grpo", **given).advantages_BT[:, 0] * (deviations + 1e-6) / (deviations + 1e-4)
        assert_equal(ours, case.outputs["advantages"])
    else:
        assert_equal(above / (rewards.std() + 1e-4), case.outputs["advantages"])


# -- policy losses -----------------------------------------------------------------------------------------------------


def algorithm_of(case: Case) -> AlgorithmConfig:
    """Our names for verl's settings: bounds of ``cispo`` and ``dppo_tv`` have fields of their own here."""
    options = case.options
    mode = options["loss_mode"]
    low, high = options.get("clip_ratio_low"), options.get("clip_ratio_high")
    if mode == "cispo":
        settings = {"cispo_ratio_min": 1 - low, "cispo_ratio_max": 1 + high}
    elif mode == "dppo_tv":
        settings = {"dppo_delta_low": low, "dppo_delta_high": high}
    elif mode == "sapo":
        settings = {"sapo_tau_pos": options["tau_pos"], "sapo_tau_neg": options["tau_neg"]}
    else:
        settings = {
            name: options[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c") if name in options
        }
    return AlgorithmConfig(loss_mode=mode, **settings)


def terms_of(case: Case, logprobs: Tensor) -> PolicyTerms:
    mask = case.inputs["mask"].bool()
    return PolicyTerms(
        logprobs=logprobs,
        old_logprobs=case.inputs["old_logprobs"],
        advantages=case.inputs["advantages"].view(len(mask), -1).expand_as(mask),
        mask=mask,
        sequence_mean=masked_sequence_mean(mask),
        rollout_weights=case.inputs.get("weights"),
    )


def aggregated(found: TokenLosses, case: Case) -> Tensor:
    weights = aggregation_weights(
        case.inputs["mask"].bool(),
        case.options["loss_agg_mode"],
        scale_factor=case.options.get("loss_scale_factor"),
    )
    return (found.losses * weights).sum()


@pytest.mark.parametrize("case", cases(VERL, "policy_loss"))
def test_policy_losses_are_verls(case: Case) -> None:
    logprobs = case.inputs["logprobs"].clone().requires_grad_()
    found = policy_loss(case.options["loss_mode"], terms_of(case, logprobs), algorithm_of(case))
    loss = aggregated(found, case)
    assert_equal(loss, case.outputs["loss"], "loss")
    assert_equal(grad_of(loss, logprobs), case.outputs["grad"], "gradient")
    for name, expected in zip(case.options["metrics"], case.outputs["metrics"], strict=True):
        # verl reports 0 for the lower clip of losses that have none, and doesn't keep GSPO's ppo_kl within 20.
        ours = mean(found.metrics[name], case.inputs["mask"]) if name in found.metrics else 0.0
        assert_equal(ours, expected.clamp(-20, 20), name)


# TRL's name of a loss: ours, and how it's summed up.
TRL_LOSSES = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "bnpo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "dapo": ("vanilla", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}


def trl_loss(case: Case, logprobs: Tensor) -> Tensor:
    """Ours, for the settings of TRL's."""
    options = case.options
    mode, aggregation = TRL_LOSSES[options["loss_type"]]
    if options["importance_sampling_level"] == "sequence":
        mode = "gspo"
    settings = {"clip_ratio_low": options["epsilon_low"], "clip_ratio_high": options["epsilon_high"]}
    if mode == "cispo":
        settings = {"cispo_ratio_min": 0.0, "cispo_ratio_max": options["epsilon_high"]}
    elif mode == "sapo":
        settings = {f"sapo_tau_{side}": options[f"sapo_temperature_{side}"] for side in ("pos", "neg")}
    algorithm = AlgorithmConfig(loss_mode=mode, clip_ratio_c=options["delta"], **settings)
    found = policy_loss(mode, terms_of(case, logprobs), algorithm)
    mask = case.inputs["mask"].bool()
    kl = kl_penalty(logprobs, case.inputs["ref_logprobs"], "k3", mask)
    losses = found.losses + options["beta"] * kl - options["entropy_coef"] * case.inputs["entropies"]
    return (losses * aggregation_weights(mask, aggregation, scale_factor=options["max_completion_length"])).sum()


@pytest.mark.parametrize("case", cases(TRL, "policy_loss"))
def test_policy_losses_are_trls(case: Case) -> None:
    logprobs = case.inputs["logprobs"].clone().requires_grad_()
    loss = trl_loss(case, logprobs)
    errors = (
        relative_error(loss, case.outputs["loss"]),
        relative_error(grad_of(loss, logprobs), case.outputs["grad"]),
    )
    if case.options["use_bias_correction_kl"]:  # TRL's default: k3 times the ratio. Not offered here
        assert max(errors) > 1e-2
    else:
        assert max(errors) <= TOLERANCE, errors


# -- KL ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(VERL, "kl_penalty"))
def test_kl_penalty_is_verls(case: Case) -> None:
    logprobs = case.inputs["logprobs"].clone().requires_grad_()
    values = kl_penalty(logprobs, case.inputs["ref_logprobs"], case.options["estimator"])
    assert_equal(values, case.outputs["values"], "values")
    assert_equal(grad_of(values.sum(), logprobs), case.outputs["grad"], "gradient")


@pytest.mark.parametrize("kind", ["adaptive", "fixed"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_reward_and_its_controller_are_verls(estimator: str, kind: str) -> None:
    """Three steps in a row: the coefficient of each follows from the one before."""
    several = [VERL.of_kind("kl_in_reward")[f"{estimator}/{kind}/{number}"] for number in range(3)]
    options = several[0].options
    target = options["target_kl"] if kind == "adaptive" else None
    config = KlConfig(use="reward", coef=options["kl_coef"], target=target, horizon=options["horizon"])
    controller = KlController(config)
    for case in several:
        assert_equal(controller.coef, case.outputs["coef"], "coefficient")
        tables = ("token_rewards", "old_logprobs", "ref_logprobs", "mask")
        found = apply_kl_in_reward(*(case.inputs[name] for name in tables), estimator=estimator, coef=controller.coef)
        assert_equal(found.token_rewards_BT, case.outputs["token_rewards"], "rewards")
        assert_equal(found.mean_kl, case.outputs["mean_kl"], "mean")
        controller.update(found.mean_kl, len(case.inputs["mask"]))
        assert_equal(controller.coef, case.outputs["next_coef"], "next coefficient")


# -- values, log-probabilities, entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(VERL, "value_loss"))
def test_value_loss_is_verls(case: Case) -> None:
    values = case.inputs["values"].clone().requires_grad_()
    found = value_loss(
        values,
        case.inputs["old_values"],
        case.inputs["returns"],
        case.inputs["mask"],
        cliprange=case.options["cliprange_value"],
    )
    loss = aggregated(found, case)
    assert_equal(loss, case.outputs["loss"], "loss")
    assert_equal(grad_of(loss, values), case.outputs["grad"], "gradient")
    assert_equal(mean(found.metrics["critic/vf_clipfrac"], case.inputs["mask"]), case.outputs["clip_fraction"])


@pytest.mark.parametrize("case", cases(VERL, "logits"))
def test_log_probabilities_and_entropies_are_verls(case: Case) -> None:
    temperature = case.options["temperature"]
    logits = case.inputs["logits"].clone().requires_grad_()
    for name, table in (
        ("logprobs", token_logprobs(logits, case.inputs["labels"], temperature=temperature)),
        ("logprobs", logprobs_at(logits, case.inputs["labels"][:, None], temperature=temperature)[:, 0]),
        ("entropies", token_entropy(logits, temperature=temperature)),
    ):
        assert_equal(table, case.outputs[name], name)
        assert_equal(grad_of((table * case.inputs["upstream"]).sum(), logits), case.outputs[f"{name}_grad"], name)


# -- corrections -------------------------------------------------------------------------------------------------------


def correction_of(options: dict[str, Any]) -> CorrectionConfig:
    """verl's settings under our names: IcePop is a mode of its own here, thresholds are a list."""
    settings: dict[str, Any] = {"rollout_is_batch_normalize": options.get("rollout_is_batch_normalize", False)}
    if "rollout_is" in options:
        threshold = options["rollout_is_threshold"]
        if isinstance(threshold, str):
            low, high = threshold.split("_")
            settings |= {"rollout_is": "icepop", "rollout_is_threshold_lower": float(low), "rollout_is_threshold": high}
            settings["rollout_is_threshold"] = float(high)
        else:
            settings |= {"rollout_is": options["rollout_is"], "rollout_is_threshold": threshold}
    if "rollout_rs" in options:
        for name in ("rollout_rs", "rollout_rs_threshold"):
            settings[name] = tuple(options[name].split(","))
    return CorrectionConfig(**settings)


# Of verl's, per measure of rejection: what can be seen from the others, or of tokens that were kept.
REJECTION_METRICS_LEFT_OUT = re.compile(
    r"rollout_rs_[a-z]+_(?:[a-z]+_)?k\d_(std|fraction_\w+|seq_(mean|std|max|min|max_deviation|fraction_\w+))$"
)


@pytest.mark.parametrize("case", cases(VERL, "correction"))
def test_corrections_are_verls(case: Case) -> None:
    tables = [case.inputs[name] for name in ("old_logprobs", "rollout_logprobs", "mask")]
    found = correct(*tables, correction_of(dict(case.options)))
    assert torch.equal(found.mask_BT, case.outputs["mask"].bool())
    if "weights" in case.outputs:
        assert found.weights_BT is not None
        assert_equal(found.weights_BT, case.outputs["weights"], "weights")
    else:
        assert found.weights_BT is None
    ours = {**mismatch_metrics(*tables), **found.metrics}
    expected = dict(zip(case.options["metrics"], case.outputs["metrics"], strict=True))
    left_out = {name for name in expected if REJECTION_METRICS_LEFT_OUT.search(name)}
    assert expected.keys() - ours.keys() == left_out
    for name in expected.keys() - left_out:
        # Of numbers below 1, to 1e-6 as they are: verl has exp(x) - 1 - x in fp32, ours doesn't lose its digits.
        assert abs(ours[name] - expected[name]) <= TOLERANCE * max(1, abs(expected[name])), name


@pytest.mark.parametrize("case", cases(VERL, "probability_differences"))
def test_differences_of_probabilities_are_verls(case: Case) -> None:
    found = mismatch_metrics(*(case.inputs[name] for name in ("old_logprobs", "rollout_logprobs", "mask")))
    expected = dict(zip(case.options["metrics"], case.outputs["metrics"], strict=True))
    left_out = {"training/rollout_actor_probs_pearson_corr", "training/rollout_probs_diff_valid"}
    assert expected.keys() - found.keys() == left_out
    for name in expected.keys() - left_out:
        assert_equal(found[name], expected[name], name)


@pytest.mark.parametrize("case", cases(TRL, "correction"))
def test_corrections_are_trls(case: Case) -> None:
    """TRL zeroes weights where we also take the token out of what the loss is divided by (IcePop keeps it in)."""
    largest = case.options["clip_max"]
    settings: dict[str, Any] = {
        "token_truncate": {"rollout_is": "token"},
        "sequence_truncate": {"rollout_is": "sequence"},
        "token_mask": {"rollout_is": "icepop", "rollout_is_threshold_lower": 0.0},
        "sequence_mask": {
            "rollout_is": "sequence",
            "rollout_rs": ("seq_sum_k1",),
            # Of pi_rollout / pi_train: its inverse is at most ``largest``.
            "rollout_rs_threshold": (f"{1 / largest}_1e30",),
        },
    }[case.options["mode"]]
    tables = [case.inputs[name] for name in ("old_logprobs", "rollout_logprobs", "mask")]
    found = correct(*tables, CorrectionConfig(rollout_is_threshold=largest, **settings))
    assert found.weights_BT is not None
    assert_equal(found.weights_BT * found.mask_BT, case.outputs["weights"] * case.inputs["mask"])


# -- distillation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(VERL, "forward_kl_topk"))
def test_forward_kl_is_verls(case: Case) -> None:
    logits, mask = case.inputs["logits"].clone().requires_grad_(), case.inputs["mask"]
    student = logprobs_at(logits, case.inputs["teacher_ids"])
    clamp = case.options["loss_max_clamp"]
    found = forward_kl_topk(student, case.inputs["teacher_logprobs"], mask, clamp=clamp)
    assert_equal(found.losses, case.outputs["losses"].clamp(min=0, max=clamp) * mask, "losses")
    for name in ("student_mass", "teacher_mass"):
        assert_equal(found.metrics[f"distillation/{name}"], case.outputs[name] * mask, name)
    loss = aggregated(found, case)
    assert_equal(loss, case.outputs["loss"], "loss")
    assert_equal(grad_of(loss, logits), case.outputs["grad"], "gradient")


@pytest.mark.parametrize("case", cases(VERL, "reverse_kl"))
def test_distillation_by_policy_gradient_is_verls(case: Case) -> None:
    """On policy, where verl's advantages (of each update's log-probabilities) are ours (of the step's old ones)."""
    student, teacher, mask = (case.inputs[name] for name in ("student_logprobs", "teacher_logprobs", "mask"))
    rewards = reverse_kl_advantages(student, teacher, mask, clamp=case.options["loss_max_clamp"])
    advantages = compute_advantages(
        "on_policy_distillation", token_rewards_BT=rewards, mask_BT=mask.bool(), groups_B=torch.arange(len(mask))
    ).advantages_BT
    given = student.clone().requires_grad_()
    terms = PolicyTerms(
        logprobs=given,
        old_logprobs=student,
        advantages=advantages,
        mask=mask.bool(),
        sequence_mean=masked_sequence_mean(mask),
    )
    loss = aggregated(policy_loss("vanilla", terms, AlgorithmConfig()), case)
    assert_equal(loss, case.outputs["loss"], "loss")
    assert_equal(grad_of(loss, given), case.outputs["grad"], "gradient")


# -- DAPO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*cases(VERL, "overlong"), *cases(TRL, "overlong")])
def test_overlong_penalties_are_verls_and_trls(case: Case) -> None:
    options = case.options
    found = overlong_penalties(
        case.inputs["lengths"],
        max_tokens=options.get("max_resp_len", options.get("max_completion_len")),
        buffer_len=options.get("len", options.get("soft_punish_cache")),
        factor=options.get("penalty_factor", 1.0),
    )
    assert_equal(found, case.outputs["penalties"])


@pytest.mark.parametrize("case", cases(VERL, "filter_groups"))
def test_groups_are_filtered_as_in_verl(case: Case) -> None:
    found = filter_groups(case.inputs["rewards"], case.inputs["groups"])
    assert torch.equal(found, case.outputs["kept"])
    assert found.any() and not found.all()


# -- updates -----------------------------------------------------------------------------------------------------------


Loss = Callable[[Tensor, Case], Tensor]


def updates_of(case: Case, loss_of: Loss) -> tuple[Tensor, Tensor]:
    """Losses of all updates and the last weights, of the one matrix that ``tools/verl_updates.py`` trains.

    ``loss_of`` takes ``features @ weights`` [B, T, V] of a mini-batch, and the mini-batch.
    """
    options, inputs = case.options, case.inputs
    weights = inputs["weights"].clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=options["learning_rate"], momentum=options["momentum"])
    losses = []
    for _ in range(options["ppo_epochs"]):
        for rows in torch.arange(len(inputs["mask"])).split(options["mini_batch_size"]):
            batch = {name: table[rows] for name, table in inputs.items() if name not in ("weights", "rollout_weights")}
            if "rollout_weights" in inputs:
                batch["weights"] = inputs["rollout_weights"][rows]
            loss = loss_of(batch["features"] @ weights, Case(kind="", name="", options=options, inputs=batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert len(losses) == 4
    return torch.stack(losses), weights.detach()


def loss_of_policy(logits: Tensor, mini: Case) -> Tensor:
    """With verl's defaults for what the case doesn't set."""
    options, batch = mini.options, mini.inputs
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, **options}
    logprobs = token_logprobs(logits, batch["tokens"])
    algorithm = algorithm_of(replace(mini, options=settings))
    loss = aggregated(policy_loss(options["loss_mode"], terms_of(mini, logprobs), algorithm), mini)
    of_tokens = aggregation_weights(
        batch["mask"].bool(), options["loss_agg_mode"], scale_factor=options.get("loss_scale_factor")
    )
    if options.get("use_kl_loss"):
        kl = kl_penalty(logprobs, batch["ref_logprobs"], options["kl_loss_type"], batch["mask"])
        loss = loss + options["kl_loss_coef"] * (kl * of_tokens).sum()
    return loss - options.get("entropy_coeff", 0.0) * (token_entropy(logits) * of_tokens).sum()


def loss_of_values(logits: Tensor, mini: Case) -> Tensor:
    values, old_values, returns = logits[..., 0], mini.inputs["old_values"], mini.inputs["returns"]
    found = value_loss(values, old_values, returns, mini.inputs["mask"], cliprange=mini.options["cliprange_value"])
    return aggregated(found, mini)


@pytest.mark.parametrize("case", [*cases(VERL, "updates"), *cases(VERL, "value_updates")])
def test_two_epochs_of_two_mini_batches_are_verls(case: Case) -> None:
    losses, weights = updates_of(case, loss_of_policy if case.kind == "updates" else loss_of_values)
    assert_equal(losses, case.outputs["losses"], "losses")
    assert_equal(weights, case.outputs["weights"], "weights")


def test_every_policy_loss_has_updates() -> None:
    assert {case.options["loss_mode"] for case in VERL.of_kind("updates").values()} == POLICY_LOSSES.keys()
