"""The reference of every cell of reinforcement learning: plain transformers, one process, one trajectory at a time.

Its numbers are put into whole [B, T] tables, and the loss is computed on these: log-probabilities, entropies and
distillation by a log_softmax of its own, formulas by those of ``moesaic.rl`` in their [B, T] form, whose own judges are
the unit tests and the frozen vectors of other libraries.

Shape suffixes: B trajectories, T tokens after the prompt of the longest of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from moesaic.config.recipe import Recipe
from moesaic.config.rl_sections import (
    AlgorithmConfig,
    CriticConfig,
    DistillationConfig,
    KlConfig,
    KlEstimator,
    LossAggMode,
    LossMode,
    RolloutConfig,
    SamplingConfig,
)
from moesaic.rl.aggregation import aggregation_weights, masked_sequence_mean
from moesaic.rl.batches import mini_batches
from moesaic.rl.forward import TopK
from moesaic.rl.kl import kl_penalty
from moesaic.rl.losses import PolicyTerms, policy_loss, value_loss
from moesaic.rl.types import Experience, Prompt, Trajectory
from tests.oracle.reference import MIN_ROUTE_GAP, OPTIMIZERS, _RouteGap

K = 5
MAX_NORM = 1.0
# Completions of each prompt: seven trajectories, which no number of ranks divides, the last of a group of its own.
GROUP_SIZES = (3, 3, 1)
# How each optimizer's updates are made of the rollout: the same trajectories twice; groups in two mini-batches.
SCHEDULES: dict[str, dict[str, int]] = {"sgd": {"ppo_epochs": 2}, "adamw": {"ppo_mini_batch_size": 2}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RlCase:
    """What is trained: the actor by one triple of formulas, or the critic.

    Attributes:
        has_weights: tokens have weights of their own, of the rollout correction.
        distillation: the loss over a teacher's likeliest tokens, alone or beside the policy loss.
        optimizer: whose weights after two updates are compared.
    """

    role: Literal["actor", "critic"] = "actor"
    loss_mode: LossMode = "vanilla"
    agg: LossAggMode = "token-mean"
    kl: KlEstimator | None = None
    entropy_coeff: float = 0.0
    has_weights: bool = False
    distillation: Literal["off", "alone", "beside"] = "off"
    temperature: float = 0.9
    optimizer: Literal["sgd", "adamw"] = "sgd"

    def recipe(self, folder: Path, **fields: Any) -> Recipe:
        """``fields``: the recipe's, and the algorithm's."""
        bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08} if self.loss_mode == "gspo" else {}
        algorithm = bounds | {name: fields.pop(name) for name in (*fields,) if name in AlgorithmConfig.model_fields}
        return Recipe(
            model=str(folder),
            stage="rl",
            train_dataset=(),
            bf16=False,
            algorithm=AlgorithmConfig(
                loss_mode=self.loss_mode,
                loss_agg_mode=self.agg,
                loss_scale_factor=12.0,
                entropy_coeff=self.entropy_coeff,
                # Near enough that each is met: the noise of the old log-probabilities is 0.3.
                clip_ratio_c=1.5,
                cispo_ratio_min=0.8,
                cispo_ratio_max=1.2,
                dppo_delta_low=0.002,
                dppo_delta_high=0.002,
                **algorithm,
            ),
            kl_config=KlConfig() if self.kl is None else KlConfig(use="loss", estimator=self.kl, coef=0.2),
            distillation_config=DistillationConfig()
            if self.distillation == "off"
            else DistillationConfig(
                mode="forward_kl_topk", topk=K, coef=0.5, use_task_rewards=self.distillation == "beside"
            ),
            rollout=RolloutConfig(sampling=SamplingConfig(temperature=self.temperature)),
            critic=CriticConfig(cliprange_value=0.2),
            **fields,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RlReference:
    """A case's data, and what one process computed of them.

    Attributes:
        folder: the checkpoint.
        mask_BT: tokens that are trained on.
        columns: of the model as it is loaded: ``logprobs``, ``raw_logprobs``, ``entropy``; of a critic ``values``.
        metrics: of one update over all trajectories, with what their rounding is relative to: the sum of the sizes of
            what they sum up.
        grads, norm: of that update.
        weights: after two updates (``SCHEDULES``).
    """

    folder: Path
    case: RlCase
    experience: Experience
    mask_BT: Tensor
    topk: TopK | None
    columns: dict[str, Tensor]
    metrics: dict[str, tuple[float, float]]
    grads: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def save_critic(folder: Path, target: Path) -> Path:
    """A sequence classifier of one label with the causal model's weights, and a head with weights."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.score.weight.copy_(0.1 * torch.randn(model.score.weight.shape, generator=generator))
    model.save_pretrained(target)
    return target


def load_plain(case: RlCase, folder: Path) -> PreTrainedModel:
    auto = AutoModelForCausalLM if case.role == "actor" else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def compute_reference(case: RlCase, folder: Path) -> RlReference:
    """With the first data whose routes are all decided, at each of the weights on the way."""
    model = load_plain(case, folder)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    for seed in range(100):
        _restore(model, start)
        with _RouteGap() as gap:
            reference = _compute(case, folder, model, start, seed)
        if gap.smallest >= MIN_ROUTE_GAP:
            return reference
    raise AssertionError(f"{case}: no data keeps every route gap above {MIN_ROUTE_GAP}")


def _compute(case: RlCase, folder: Path, model: PreTrainedModel, start: dict[str, Tensor], seed: int) -> RlReference:
    experience, mask_BT = draw_experience(seed)
    with torch.no_grad():
        columns = read_columns(case, model, experience)
        topk = None if case.distillation == "off" else _draw_topk(model, experience, seed)
    experience = experience.with_columns(**_draw_columns(case, columns, mask_BT, seed))
    rows = tuple(range(len(experience.trajectories)))
    loss, metrics = loss_and_metrics(case, model, experience, mask_BT, topk, rows)
    loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    norm = torch.cat([grad.flatten().double() for grad in grads.values()]).norm().item()
    _restore(model, start)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for numbers in updates_of(case, folder, experience):
        optimizer.zero_grad()
        loss_and_metrics(case, model, experience, mask_BT, topk, numbers)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return RlReference(
        folder=folder,
        case=case,
        experience=experience,
        mask_BT=mask_BT,
        topk=topk,
        columns=columns,
        metrics=metrics,
        grads=grads,
        norm=norm,
        weights={name: param.detach().clone() for name, param in model.named_parameters()},
    )


def _restore(model: PreTrainedModel, start: dict[str, Tensor]) -> None:
    model.zero_grad()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(start[name])


def updates_of(case: RlCase, folder: Path, experience: Experience) -> Iterator[tuple[int, ...]]:
    """The trajectories of each update."""
    recipe = case.recipe(folder, **SCHEDULES[case.optimizer])
    for _ in range(recipe.algorithm.ppo_epochs):
        yield from mini_batches(experience, recipe.algorithm.ppo_mini_batch_size)


def draw_experience(seed: int) -> tuple[Experience, Tensor]:
    """Seven trajectories, prompts of 1 to 5 tokens: answers of 1 to 11, one of a single token, one with an
    environment's tokens amid the model's; and the mask: one trajectory is rejected, and of another some tokens."""
    stream = random.Random(seed)
    trajectories = []
    for group, size in enumerate(GROUP_SIZES):
        prompt = Prompt(
            number=group, tokens=tuple(stream.randrange(96) for _ in range(stream.randint(1, 5))), text="", row={}
        )
        for index in range(size):
            number = len(trajectories)
            length = {1: 9, 4: 1}.get(number, stream.randint(2, 11))
            is_model = [number != 1 or t not in (3, 4, 5) for t in range(length)]
            trajectories.append(
                Trajectory(
                    prompt=prompt,
                    group=group,
                    index=index,
                    tokens=tuple(stream.randrange(96) for _ in range(length)),
                    is_model=tuple(is_model),
                    logprobs=(0.0,) * length,
                    versions=(0,) * length,
                    finish_reason="stop",
                )
            )
    experience = Experience.of(trajectories)
    mask_BT = experience.mask_BT.clone()
    mask_BT[3] = False
    mask_BT[0, 1::3] = False
    return experience, mask_BT


def _draw_columns(case: RlCase, columns: dict[str, Tensor], mask_BT: Tensor, seed: int) -> dict[str, Tensor]:
    """Old numbers near those of the model, so that bounds are met; NaN wherever nothing may be read."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(mask_BT.shape, generator=generator)

    if case.role == "critic":
        drawn = {"values": columns["values"] + 0.3 * noise(), "returns": columns["values"] + noise()}
    else:
        drawn = {"old_logprobs": columns["logprobs"] + 0.3 * noise(), "advantages": noise() + 0.3}
        drawn["ref_logprobs"] = columns["logprobs"] + 0.5 * noise()
        if case.has_weights:
            drawn["rollout_weights"] = 2 * torch.rand(mask_BT.shape, generator=generator)
    return {name: torch.where(mask_BT, column, float("nan")) for name, column in drawn.items()}


def _draw_topk(model: PreTrainedModel, experience: Experience, seed: int) -> TopK:
    """Of the model's own logits with noise: a teacher that differs."""
    mask_BT = experience.mask_BT
    logits_BTV = _logits(model, experience, range(len(experience.trajectories)))
    generator = torch.Generator().manual_seed(seed)
    noisy = logits_BTV + torch.randn(logits_BTV.shape, generator=generator)
    logprobs_MK, ids_MK = torch.log_softmax(noisy[mask_BT], dim=-1).topk(K)
    rows_BT = torch.full(mask_BT.shape, -1, dtype=torch.int64)
    rows_BT[mask_BT] = torch.arange(len(ids_MK))
    return TopK(rows_BT=rows_BT, ids_MK=ids_MK.int(), logprobs_MK=logprobs_MK)


def _tables(experience: Experience, rows: Any, outputs_of: Callable[[Tensor], Tensor]) -> Tensor:
    """[rows, T, ...]: of each trajectory alone the outputs at the positions before its tokens; 0 behind its end."""
    tables = []
    for number in rows:
        each = experience.trajectories[number]
        first = len(each.prompt.tokens) - 1
        outputs = outputs_of(torch.tensor([[*each.prompt.tokens, *each.tokens]]))[0, first:-1]
        tables.append(F.pad(outputs, (0, 0, 0, experience.num_tokens - len(each.tokens))))
    return torch.stack(tables)


def _logits(model: PreTrainedModel, experience: Experience, rows: Any) -> Tensor:
    return _tables(experience, rows, lambda ids: model(input_ids=ids, use_cache=False).logits)


def _values(model: PreTrainedModel, experience: Experience, rows: Any) -> Tensor:
    def outputs_of(ids: Tensor) -> Tensor:
        return model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state)

    return _tables(experience, rows, outputs_of)[..., 0]


def _logs(logits_BTV: Tensor, experience: Experience, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax [rows, T, V]; of the tokens; and the entropy."""
    tokens = experience.table([each.tokens for each in experience.trajectories]).long()[list(rows)]
    logs_BTV = torch.log_softmax(logits_BTV, dim=-1)
    return logs_BTV, logs_BTV.gather(-1, tokens[..., None])[..., 0], -(logs_BTV.exp() * logs_BTV).sum(-1)


def read_columns(case: RlCase, model: PreTrainedModel, experience: Experience) -> dict[str, Tensor]:
    rows = range(len(experience.trajectories))
    if case.role == "critic":
        return {"values": torch.where(experience.mask_BT, _values(model, experience, rows), 0.0)}
    logits_BTV = _logits(model, experience, rows)
    _, raw_BT, _ = _logs(logits_BTV, experience, rows)
    _, logprobs_BT, entropy_BT = _logs(logits_BTV / case.temperature, experience, rows)
    columns = {"logprobs": logprobs_BT, "raw_logprobs": raw_BT, "entropy": entropy_BT}
    return {name: torch.where(experience.mask_BT, column, 0.0) for name, column in columns.items()}


def loss_and_metrics(
    case: RlCase,
    model: PreTrainedModel,
    experience: Experience,
    mask_BT: Tensor,
    topk: TopK | None,
    rows: tuple[int, ...],
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Of one update over the trajectories ``rows``."""
    recipe, chosen = case.recipe(Path("any")), list(rows)
    mask = mask_BT[chosen]
    weights = aggregation_weights(mask, case.agg, scale_factor=recipe.algorithm.loss_scale_factor)
    columns = {name: column[chosen] for name, column in experience.columns.items()}
    parts: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    if case.role == "critic":
        values = _values(model, experience, rows)
        found = value_loss(values, columns["values"], columns["returns"], mask, cliprange=0.2)
        parts["critic/vf_loss"], means = found.losses, {"critic/vpred_mean": values, **found.metrics}
        losses = found.losses
    else:
        logits = _logits(model, experience, rows) / case.temperature
        logs, logprobs, entropy = _logs(logits, experience, rows)
        losses = torch.zeros_like(logprobs)
        if case.distillation != "alone":
            terms = PolicyTerms(
                logprobs=logprobs,
                old_logprobs=columns["old_logprobs"],
                advantages=columns["advantages"],
                mask=mask,
                sequence_mean=masked_sequence_mean(mask),
                rollout_weights=columns.get("rollout_weights"),
            )
            found = policy_loss(case.loss_mode, terms, recipe.algorithm)
            parts["actor/pg_loss"], means = found.losses, dict(found.metrics)
            losses = losses + found.losses
        if case.entropy_coeff:
            parts["actor/entropy"] = entropy
            losses = losses - case.entropy_coeff * entropy
        if case.kl is not None:
            parts["actor/kl_loss"] = kl_penalty(logprobs, columns["ref_logprobs"], case.kl, mask)
            losses = losses + 0.2 * parts["actor/kl_loss"]
        if topk is not None:
            parts["distillation/loss"] = _distillation(logs, topk, mask, chosen)
            losses = losses + 0.5 * parts["distillation/loss"]
    metrics = {name: _with_size(part, weights) for name, part in parts.items()}
    metrics |= {name: _with_size(part, mask / mask.sum()) for name, part in means.items()}
    return torch.where(mask, losses * weights, 0.0).sum(), metrics


def _distillation(logs_BTV: Tensor, topk: TopK, mask: Tensor, rows: list[int]) -> Tensor:
    """Written out: the teacher's probabilities times the difference of logarithms, at its tokens, not below 0."""
    places = topk.rows_BT[rows].clamp(min=0)
    teacher, ids = topk.logprobs_MK[places], topk.ids_MK[places].long()
    losses = (teacher.exp() * (teacher - logs_BTV.gather(-1, ids))).sum(-1)
    return torch.where(mask, losses.clamp(min=0), 0.0)


def _with_size(values: Tensor, factors: Tensor) -> tuple[float, float]:
    parts = torch.where(factors > 0, values.detach().float(), 0.0).double() * factors
    return parts.sum().item(), parts.abs().sum().item()
