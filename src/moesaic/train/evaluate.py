"""The held-out loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.meshes import Meshes
from moesaic.ops import host
from moesaic.parallel.tensor import vocabulary_shard
from moesaic.train.losses import count_loss_tokens, token_loss_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Losses of held-out sets.

    Attributes:
        sets: of each by name: the loss in nats per token, and the number of loss tokens.
    """

    sets: Mapping[str, tuple[float, int]]

    @property
    def num_loss_tokens(self) -> int:
        """Over all sets."""
        return sum(num_tokens for _, num_tokens in self.sets.values())

    @property
    def loss(self) -> float:
        """Nats per token over all sets: a set weighs as much as it has loss tokens."""
        (first, *others) = self.sets.values()
        if not others:
            return first[0]
        return sum(loss * num_tokens for loss, num_tokens in self.sets.values()) / max(1, self.num_loss_tokens)


def evaluate_sets(model: PreTrainedModel, sets: Mapping[str, Iterable[Batch]], meshes: Meshes) -> HeldOut:
    """:func:`evaluate` of each set, one after another. Every rank must call it."""
    return HeldOut(sets={name: evaluate(model, batches, meshes) for name, batches in sets.items()})


@torch.no_grad()
def evaluate(model: PreTrainedModel, batches: Iterable[Batch], meshes: Meshes) -> tuple[float, int]:
    """Sum of token losses over all samples / number of their loss tokens: the same for any ranks and micro-batches.

    Every rank must call it, with equally many micro-batches. The model is in training mode again afterwards. All ranks
    return rank 0's numbers, so that they can decide by them.

    Args:
        batches: this data-parallel rank's micro-batches of the whole held-out set, e.g. an ``EvalLoader``.

    Returns:
        The loss in nats per token, and the number of loss tokens.
    """
    device = torch.device(meshes.data.device_type)
    # Double: over millions of tokens, a single-precision sum would lose what one batch adds.
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    for batch in batches:
        on_device = shard_batch(batch, meshes).to(device)
        logits = model(**on_device.model_inputs()).logits
        loss_sum += token_loss_sum(logits, on_device.kept_labels, vocabulary_shard(model))
        num_tokens += count_loss_tokens(on_device.labels)
    model.train()
    group = meshes.tokens.get_group()
    dist.all_reduce(loss_sum, group=group)
    dist.all_reduce(num_tokens, group=group)
    dist.broadcast(loss_sum, src=0)
    count = int(num_tokens)
    return host.read_float(loss_sum) / max(1, count), count
