"""verl's own functions, asked about one step: aggregation, advantages, policy losses, KL, values, entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from tools.vectors import Case, Draw
from tools.verl_inputs import GROUPS_WITH_SINGLETON, SEED, Step

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
SCALE_FACTOR = 16
# Per loss: which settings, and how its token losses are summed up.
POLICY_LOSSES: dict[str, list[tuple[dict[str, float], tuple[str, ...]]]] = {
    "vanilla": [
        ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}, AGGREGATIONS),
        ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}, ("token-mean",)),
        ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.3}, ("seq-mean-token-mean",)),
    ],
    "gspo": [
        ({"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}, ("seq-mean-token-mean", "token-mean")),
        ({"clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004}, ("seq-mean-token-mean",)),
    ],
    "cispo": [({"clip_ratio_low": 0.3, "clip_ratio_high": 0.25}, ("token-mean", "seq-mean-token-mean"))],
    "gpg": [({}, ("token-mean", "seq-mean-token-sum"))],
    # verl sums this one up by seq-mean-token-mean, whatever it is asked for.
    "sapo": [
        ({"tau_pos": 1.0, "tau_neg": 1.05}, ("seq-mean-token-mean",)),
        ({"tau_pos": 0.7, "tau_neg": 2.0}, ("seq-mean-token-mean",)),
    ],
    "dppo_tv": [({"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 20.0}, ("token-mean", "token-sum"))],
}


def actor_config(**settings: Any) -> ActorConfig:
    """verl's actor with these settings and nothing of a machine."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)


def grad_of(loss: Tensor, leaf: Tensor) -> Tensor:
    """The gradient, zeros where there is none."""
    return torch.autograd.grad(loss, leaf)[0]


def aggregation_cases(step: Step) -> Iterator[Case]:
    """``agg_loss``, with counts of its own, and with a row that is masked throughout."""
    masks = {"uneven": step.mask, "with-an-empty-row": step.mask * (torch.arange(len(step.mask)) != 5)[:, None]}
    for label, mask in masks.items():
        for mode in AGGREGATIONS:
            scale = SCALE_FACTOR if mode.endswith("-norm") else None
            losses = step.advantages.clone().requires_grad_()
            loss = core_algos.agg_loss(losses, mask, mode, loss_scale_factor=scale)
            yield Case(
                kind="agg_loss",
                name=f"{mode}/{label}",
                options={"loss_agg_mode": mode, "loss_scale_factor": scale},
                inputs={"losses": step.advantages, "mask": mask},
                outputs={"loss": loss.detach(), "grad": grad_of(loss, losses)},
            )


def advantage_cases(step: Step) -> Iterator[Case]:
    """Every estimator, of outcomes and of rewards on each token; those of groups also with a group of one."""
    for discounts in ({"gamma": 1.0, "lam": 1.0}, {"gamma": 0.9, "lam": 0.8}):
        for rewards in ("token_rewards", "dense_rewards"):
            given = getattr(step, rewards)
            label = f"{rewards}/gamma-{discounts['gamma']}"
            found = core_algos.compute_gae_advantage_return(given, step.values, step.mask, **discounts)
            inputs = {"token_rewards": given, "mask": step.mask, "groups": step.groups}
            yield advantage_case("gae", label, discounts, {**inputs, "values": step.values}, found)
            config = AlgoConfig(gamma=discounts["gamma"])
            found = core_algos.compute_reinforce_plus_plus_outcome_advantage(given, step.mask, config)
            yield advantage_case("reinforce_plus_plus", label, discounts, inputs, found)
    for rewards in ("token_rewards", "dense_rewards"):
        given = getattr(step, rewards)
        found = core_algos.compute_remax_outcome_advantage(given, step.baselines, step.mask)
        inputs = {"token_rewards": given, "mask": step.mask, "groups": step.groups, "baselines": step.baselines}
        yield advantage_case("remax", rewards, {}, inputs, found)
    grpo = core_algos.compute_grpo_outcome_advantage
    of_groups: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]] = {
        "grpo": (grpo, {"norm_adv_by_std_in_grpo": True}),
        "dr_grpo": (grpo, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (core_algos.compute_rloo_outcome_advantage, {}),
        "opo": (core_algos.compute_opo_outcome_advantage, {}),
        "reinforce_plus_plus_baseline": (core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage, {}),
    }
    for label, groups in {"groups": step.groups, "singleton": torch.tensor(GROUPS_WITH_SINGLETON)}.items():
        for estimator, (function, options) in of_groups.items():
            found = function(step.token_rewards.clone(), step.mask, index=groups.tolist(), **options)
            inputs = {"token_rewards": step.token_rewards, "mask": step.mask, "groups": groups}
            yield advantage_case(estimator, label, {}, inputs, found)
    found = core_algos.compute_rloo_vectorized_outcome_advantage(
        step.token_rewards.clone(), step.mask, index=torch.tensor(GROUPS_WITH_SINGLETON)
    )
    groups = torch.tensor(GROUPS_WITH_SINGLETON)
    inputs = {"token_rewards": step.token_rewards, "mask": step.mask, "groups": groups}
    yield advantage_case("rloo", "singleton-vectorized", {}, inputs, found)


def advantage_case(
    estimator: str, label: str, options: dict[str, Any], inputs: dict[str, Tensor], found: tuple[Tensor, Tensor]
) -> Case:
    """One estimator's advantages and returns."""
    return Case(
        kind="advantages",
        name=f"{estimator}/{label}",
        options={"adv_estimator": estimator, **options},
        inputs=inputs,
        outputs={"advantages": found[0], "returns": found[1]},
    )


def policy_loss_cases(step: Step) -> Iterator[Case]:
    """Every policy loss: the aggregated loss, its gradient by the log-probabilities, and verl's metrics."""
    ordinary = {
        "logprobs": step.logprobs,
        "old_logprobs": step.old_logprobs,
        "advantages": step.advantages,
        "mask": step.mask,
    }
    for mode, variants in POLICY_LOSSES.items():
        for number, (settings, aggregations) in enumerate(variants):
            for aggregation in aggregations:
                label = f"{mode}/{number}/{aggregation}"
                yield policy_loss_case(label, mode, settings, aggregation, ordinary)
            yield policy_loss_case(f"{label}/weighted", mode, settings, aggregation, ordinary, step.weights)
        # Of one row each, so that what is far off is compared by its own size.
        for label, distance in {"far-up": 25.0, "far-down": -25.0}.items():
            inputs = {name: table[1:2] for name, table in ordinary.items()}
            # Old ones of -26, new ones of -1, or the other way round.
            old = torch.full_like(inputs["logprobs"], -26.0 if distance > 0 else -1.0)
            inputs |= {"old_logprobs": old, "logprobs": old + distance}
            yield policy_loss_case(f"{mode}/{label}", mode, variants[0][0], variants[0][1][0], inputs)
    one_of_a_row = {**ordinary, "advantages": step.sequence_advantages}
    yield policy_loss_case("gspo/one-advantage", "gspo", POLICY_LOSSES["gspo"][0][0], "token-mean", one_of_a_row)


def policy_loss_case(
    label: str,
    mode: str,
    settings: dict[str, float],
    aggregation: str,
    inputs: dict[str, Tensor],
    weights: Tensor | None = None,
) -> Case:
    """One call of verl's loss."""
    config = actor_config(**settings)
    scale = SCALE_FACTOR if aggregation.endswith("-norm") else None
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=inputs["old_logprobs"],
        log_prob=logprobs,
        advantages=inputs["advantages"],
        response_mask=inputs["mask"],
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    return Case(
        kind="policy_loss",
        name=label,
        options={
            "loss_mode": mode,
            "loss_agg_mode": aggregation,
            "loss_scale_factor": scale,
            "metrics": sorted(metrics),
            **settings,
        },
        inputs={**inputs, **({} if weights is None else {"weights": weights})},
        outputs={"loss": loss.detach(), "grad": grad_of(loss, logprobs), "metrics": metric_values(metrics)},
    )


def metric_values(metrics: dict[str, Any]) -> Tensor:
    """fp64, in the order of the sorted names."""
    return torch.tensor([float(metrics[name]) for name in sorted(metrics)], dtype=torch.float64)


def kl_cases(step: Step) -> Iterator[Case]:
    """Values and gradients of the estimators; near, and where verl cuts the exponent or the value."""
    near = {"logprobs": step.logprobs, "ref_logprobs": step.ref_logprobs}
    far = torch.tensor([[-0.5, -1.0, -3.5, -13.0, -30.0, -1.0, -1.0]])
    pairs = {"near": near, "far": {"logprobs": far, "ref_logprobs": far.flip(-1)}}
    for label, inputs in pairs.items():
        for estimator in ("k1", "k2", "k3", "k3+"):
            logprobs = inputs["logprobs"].clone().requires_grad_()
            values = core_algos.kl_penalty(logprobs, inputs["ref_logprobs"], estimator)
            yield Case(
                kind="kl_penalty",
                name=f"{estimator}/{label}",
                options={"estimator": estimator},
                inputs=inputs,
                outputs={"values": values.detach(), "grad": grad_of(values.sum(), logprobs)},
            )


def value_loss_cases(step: Step) -> Iterator[Case]:
    """Half of the larger of two squares, aggregated."""
    draw = Draw(SEED + 1)
    values = step.values + draw.numbers(*step.values.shape, low=-1, high=1)
    for cliprange in (0.5, 0.1):
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            given = values.clone().requires_grad_()
            loss, clip_fraction = core_algos.compute_value_loss(
                given, step.dense_rewards, step.values, step.mask, cliprange, aggregation
            )
            yield Case(
                kind="value_loss",
                name=f"{aggregation}/{cliprange}",
                options={"cliprange_value": cliprange, "loss_agg_mode": aggregation},
                inputs={
                    "values": values,
                    "old_values": step.values,
                    "returns": step.dense_rewards,
                    "mask": step.mask,
                },
                outputs={"loss": loss.detach(), "grad": grad_of(loss, given), "clip_fraction": clip_fraction},
            )


def logits_cases() -> Iterator[Case]:
    """Log-probabilities of labels and entropies, and their gradients by the logits."""
    draw = Draw(SEED + 2)
    logits, labels = draw.numbers(9, 12, low=-3, high=3), draw.integers(9, high=12)
    upstream = draw.numbers(9, low=-1, high=1)
    for temperature in (1.0, 0.7):
        given = logits.clone().requires_grad_()
        logprobs = verl_functional.logprobs_from_logits(given / temperature, labels)
        entropies = verl_functional.entropy_from_logits(given / temperature)
        yield Case(
            kind="logits",
            name=f"temperature-{temperature}",
            options={"temperature": temperature},
            inputs={"logits": logits, "labels": labels, "upstream": upstream},
            outputs={
                "logprobs": logprobs.detach(),
                "logprobs_grad": grad_of((logprobs * upstream).sum(), given),
                "entropies": entropies.detach(),
                "entropies_grad": grad_of((entropies * upstream).sum(), given),
            },
        )
