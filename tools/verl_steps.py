"""verl's own functions for what surrounds the losses: corrections, KL in the reward, distillation, DAPO, updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.protocol import DataProto
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.distillation.losses import distillation_loss
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.trainer.ppo.v1 import replay_buffer
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import DistillationConfig, DistillationLossConfig

from tools.vectors import Case, Draw, rounded
from tools.verl_formulas import actor_config, grad_of, metric_values
from tools.verl_inputs import LENGTHS, NUM_TOKENS, SEED, Step

PROMPT_LENGTH = 2
VOCABULARY = 12
TOPK = 4
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.5},
    "token-normalized": {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.2},
    "sequence-normalized": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.2,
        "rollout_is_batch_normalize": True,
    },
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.75_1.5"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.75_1.5"},
    "token_k1-one-bound": {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.5"},
    "token_k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.125"},
    "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.125"},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2"},
    "seq_sum_k2": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": "0.4"},
    "seq_sum_k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "0.4"},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"},
    "seq_mean_k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "0.1"},
    "seq_mean_k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.1"},
    "seq_max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.2"},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "0.2"},
    "several": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.6_1.6,0.12",
    },
}


def correction_cases(step: Step) -> Iterator[Case]:
    """Weights, masks and metrics; the mismatch metrics are in each of them."""
    inputs = {"old_logprobs": step.old_logprobs, "rollout_logprobs": step.rollout_logprobs, "mask": step.mask}
    for name, options in CORRECTIONS.items():
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=step.old_logprobs,
            rollout_log_prob=step.rollout_logprobs,
            response_mask=step.mask,
            **options,
        )
        outputs = {"mask": mask, "metrics": metric_values(metrics)}
        if weights is not None:
            outputs["weights"] = weights.batch["rollout_is_weights"]
        yield Case(
            kind="correction",
            name=name,
            options={**options, "metrics": sorted(metrics)},
            inputs=inputs,
            outputs=outputs,
        )
    batch = DataProto.from_dict(
        {
            "rollout_log_probs": step.rollout_logprobs,
            "old_log_probs": step.old_logprobs,
            "response_mask": step.mask,
            "responses": step.mask,
        }
    )
    metrics = calculate_debug_metrics(batch)
    yield Case(
        kind="probability_differences",
        name="step",
        options={"metrics": sorted(metrics)},
        inputs=inputs,
        outputs={"metrics": metric_values(metrics)},
    )


def kl_in_reward_cases(step: Step) -> Iterator[Case]:
    """Three steps in a row with one controller, and each step's rewards."""
    draw = Draw(SEED + 3)
    settings = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.25, "horizon": 40}
    for estimator in ("k1", "k2", "k3"):
        for kind in ("adaptive", "fixed"):
            controller = core_algos.get_kl_controller(OmegaConf.create({**settings, "type": kind}))
            for number in range(3):
                ref_logprobs = step.ref_logprobs + draw.numbers(*step.mask.shape, low=-0.75, high=0)
                batch = DataProto.from_dict(
                    {
                        "response_mask": step.mask,
                        "token_level_scores": step.token_rewards,
                        "old_log_probs": step.old_logprobs,
                        "ref_log_prob": ref_logprobs,
                    }
                )
                batch, metrics = apply_kl_penalty(batch, controller, estimator)
                yield Case(
                    kind="kl_in_reward",
                    name=f"{estimator}/{kind}/{number}",
                    options={**settings, "type": kind, "estimator": estimator},
                    inputs={
                        "token_rewards": step.token_rewards,
                        "old_logprobs": step.old_logprobs,
                        "ref_logprobs": ref_logprobs,
                        "mask": step.mask,
                    },
                    outputs={
                        "token_rewards": batch.batch["token_level_rewards"],
                        "mean_kl": torch.tensor(metrics["actor/reward_kl_penalty"], dtype=torch.float64),
                        "coef": torch.tensor(metrics["actor/reward_kl_penalty_coeff"], dtype=torch.float64),
                        "next_coef": torch.tensor(float(controller.value), dtype=torch.float64),
                    },
                )


def distillation_cases(step: Step) -> Iterator[Case]:
    """Both forms, with and without a bound on what a token counts."""
    draw = Draw(SEED + 4)
    config = actor_config(loss_agg_mode="token-mean")
    logits = draw.numbers(len(LENGTHS), NUM_TOKENS, VOCABULARY, low=-4, high=4)
    teacher = torch.log_softmax(draw.numbers(len(LENGTHS), NUM_TOKENS, VOCABULARY, low=-4, high=4), dim=-1)
    teacher_logprobs, teacher_ids = rounded(teacher).topk(TOPK, dim=-1)
    # One where the student has more of the teacher's tokens' mass than the teacher: the sum is below 0 there.
    logits[1, 0] = torch.zeros(VOCABULARY).index_fill(0, teacher_ids[1, 0], 4.0)
    batch = no_padding(step, {})
    for label, clamp in {"free": None, "clamped": 0.25}.items():
        settings = DistillationConfig(
            distillation_loss=DistillationLossConfig(
                loss_mode="forward_kl_topk",
                topk=TOPK,
                use_policy_gradient=False,
                loss_max_clamp=clamp,
                log_prob_min_clamp=None,
            )
        )
        given = logits.clone().requires_grad_()
        found = compute_forward_kl_topk(
            given.reshape(1, -1, VOCABULARY), as_nested(teacher_logprobs), as_nested(teacher_ids), settings, "thd"
        )
        outputs = {name: on_responses(table.reshape(step.mask.shape)) for name, table in found.items()}
        loss, _ = distillation_loss(config, settings, outputs, batch)
        yield Case(
            kind="forward_kl_topk",
            name=label,
            options={"loss_max_clamp": clamp, "loss_agg_mode": "token-mean"},
            inputs={
                "logits": logits,
                "teacher_logprobs": teacher_logprobs,
                "teacher_ids": teacher_ids,
                "mask": step.mask,
            },
            outputs={
                "losses": found["distillation_losses"].detach().reshape(step.mask.shape),
                "student_mass": found["student_mass"].detach().reshape(step.mask.shape),
                "teacher_mass": found["teacher_mass"].reshape(step.mask.shape),
                "loss": loss.detach(),
                "grad": grad_of(loss, given),
            },
        )
    for label, clamp in {"free": None, "clamped": 0.25}.items():
        settings = DistillationConfig(
            distillation_loss=DistillationLossConfig(loss_mode="k1", loss_max_clamp=clamp, clip_ratio=0.2)
        )
        # On policy: the student's log-probabilities are the old ones.
        given = step.old_logprobs.clone().requires_grad_()
        teacher = torch.nested.nested_tensor_from_jagged(on_responses(step.ref_logprobs)[:, None], row_ends())
        batch = no_padding(step, {"old_log_probs": step.old_logprobs, "teacher_logprobs": teacher})
        loss, _ = distillation_loss(config, settings, {"log_probs": on_responses(given)}, batch)
        yield Case(
            kind="reverse_kl",
            name=label,
            options={"loss_max_clamp": clamp, "loss_agg_mode": "token-mean", "clip_ratio": 0.2},
            inputs={
                "student_logprobs": step.old_logprobs,
                "teacher_logprobs": step.ref_logprobs,
                "mask": step.mask,
            },
            outputs={"loss": loss.detach(), "grad": grad_of(loss, given)},
        )


def as_nested(table: Tensor) -> Tensor:
    """A jagged tensor of rows that are all whole."""
    return torch.nested.as_nested_tensor(list(table), layout=torch.jagged)


def row_ends() -> Tensor:
    """Where each row of ``on_responses`` begins, and the end."""
    return torch.tensor([0, *(PROMPT_LENGTH + length for length in LENGTHS)]).cumsum(0)


def on_responses(table: Tensor) -> Tensor:
    """[total tokens]: where verl's model has its output, one place before the token it is about, without padding."""
    rows = []
    for row, length in zip(table, LENGTHS, strict=True):
        rows += [table.new_zeros(PROMPT_LENGTH - 1), row[:length], table.new_zeros(1)]
    return torch.cat(rows)


def no_padding(step: Step, tables: dict[str, Tensor]) -> Any:
    """What verl's losses read of a micro-batch that is the whole step."""
    prompts = torch.ones(len(LENGTHS), PROMPT_LENGTH, dtype=torch.long)
    batch = TensorDict(
        {
            "prompts": prompts,
            "responses": step.mask,
            "attention_mask": torch.cat([prompts, step.attention], dim=1),
            "response_mask": step.mask,
            **tables,
        },
        batch_size=len(LENGTHS),
    )
    assign_non_tensor(batch, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    return batch


def overlong_cases() -> Iterator[Case]:
    """What DAPO's reward manager takes off a score of 0."""
    lengths = torch.tensor([1, 8, 11, 12, 13, 14, 15, 16])
    for factor in (1.0, 0.5):
        buffer = {"enable": True, "len": 4, "penalty_factor": factor, "log": False}
        config = OmegaConf.create({"reward": {"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": 16}}})
        penalties = asyncio.run(overlong_penalties(config, lengths))
        yield Case(
            kind="overlong",
            name=f"factor-{factor}",
            options={"max_resp_len": 16, **buffer},
            inputs={"lengths": lengths},
            outputs={"penalties": penalties},
        )


async def overlong_penalties(config: Any, lengths: Tensor) -> Tensor:
    """Of completions of these lengths, by the reward manager."""
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    manager = DAPORewardManager(config, tokenizer, lambda **_: 0.0)
    rewards = []
    for length in lengths.tolist():
        attention = torch.cat([torch.ones(length), torch.zeros(16 - length)]).long()[None]
        batch = DataProto.from_dict(
            {"responses": torch.ones(1, 16, dtype=torch.long), "attention_mask": attention},
            {"data_source": ["none"], "reward_model": [{"ground_truth": ""}]},
        )
        rewards.append(float((await manager.run_single(batch))["reward_score"]))
    return torch.tensor(rewards)


def filter_cases(step: Step) -> Iterator[Case]:
    """Which groups the replay buffer would leave out: its own decision, with the rewards handed to it."""
    groups = step.groups
    keys = [f"{group}_{row}" for row, group in enumerate(groups.tolist())]
    buffer = SimpleNamespace(
        filter_groups_metric=replay_buffer.FILTER_GROUPS_REWARD_METRIC,
        finished_keys={"train": {str(group) for group in groups.tolist()}},
        partitions={"train": keys},
        _dapo_classification_cache={"train": {}},
    )
    with patch.object(replay_buffer.tq, "kv_batch_get", lambda **_: {"rm_scores": list(step.token_rewards)}):
        dropped, _ = replay_buffer.ReplayBuffer._dapo_filtered_keys(buffer, "train")
    assert isinstance(_, Counter)
    kept = torch.tensor([str(group) not in dropped for group in groups.tolist()])
    yield Case(
        kind="filter_groups",
        name="reward",
        inputs={"rewards": step.rewards, "groups": groups},
        outputs={"kept": kept},
    )


def data_metric_cases(step: Step) -> Iterator[Case]:
    """verl's metrics of a step's rewards, advantages, values and lengths."""
    prompts = torch.ones(len(LENGTHS), PROMPT_LENGTH, dtype=torch.long)
    tables = {"advantages": step.advantages, "returns": step.dense_rewards, "values": step.values}
    batch = DataProto.from_dict(
        {
            "token_level_scores": step.token_rewards,
            "token_level_rewards": step.dense_rewards,
            "prompts": prompts,
            "responses": step.mask,
            "attention_mask": torch.cat([prompts, step.attention], dim=1),
            "response_mask": step.mask,
            **tables,
        }
    )
    metrics = {name: value for name, value in compute_data_metrics(batch, use_critic=True).items()}
    yield Case(
        kind="data_metrics",
        name="step",
        options={"metrics": sorted(metrics)},
        inputs={"mask": step.mask, "token_rewards": step.token_rewards, **tables},
        outputs={"metrics": metric_values(metrics)},
    )
