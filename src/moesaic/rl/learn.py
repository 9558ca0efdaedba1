"""What a step learns from its trajectories: from rewards to advantages, and from these to updates.

Each forward or update has one role at work; between them everything is computed on the host, by every rank alike.

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.config import Recipe
from moesaic.rl.advantages import compute_advantages
from moesaic.rl.corrections import correct, mismatch_metrics
from moesaic.rl.distillation import reverse_kl_advantages
from moesaic.rl.forward import Column, TopK, compute_columns, compute_scores, compute_topk
from moesaic.rl.kl import KlController, apply_kl_in_reward
from moesaic.rl.metrics import batch_metrics
from moesaic.rl.overlong import overlong_penalties
from moesaic.rl.rewards import Reward
from moesaic.rl.roles import Role, Roles
from moesaic.rl.types import Experience, Trajectory
from moesaic.rl.update import update_actor, update_critic
from moesaic.train.router import RouterTraining

Rewarded = tuple[Sequence[Trajectory], Sequence[Reward]]
"""Trajectories, and the reward of each as functions and environments gave it."""
AtWork = Callable[[str, Role], AbstractContextManager[None]]
"""Phase and role -> a context in which that role is on the device, and the phase's time is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What came of a step's trajectories; the same on every rank.

    Attributes:
        experience: with all tables.
        rewards: of each trajectory, whole (``Learner.judge``).
        mask_BT: [B, T] bool, the tokens that were trained on.
        metrics: in verl's names.
    """

    experience: Experience
    rewards: list[Reward]
    mask_BT: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Turns a step's trajectories into updates. Every rank has one, and calls it with the same trajectories.

    Attributes:
        kl: the coefficient of the divergence in the reward; it adapts from step to step.
        router: what trains the actor's routers beside the policy, if anything does.
    """

    recipe: Recipe
    roles: Roles
    kl: KlController
    router: RouterTraining | None
    at_work: AtWork

    def learn(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Reward],
        greedy: Rewarded | None = None,
    ) -> Learned:
        """All of one step. Every rank must call it.

        Args:
            rewards: of each trajectory, as functions and environments gave them.
            greedy: under ``adv_estimator: remax``, the likeliest completion of each group, under the group's number.
        """
        experience = _in_order(trajectories)
        experience, topk, metrics = self._ask_roles(experience)
        rewards = self.judge(trajectories, rewards)
        baselines_B = None if greedy is None else _of_groups(greedy[0], self.judge(*greedy), experience)
        experience, more = self._give_rewards(experience, rewards)
        metrics |= more
        experience, mask_BT, more = self._correct(experience)
        metrics |= more
        experience, more = self._give_advantages(experience, baselines_B, mask_BT)
        metrics |= more
        if self.roles.critic is not None:
            with self.at_work("update_critic", self.roles.critic):
                metrics |= update_critic(self.roles.critic, experience, mask_BT)
        if self.roles.critic is None or step > self.recipe.critic.critic_warmup:
            with self.at_work("update_actor", self.roles.actor):
                metrics |= update_actor(self.roles.actor, experience, mask_BT, topk=topk, router=self.router)
        metrics |= batch_metrics(experience, rewards, mask_BT, self.recipe.rollout.sampling.max_tokens)
        return Learned(experience=experience, rewards=rewards, mask_BT=mask_BT, metrics=metrics)

    def judge(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], *, is_held_out: bool = False
    ) -> list[Reward]:
        """Whole rewards: ``rewards`` with the reward model's score and the penalty of overlong completions. Every rank
        must call it; with a reward model that one is at work afterwards.

        Args:
            rewards: of each trajectory, as functions and environments gave them.
            is_held_out: without the penalty, which is about what is learned.
        """
        recipe, whole = self.recipe, list(rewards)
        if self.roles.reward is not None:
            with self.at_work("reward_model", self.roles.reward):
                scores = compute_scores(self.roles.reward, _in_order(trajectories)).tolist()
            weight = recipe.reward.weights[-1] if recipe.reward.weights else 1.0
            whole = _with_component(whole, "reward_model", scores, weight)
        if recipe.reward.overlong_buffer_len is not None and not is_held_out:
            penalties_B = overlong_penalties(
                torch.tensor([len(each.tokens) for each in trajectories]),
                max_tokens=recipe.rollout.sampling.max_tokens,
                buffer_len=recipe.reward.overlong_buffer_len,
                factor=recipe.reward.overlong_penalty_factor,
            )
            whole = _with_component(whole, "overlong", penalties_B.tolist())
        return whole

    def _ask_roles(self, experience: Experience) -> tuple[Experience, TopK | None, dict[str, float]]:
        """Log-probabilities of the actor, the reference and the teacher, values of the critic."""
        recipe, roles, topk = self.recipe, self.roles, None
        temperature = recipe.rollout.sampling.temperature
        metrics: dict[str, float] = {}
        if recipe.correction_config.bypass_mode:
            experience = experience.with_columns(old_logprobs=experience.columns["rollout_logprobs"])
        else:
            wanted: tuple[Column, ...] = ("logprobs", "entropy", *(("raw_logprobs",) if temperature != 1 else ()))
            with self.at_work("old_log_prob", roles.actor):
                found: Mapping[str, Tensor] = compute_columns(
                    roles.actor,
                    experience,
                    wanted,
                    temperature=temperature,
                )
            experience = experience.with_columns(
                old_logprobs=found["logprobs"],
                # As the engine reports them: of the logits themselves.
                raw_logprobs=found.get("raw_logprobs", found["logprobs"]),
                entropy=found["entropy"],
            )
            metrics["actor/entropy"] = float(found["entropy"][experience.mask_BT].mean())
        if roles.ref is not None:
            with self.at_work("ref", roles.ref):
                found = compute_columns(roles.ref, experience, ("logprobs",), temperature=temperature)
            experience = experience.with_columns(ref_logprobs=found["logprobs"])
        if roles.teacher is not None:
            with self.at_work("teacher", roles.teacher):
                if recipe.distillation_config.mode == "forward_kl_topk":
                    k = recipe.distillation_config.topk
                    topk = compute_topk(roles.teacher, experience, k, temperature=temperature)
                else:
                    found = compute_columns(roles.teacher, experience, ("logprobs",), temperature=temperature)
                    experience = experience.with_columns(teacher_logprobs=found["logprobs"])
        if roles.critic is not None:
            with self.at_work("values", roles.critic):
                found = compute_columns(roles.critic, experience, ("values",))
            experience = experience.with_columns(values=found["values"])
        return experience, topk, metrics

    def _give_rewards(self, experience: Experience, rewards: Sequence[Reward]) -> tuple[Experience, dict[str, float]]:
        """``token_rewards``: each trajectory's whole reward at the last token that the model wrote, less the divergence
        from the reference at each where it is part of the reward."""
        recipe = self.recipe
        metrics: dict[str, float] = {}
        totals_B = torch.tensor([each.total for each in rewards], dtype=torch.float32)
        token_rewards_BT = at_last_tokens(totals_B, experience.mask_BT)
        if recipe.kl_config.use == "reward":
            metrics["actor/reward_kl_penalty_coeff"] = self.kl.coef
            found = apply_kl_in_reward(
                token_rewards_BT,
                experience.columns["old_logprobs"],
                experience.columns["ref_logprobs"],
                experience.mask_BT,
                estimator=recipe.kl_config.estimator,
                coef=self.kl.coef,
            )
            token_rewards_BT, metrics["actor/reward_kl_penalty"] = found.token_rewards_BT, found.mean_kl
            self.kl.update(found.mean_kl, len(experience.trajectories))
        return experience.with_columns(token_rewards=token_rewards_BT), metrics

    def _correct(self, experience: Experience) -> tuple[Experience, Tensor, dict[str, float]]:
        """Weights and rejections where engine and trainer differ; how much they do, in any case."""
        columns, mask_BT = experience.columns, experience.mask_BT
        if "raw_logprobs" not in columns:  # the engine's stand for the trainer's
            return experience, mask_BT, {}
        metrics = mismatch_metrics(columns["raw_logprobs"], columns["rollout_logprobs"], mask_BT)
        correction = correct(
            columns["raw_logprobs"], columns["rollout_logprobs"], mask_BT, self.recipe.correction_config
        )
        if correction.weights_BT is not None:
            experience = experience.with_columns(rollout_weights=correction.weights_BT)
        return experience, correction.mask_BT, metrics | correction.metrics

    def _give_advantages(
        self, experience: Experience, baselines_B: Tensor | None, mask_BT: Tensor
    ) -> tuple[Experience, dict[str, float]]:
        """Of all tokens that the model wrote: a rejected one is not trained on, but its reward was earned."""
        columns, recipe = experience.columns, self.recipe
        token_rewards_BT = columns["token_rewards"]
        if recipe.distillation_config.mode == "policy_gradient":
            token_rewards_BT = reverse_kl_advantages(
                columns["old_logprobs"],
                columns["teacher_logprobs"],
                experience.mask_BT,
                clamp=recipe.distillation_config.loss_max_clamp,
                coef=recipe.distillation_config.coef,
            )
        found = compute_advantages(
            recipe.algorithm.adv_estimator,
            token_rewards_BT=token_rewards_BT,
            mask_BT=experience.mask_BT,
            groups_B=experience.groups_B,
            values_BT=columns.get("values"),
            baselines_B=baselines_B,
            gamma=recipe.algorithm.gamma,
            lam=recipe.algorithm.lam,
        )
        experience = experience.with_columns(advantages=found.advantages_BT, returns=found.returns_BT)
        metrics = {"critic/num_singleton_groups": float(found.num_singletons)}
        metrics["actor/trained_token_ratio"] = float(mask_BT.sum() / experience.mask_BT.sum().clamp(min=1))
        return experience, metrics


def _in_order(trajectories: Sequence[Trajectory]) -> Experience:
    """Of trajectories that are ordered by group, then index, so that what is beside them stays beside them."""
    experience = Experience.of(trajectories)
    assert [id(each) for each in trajectories] == [id(each) for each in experience.trajectories], "not in order"
    return experience


def _of_groups(trajectories: Sequence[Trajectory], rewards: Sequence[Reward], experience: Experience) -> Tensor:
    """[B] fp32: for each trajectory of the experience, the reward of its group's only one in ``trajectories``."""
    worth = {each.group: reward.total for each, reward in zip(trajectories, rewards, strict=True)}
    return torch.tensor([worth[each.group] for each in experience.trajectories], dtype=torch.float32)


def _with_component(rewards: Sequence[Reward], name: str, values: Sequence[float], weight: float = 1.0) -> list[Reward]:
    return [each.with_component(name, value, weight) for each, value in zip(rewards, values, strict=True)]


def at_last_tokens(totals_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] fp32: each trajectory's number at its last token with mask, 0 elsewhere; nowhere without such a token."""
    num_tokens = mask_BT.size(1)
    last_B = (mask_BT * torch.arange(1, num_tokens + 1)).argmax(dim=1)
    table = torch.zeros(mask_BT.shape)
    table[torch.arange(len(totals_B)), last_B] = totals_B.float()
    return torch.where(mask_BT, table, 0.0)
