"""The two steps that every side of a comparison runs: ours, on any ranks; and plain transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from moesaic.config import OptimConfig, Recipe
from moesaic.data.batch import IGNORE_INDEX, Batch, Sample
from moesaic.data.packing import RowOptions, collate
from moesaic.meshes import Meshes
from moesaic.train.optim import build_optimizer
from moesaic.train.router import MAX_BIAS, RouterTraining, build_router_training
from moesaic.train.setup import router_options
from moesaic.train.step import train_step
from moesaic.verify.documents import MAX_TOKENS

NUM_STEPS = 2
# Large enough that a wrong update shows in the weights, small enough that the second step routes like the first.
LEARNING_RATE = 3e-4
# With the default eps AdamW turns the rounding of near-zero gradients into steps of +-lr.
OPTIMIZER = OptimConfig(eps=1e-4, weight_decay=0.1)
LOSS, NORM = "loss", "norm"

Numbers = dict[str, float]
"""Of the first step: ``loss``, ``norm`` before clipping, and the routers' own losses where they are on."""


def run_ours(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    recipe: Recipe,
    meshes: Meshes,
    on_gradients: Callable[[], None],
) -> tuple[Numbers, Optimizer]:
    """Two of our own steps. Every rank must call it.

    Args:
        batches: this rank's micro-batches, whole rows.
        on_gradients: called when the first step's gradients are there, before they are clipped.

    Returns:
        The first step's numbers, global; and the optimizer after the last.
    """
    optimizer = build_optimizer(model, OPTIMIZER, LEARNING_RATE)
    router = build_router_training(model, router_options(recipe, model), meshes)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        result = train_step(
            model,
            batches,
            optimizer,
            None,
            meshes,
            recipe.max_grad_norm,
            before_clip=None if step else on_gradients,
            router=router,
            gradient_accumulation=recipe.gradient_accumulation,
        )
        if step == 0:
            loss = result.loss_share.double()
            dist.all_reduce(loss, group=meshes.tokens.get_group())
            numbers = {LOSS: loss.item(), NORM: result.grad_norm}
            numbers |= _router_losses(router)
    return numbers, optimizer


def run_plain(
    model: PreTrainedModel,
    documents: Sequence[Sample],
    recipe: Recipe,
    meshes: Meshes,
    on_gradients: Callable[[], None],
) -> Numbers:
    """Two steps of plain transformers in one process: one document at a time, no padding, no packing, torch's loss.

    What trains routers is ours, on one rank (transformers has no losses over a step of several passes).

    Args:
        meshes: of this one rank.
    """
    optimizer = build_optimizer(model, OPTIMIZER, LEARNING_RATE)
    router = build_router_training(model, router_options(recipe, model), meshes)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        loss = _backward(model, documents, router)
        if step == 0:
            on_gradients()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([grad.double().norm() for grad in grads])).item()
        if step == 0:
            numbers = {LOSS: loss, NORM: norm} | _router_losses(router)
        if recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm, foreach=False)
        optimizer.step()
        if router is not None:
            router.end(is_finite=True)
        optimizer.zero_grad()
    return numbers


def _router_losses(router: RouterTraining | None) -> Numbers:
    """Of the step. Not the largest bias: the biases are compared one by one, with the weights."""
    measured = {} if router is None else router.measure()
    return {name: value for name, value in measured.items() if name != MAX_BIAS}


def _backward(model: PreTrainedModel, documents: Sequence[Sample], router: RouterTraining | None) -> float:
    """Gradients of the sum of token losses over the number of loss tokens; returns that loss."""
    num_tokens = sum(document.num_loss_tokens for document in documents)
    options = RowOptions(cutoff_len=MAX_TOKENS, packing=False, pad_token_id=0)
    batches = [collate([document], [(0,)], options).to(model.device) for document in documents]
    if router is not None:
        router.begin(batches)
    total = 0.0
    for document, batch in zip(documents, batches, strict=True):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[0].float()
        labels = torch.tensor(document.labels, device=logits.device)
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        share = loss / num_tokens
        (share if router is None else share + router.penalty(batch)).backward()
        total += loss.item()
    return total / num_tokens


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What training moves: parameters, tied ones once, and the floating buffers that a checkpoint has."""
    yield from model.named_parameters()
    state = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in state and buffer.is_floating_point():
            yield name, buffer
