"""What roles say of a step's trajectories, without gradients: tables on every rank's host, the same on all of them.

Each rank forwards its share and writes its numbers at their places in tables of zeros; one all-reduce adds the ranks'
tables up. Only one rank writes each number, so the sum is exact, and so is what every rank then decides by it.

The model is in evaluation mode meanwhile (no dropout).

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them, M tokens that the model
wrote, K tokens of the vocabulary; n positions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.parallel.tensor import VocabularyShard, vocabulary_shard
from moesaic.rl.batches import Positions, build_batch, cut_rows
from moesaic.rl.logprobs import token_entropy, token_logprobs, topk_logprobs
from moesaic.rl.roles import Role
from moesaic.rl.types import Experience

Column = Literal["logprobs", "raw_logprobs", "entropy", "values"]
ColumnFunction = Callable[[Tensor, Batch, VocabularyShard | None, float], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """A teacher's likeliest tokens at each token that the model wrote; on the host, the same on every rank.

    Attributes:
        rows_BT: [B, T] int64: a token's row in the other two, -1 where the model wrote none.
        ids_MK: [M, K] int32, likeliest first.
        logprobs_MK: [M, K] fp32.
    """

    rows_BT: Tensor
    ids_MK: Tensor
    logprobs_MK: Tensor


def compute_columns(
    role: Role, experience: Experience, wanted: Sequence[Column], *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """[B, T] fp32 tables, 0 where the model wrote no token. Every rank must call it, with the same experience.

    ``logprobs`` of the tokens and ``entropy`` of what they were drawn from, in nats, both of logits divided by
    ``temperature``; ``raw_logprobs``, of the logits themselves, as engines report them; ``values`` of a critic, each
    before its token. One forward for all of them.

    Raises:
        ValueError: a trajectory doesn't fit into ``micro_batch_tokens``.
    """
    functions = [COLUMNS[name] for name in wanted]
    num_places = len(experience.trajectories) * experience.num_tokens
    # One more, which takes what has no place.
    tables = torch.zeros(len(wanted), num_places + 1, device=_device(role))
    vocabulary = vocabulary_shard(role.model)
    for logits, batch in _forward(role, experience):
        places = _places(batch, num_places)
        for table, function in zip(tables, functions, strict=True):
            table[places] = function(logits, batch, vocabulary, temperature).flatten()
    (summed,) = _sum_over_ranks(role, tables)
    shape = (len(experience.trajectories), experience.num_tokens)
    return {name: table[:-1].view(shape) for name, table in zip(wanted, summed, strict=True)}


def compute_scores(role: Role, experience: Experience) -> Tensor:
    """[B] fp32: what a reward model says at each trajectory's last token. Every rank must call it; errors as above."""
    num_places = len(experience.trajectories) * experience.num_tokens
    table = torch.zeros(num_places + 1, device=_device(role))
    for logits, batch in _forward(role, experience, "last"):
        table[_places(batch, num_places)] = logits[..., 0].float().flatten()
    (summed,) = _sum_over_ranks(role, table)
    return summed[:-1].view(len(experience.trajectories), -1).sum(dim=1)


def compute_topk(role: Role, experience: Experience, k: int, *, temperature: float = 1.0) -> TopK:
    """A teacher's ``k`` likeliest tokens where the model wrote one. Every rank must call it; errors as above."""
    mask_BT = experience.mask_BT
    num_rows = int(mask_BT.sum())
    rows_BT = torch.full(mask_BT.shape, -1, dtype=torch.int64)
    rows_BT[mask_BT] = torch.arange(num_rows)
    device = _device(role)
    # As with places: one row more, which takes what has none.
    row_of_place = torch.cat([rows_BT.flatten(), rows_BT.new_tensor([-1])]).to(device)
    row_of_place = torch.where(row_of_place < 0, num_rows, row_of_place)
    ids = torch.zeros(num_rows + 1, k, dtype=torch.int32, device=device)
    logprobs = torch.zeros(num_rows + 1, k, device=device)
    vocabulary = vocabulary_shard(role.model)
    for logits, batch in _forward(role, experience):
        found, tokens = topk_logprobs(logits, k, vocabulary, temperature)
        rows = row_of_place[_places(batch, mask_BT.numel())]
        logprobs[rows] = found.flatten(0, -2)
        ids[rows] = tokens.flatten(0, -2).int()
    ids, logprobs = _sum_over_ranks(role, ids, logprobs)
    return TopK(rows_BT=rows_BT, ids_MK=ids[:-1], logprobs_MK=logprobs[:-1])


@torch.no_grad()
def _forward(role: Role, experience: Experience, positions: Positions = "tokens") -> Iterator[tuple[Tensor, Batch]]:
    """Logits [rows, n, V] and micro-batch, on the device, of this rank's share of all trajectories."""
    sizes, device = role.meshes.sizes, _device(role)
    rounds = cut_rows(experience, range(len(experience.trajectories)), sizes, role.recipe)
    own = role.meshes.data.get_local_rank("dp")
    with _evaluating(role.model):
        for rows in rounds:
            batch = build_batch(experience, rows[own], sizes, role.recipe, positions)
            batch = shard_batch(batch, role.meshes).to(device)
            yield role.model(**batch.model_inputs()).logits, batch


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode; afterwards as before, and no gathered parameter is left: FSDP keeps the root's for a backward
    that doesn't come here."""
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _places(batch: Batch, num_places: int) -> Tensor:
    """Flat places of the logits' positions; ``num_places`` where there is none."""
    places = batch.kept_places.flatten()
    return torch.where(places < 0, num_places, places)


def _sum_over_ranks(role: Role, *tables: Tensor) -> tuple[Tensor, ...]:
    """The sums over all ranks, on the host. Of tp peers, who have the same numbers, the first one's alone: what two
    devices compute may differ in the last bit, and ranks must not decide by different numbers."""
    mesh = role.meshes.data
    for table in tables:
        if mesh.get_local_rank("tp"):
            table.zero_()
        dist.all_reduce(table, group=mesh._flatten().get_group())
    return tuple(table.cpu() for table in tables)


def _device(role: Role) -> torch.device:
    return torch.device(role.meshes.data.device_type)


COLUMNS: Mapping[Column, ColumnFunction] = MappingProxyType(
    {
        "logprobs": lambda logits, batch, vocabulary, t: token_logprobs(logits, batch.kept_labels, vocabulary, t),
        "raw_logprobs": lambda logits, batch, vocabulary, _: token_logprobs(logits, batch.kept_labels, vocabulary),
        "entropy": lambda logits, _, vocabulary, t: token_entropy(logits, vocabulary, t),
        "values": lambda logits, *_: logits[..., 0].float(),
    }
)
