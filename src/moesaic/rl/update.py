"""A step's optimizer updates of the actor and of the critic.

A rollout is gone through ``ppo_epochs`` times, each time in mini-batches of ``ppo_mini_batch_size`` prompts with all
their completions, in order; each is one optimizer update. The old log-probabilities are those before the first.

The loss of an update is a sum over all its tokens, on all ranks::

    sum of w_{b,t} (policy loss - entropy_coeff H + kl coef KL + distillation coef D)_{b,t}

with weights w (``rl/aggregation.py``) that follow from the mask of the whole mini-batch: every rank has it, so nothing
need be counted. Gradients are sums over ranks, so it doesn't matter which rank, micro-batch or row a token is in.

Updates run in training mode, as the routers' losses are heard there only. Models of this kind have no dropout unless
their config sets one; then the new log-probabilities differ from the old by its noise.

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them; n positions of a
micro-batch of R rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.config import Recipe
from moesaic.config.rl_check import has_policy_loss
from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.meshes import Meshes
from moesaic.parallel.tensor import VocabularyShard, vocabulary_shard
from moesaic.rl.aggregation import aggregation_weights
from moesaic.rl.batches import build_batch, cut_rows, mini_batches
from moesaic.rl.distillation import forward_kl_topk
from moesaic.rl.forward import TopK
from moesaic.rl.kl import kl_penalty
from moesaic.rl.logprobs import logprobs_at, token_entropy, token_logprobs
from moesaic.rl.losses import PolicyTerms, policy_loss, value_loss
from moesaic.rl.roles import Role
from moesaic.rl.tokens import Tables, Tokens, flat
from moesaic.rl.types import Experience
from moesaic.train.router import RouterTraining
from moesaic.train.step import optimize

POLICY_COLUMNS = ("old_logprobs", "advantages")
CRITIC_COLUMNS = ("values", "returns")

TokenLoss = tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]
"""Losses [R, n], and two kinds of metrics [R, n]: those that are weighted as the loss, and means over tokens."""


def update_actor(
    role: Role,
    experience: Experience,
    mask_BT: Tensor,
    *,
    topk: TopK | None = None,
    router: RouterTraining | None = None,
) -> dict[str, float]:
    """All updates of one step, then one of the learning rate. Every rank must call it, with the same experience.

    A mini-batch without a trained token is no update. One whose gradients aren't finite moves no rank's weights; it is
    counted, and left out of the other metrics.

    Args:
        role: the actor; its recipe says which loss.
        experience: with the columns ``old_logprobs`` (of logits divided by the sampling temperature, as here; under
            ``bypass_mode`` the engine's) and ``advantages``; ``ref_logprobs`` where the divergence is in the loss;
            ``rollout_weights`` where tokens have weights of their own. ``entropy`` is reported, where it is there.
        mask_BT: [B, T] bool, the tokens that are trained on, after rejections; others' columns are never read.
        topk: of the teacher, under ``distillation_config.mode: forward_kl_topk``.
        router: what trains the model's routers beside the policy.

    Returns:
        Means over the step's updates of verl's ``actor/pg_loss``, ``actor/pg_clipfrac``, ``actor/ppo_kl``,
        ``actor/kl_loss``, ... (each over all ranks' tokens; losses weighted as the loss is), ``actor/grad_norm`` before
        clipping, ``actor/lr``, and how many updates were skipped: ``actor/num_skipped``.

    Raises:
        ValueError: a trajectory doesn't fit into ``micro_batch_tokens``.
    """
    recipe = role.recipe
    is_supervised = recipe.distillation_config.mode == "forward_kl_topk"
    assert is_supervised == (topk is not None), f"distillation_config.mode={recipe.distillation_config.mode}, {topk=}"
    needed = [*(POLICY_COLUMNS if has_policy_loss(recipe) else ()), *(("ref_logprobs",) if _has_kl(recipe) else ())]
    reported = [name for name in ("rollout_weights", "entropy") if name in experience.columns]
    loss_of = _actor_loss(recipe, vocabulary_shard(role.model))
    metrics = _update(role, experience, mask_BT, [*needed, *reported], loss_of, topk=topk, router=router)
    return metrics | ({"actor/kl_coef": recipe.kl_config.coef} if _has_kl(recipe) else {})


def update_critic(role: Role, experience: Experience, mask_BT: Tensor) -> dict[str, float]:
    """As ``update_actor``, by the value loss: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean``,
    ``critic/grad_norm``, ``critic/lr``, ``critic/num_skipped``.

    Args:
        experience: with the columns ``values`` (before the first update) and ``returns``.
    """
    cliprange = role.recipe.critic.cliprange_value

    def loss_of(tokens: Tokens) -> TokenLoss:
        values, old_values, returns = tokens.logits[..., 0].float(), tokens.columns["values"], tokens.columns["returns"]
        found = value_loss(values, old_values, returns, tokens.mask, cliprange=cliprange)
        return found.losses, {"critic/vf_loss": found.losses}, {"critic/vpred_mean": values, **found.metrics}

    return _update(role, experience, mask_BT, CRITIC_COLUMNS, loss_of)


def _has_kl(recipe: Recipe) -> bool:
    return recipe.kl_config.use == "loss"


def _actor_loss(recipe: Recipe, vocabulary: VocabularyShard | None) -> Callable[[Tokens], TokenLoss]:
    algorithm, distillation = recipe.algorithm, recipe.distillation_config
    temperature = recipe.rollout.sampling.temperature

    def loss_of(tokens: Tokens) -> TokenLoss:
        logprobs = token_logprobs(tokens.logits, tokens.labels, vocabulary, temperature)
        losses = torch.zeros_like(logprobs)
        weighted: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        if has_policy_loss(recipe):
            terms = PolicyTerms(
                logprobs=logprobs,
                old_logprobs=tokens.columns["old_logprobs"],
                advantages=tokens.columns["advantages"],
                mask=tokens.mask,
                sequence_mean=tokens.sequence_mean,
                rollout_weights=tokens.columns.get("rollout_weights"),
            )
            policy = policy_loss(algorithm.loss_mode, terms, algorithm)
            losses, weighted["actor/pg_loss"] = policy.losses, policy.losses
            means |= policy.metrics
        if algorithm.entropy_coeff:
            entropy = token_entropy(tokens.logits, vocabulary, temperature)
            losses, weighted["actor/entropy"] = losses - algorithm.entropy_coeff * entropy, entropy
        elif "entropy" in tokens.columns:
            weighted["actor/entropy"] = tokens.columns["entropy"]
        if _has_kl(recipe):
            kl = kl_penalty(logprobs, tokens.columns["ref_logprobs"], recipe.kl_config.estimator, tokens.mask)
            losses, weighted["actor/kl_loss"] = losses + recipe.kl_config.coef * kl, kl
        if tokens.teacher_ids is not None and tokens.teacher_logprobs is not None:
            student = logprobs_at(tokens.logits, tokens.teacher_ids, vocabulary, temperature)
            found = forward_kl_topk(student, tokens.teacher_logprobs, tokens.mask, clamp=distillation.loss_max_clamp)
            losses, weighted["distillation/loss"] = losses + distillation.coef * found.losses, found.losses
            means |= found.metrics
        return losses, weighted, means

    return loss_of


def _update(
    role: Role,
    experience: Experience,
    mask_BT: Tensor,
    columns: Sequence[str],
    loss_of: Callable[[Tokens], TokenLoss],
    topk: TopK | None = None,
    router: RouterTraining | None = None,
) -> dict[str, float]:
    """Every mini-batch of every epoch, one optimizer update each; then, if any moved the weights, the scheduler."""
    assert role.optimizer is not None, f"the {role.name} is not trained"
    recipe, algorithm = role.recipe, role.recipe.algorithm
    missing = [name for name in columns if name not in experience.columns]
    assert not missing, f"the experience has no {missing}, but {sorted(experience.columns)}"
    lr = float(role.optimizer.param_groups[0]["lr"])
    tables = Tables.build(role.meshes, experience, mask_BT, columns, topk)
    sums: defaultdict[str, float] = defaultdict(float)
    num_updates = num_skipped = 0
    role.model.train()
    for _ in range(algorithm.ppo_epochs):
        for numbers in mini_batches(experience, algorithm.ppo_mini_batch_size):
            rows = torch.tensor(numbers)
            if not mask_BT[rows].any():
                continue
            weights_BT = torch.zeros(mask_BT.shape)
            weights_BT[rows] = aggregation_weights(
                mask_BT[rows], algorithm.loss_agg_mode, scale_factor=algorithm.loss_scale_factor
            )
            loss = _Loss(tables, weights_BT, int(mask_BT[rows].sum()), loss_of)
            result = optimize(
                role.model,
                _micro_batches(role, experience, numbers),
                loss,
                role.optimizer,
                None,
                recipe.max_grad_norm,
                router=router,
                gradient_accumulation=recipe.gradient_accumulation,
            )
            measured = loss.measure(role.meshes)
            if not result.is_finite:
                num_skipped += 1
                continue
            num_updates += 1
            for name, value in (measured | {f"{role.name}/grad_norm": result.grad_norm}).items():
                sums[name] += value
    if role.scheduler is not None and num_updates:
        role.scheduler.step()
    means = {name: value / num_updates for name, value in sums.items()}
    return means | {f"{role.name}/lr": lr, f"{role.name}/num_skipped": float(num_skipped)}


def _micro_batches(role: Role, experience: Experience, numbers: Sequence[int]) -> list[Batch]:
    """This rank's, on the device, cut where sequences are shared."""
    meshes, recipe = role.meshes, role.recipe
    own, device = meshes.data.get_local_rank("dp"), torch.device(meshes.data.device_type)
    rounds = cut_rows(experience, numbers, meshes.sizes, recipe)
    batches = (build_batch(experience, rows[own], meshes.sizes, recipe) for rows in rounds)
    return [shard_batch(batch, meshes).to(device) for batch in batches]


class _Loss:
    """The loss of one update's micro-batches, and the sums that its metrics are made of."""

    def __init__(
        self, tables: Tables, weights_BT: Tensor, num_trained: int, loss_of: Callable[[Tokens], TokenLoss]
    ) -> None:
        self._tables = tables
        self._weights = flat(weights_BT).to(tables.mask.device)
        self._num_trained = num_trained
        self._loss_of = loss_of
        self._sums: dict[str, Tensor] = {}

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        tokens, places = self._tables.at(logits, batch)
        weights = self._weights[places]
        losses, weighted, means = self._loss_of(tokens)
        is_counted = weights > 0
        for metrics, factors in ((weighted, weights), (means, is_counted / self._num_trained)):
            for name, values in metrics.items():
                total = (torch.where(is_counted, values.detach().float(), 0.0) * factors).sum()
                self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
        return (torch.where(is_counted, losses, 0.0) * weights).sum()

    def measure(self, meshes: Meshes) -> dict[str, float]:
        """Each metric over all ranks' tokens: one all-reduce, over the ranks that have different tokens."""
        total = torch.stack(list(self._sums.values()))
        dist.all_reduce(total, group=meshes.tokens.get_group())
        return dict(zip(self._sums, total.tolist(), strict=True))
