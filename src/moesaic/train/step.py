"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.meshes import Meshes
from moesaic.ops import host
from moesaic.parallel.tensor import vocabulary_shard
from moesaic.train.grad_norm import clip_grad_norm_
from moesaic.train.losses import count_loss_tokens, token_loss_sum
from moesaic.train.router import RouterTraining
from moesaic.train.wide_sums import WideSums


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer update did.

    Attributes:
        loss_share: 0-D fp32, this rank's part of the loss, as ``loss_of`` gave it: see ``StepResult``.
        grad_norm: global norm before clipping.
        is_finite: False where the norm was not finite: then no rank has moved its weights, optimizer or schedule.
    """

    loss_share: Tensor
    grad_norm: float
    is_finite: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        loss_share: 0-D fp32, this rank's token losses over the global token count; summed over the ranks that hold
            different tokens (``meshes.tokens``) it is the step's loss. Not reduced here: whoever logs it does. Router
            losses aren't in it: they are ``router.shares()``, without their coefficients, to be summed in the same way.
        grad_norm: global norm before clipping.
        num_tokens: 0-D int64, loss tokens of the step, global.
        is_finite: False where the norm was not finite: then no rank has moved its weights, optimizer or schedule.
    """

    loss_share: Tensor
    grad_norm: float
    num_tokens: Tensor
    is_finite: bool


def train_step(
    model: PreTrainedModel,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    meshes: Meshes,
    max_grad_norm: float | None,
    before_clip: Callable[[], None] | None = None,
    router: RouterTraining | None = None,
    gradient_accumulation: Literal["sharded", "unsharded"] = "sharded",
) -> StepResult:
    """One update by the labels' negative log-likelihoods. Every rank must call it, with equally many micro-batches
    (some may have no loss).

    Loss = sum of token losses / global number of loss tokens of the step, whatever the micro-batches, ranks and
    packing.

    Args:
        micro_batches: this rank's, already on the device; those of a sequence group whole on each of its ranks, or
            already cut (``shard_batch``).
        max_grad_norm, before_clip, router, gradient_accumulation: see ``optimize``.
    """
    # Count first: every micro-batch's loss is divided by the tokens of the whole step.
    micro_batches = [shard_batch(batch, meshes) for batch in micro_batches]
    vocabulary = vocabulary_shard(model)
    local_tokens = torch.stack([count_loss_tokens(batch.labels) for batch in micro_batches]).sum()
    num_tokens = local_tokens.clone()
    dist.all_reduce(num_tokens, group=meshes.tokens.get_group())
    divisor = num_tokens.clamp(min=1)

    def loss_of(logits: Tensor, batch: Batch) -> Tensor:
        return token_loss_sum(logits, batch.kept_labels, vocabulary) / divisor

    update = optimize(
        model,
        micro_batches,
        loss_of,
        optimizer,
        scheduler,
        max_grad_norm,
        before_clip,
        router,
        gradient_accumulation=gradient_accumulation,
    )
    return StepResult(update.loss_share, update.grad_norm, num_tokens, update.is_finite)


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer update. The loss of the update is a sum over all its tokens, whose scale ``loss_of`` knows beforehand;
# gradients are summed over micro-batches and ranks (never averaged), so that nothing is left to be scaled here.
# ---------------------------------------------------------------------------------------------------------------------
def optimize(
    model: PreTrainedModel,
    micro_batches: Sequence[Batch],
    loss_of: Callable[[Tensor, Batch], Tensor],
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    max_grad_norm: float | None,
    before_clip: Callable[[], None] | None = None,
    router: RouterTraining | None = None,
    gradient_accumulation: Literal["sharded", "unsharded"] = "sharded",
) -> Update:
    """Forward, backward, clip, step. Every rank must call it, with equally many micro-batches (some may have no loss).

    Args:
        micro_batches: this rank's, already on the device, and already cut where sequences are shared (``shard_batch``).
        loss_of: of a micro-batch's logits [B, n, V] (at its ``loss_positions``; of this rank's columns where the
            vocabulary is shared) and itself: its 0-D share of the update's loss, differentiable; 0 of the logits, not a
            constant, where it has none. Ranks that share a vocabulary get equal ones.
        scheduler: moved once with the update; None where the learning rate changes at another pace.
        max_grad_norm: None doesn't clip.
        before_clip: called when the update's gradients are whole and nobody has scaled them, e.g. to write them down.
        router: what trains the model's routers beside this loss.
        gradient_accumulation: reduce gradients after each micro-batch, or hold them whole and reduce them once.
    """
    if router is not None:
        router.begin(micro_batches)

    # Forward and backward; FSDP sums each micro-batch's gradients into the sharded ones, or into the whole ones.
    loss_share = torch.zeros((), device=micro_batches[0].labels.device)
    # Whole gradients FSDP itself holds in the reducing type, fp32; sharded ones in the parameters'.
    sums = WideSums(model.parameters() if gradient_accumulation == "sharded" and len(micro_batches) > 1 else ())
    for number, batch in enumerate(micro_batches, 1):
        if gradient_accumulation == "unsharded":
            cast(FSDPModule, model).set_requires_gradient_sync(number == len(micro_batches))
        loss = loss_of(model(**batch.model_inputs()).logits, batch)
        (loss if router is None else loss + router.penalty(batch)).backward()
        loss_share += loss.detach()
        sums.add()
    sums.give_back()

    if before_clip is not None:
        before_clip()

    # Norm over all meshes, clip, and move only if every rank can.
    grad_norm = host.read_float(clip_grad_norm_(model.parameters(), max_grad_norm))
    is_finite = abs(grad_norm) < float("inf")
    if is_finite:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if router is not None:
        router.end(is_finite=is_finite)
    optimizer.zero_grad(set_to_none=True)
    return Update(loss_share, grad_norm, is_finite)
