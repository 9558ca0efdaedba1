"""The least that one rank must send in a training step, by purpose, from shapes alone: of the model's parameters, of
the batch, and of the meshes. Nothing here looks at what was sent, or at how the parallel model is built.

A gather of a whole among n ranks: each sends its n-th to n - 1 others, (n - 1) / n of the whole; a reduction that ends
in n shards sends as much, one that ends in the whole on every rank twice that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.config.parallel import ParallelSizes
from moesaic.data.batch import IGNORE_INDEX, Batch
from moesaic.parallel.apply import ParallelOptions

REDUCED = 4  # bytes of a number of a gradient while it is summed, and of a loss
ATTENTION = re.compile(r"self_attn\.o_proj\.weight$")
DENSE_MLP = re.compile(r"mlp(\.shared_experts?)?\.down_proj\.weight$")
SHARED_GATE = re.compile(r"mlp\.shared_expert_gate\.weight$")
LINEAR_ATTENTION = re.compile(r"linear_attn\.out_proj\.weight$")
SPLIT_BY_TP = re.compile(
    r"(embed_tokens|lm_head|self_attn\.(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|o_proj)"
    r"|mlp(\.shared_experts?)?\.(gate_proj|up_proj|down_proj))\.weight$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank does.

    Attributes:
        shapes: of each parameter of the whole model.
        config: of its text model, transformers'.
        batches: the rank's micro-batches before they are cut over cp and tp.
        cp_rank: which run of positions is the rank's.
    """

    shapes: dict[str, torch.Size]
    config: Any
    sizes: ParallelSizes
    options: ParallelOptions
    batches: Sequence[Batch]
    cp_rank: int

    @property
    def num_exchanges(self) -> int:
        """How often a block exchanges heads one way: forward, backward, and where it is computed again."""
        return 3 if self.options.activation_checkpointing else 2

    @property
    def computed(self) -> int:
        """Bytes of a number of a gathered parameter or of an activation."""
        return self.options.compute_dtype.itemsize

    def num_positions(self, batch: Batch) -> int:
        """B * S of a cp index, padded so that tp and cp divide S."""
        num_rows, length = batch.input_ids.shape
        return num_rows * _round_up(length, self.sizes.cp_size * self.sizes.tp_size) // self.sizes.cp_size

    def count(self, pattern: re.Pattern[str]) -> int:
        """Modules with such a parameter."""
        return sum(pattern.search(name) is not None for name in self.shapes)


def least_bytes(step: Step) -> dict[str, float]:
    """Bytes by purpose, as ``bench.traffic`` names them; rows of tokens depend on the routing: see ``least_rows``."""
    least: defaultdict[str, float] = defaultdict(float)
    for name, shape in step.shapes.items():
        for purpose, num_bytes in _parameter(step, name, shape).items():
            least[purpose] += num_bytes
    for batch in step.batches:
        least["runs"] += _runs(step, batch)
        least["heads"] += _heads(step, batch) + _linear_heads(step, batch)
        least["loss"] += _loss(step, batch)
    return dict(least)


def _parameter(step: Step, name: str, shape: torch.Size) -> dict[str, float]:
    """Gathered once for forward, and for backward where it was freed in between; reduced once a micro-batch."""
    sizes, numel = step.sizes, shape.numel()
    if ".experts." in name and step.options.expert_parallel:
        numel, num_shards, num_replicas = numel // sizes.ep_size, sizes.efsdp_size, sizes.edp_size
    elif _is_split(step, name):
        numel, num_shards, num_replicas = numel // sizes.tp_size, sizes.mp_shard_size, sizes.mp_replicate_size
    else:  # its gradient is summed over tp too, so it is sharded there
        num_shards, num_replicas = sizes.mp_shard_size * sizes.tp_size, sizes.mp_replicate_size
    is_freed = ".layers." in name and step.options.reshard_after_forward
    num_batches = len(step.batches)
    return {
        "parameters": num_batches * (2 if is_freed else 1) * _others(num_shards) * numel * step.computed,
        "gradients": num_batches * _others(num_shards) * numel * REDUCED,
        "replicas": num_batches * 2 * _others(num_replicas) * numel / num_shards * REDUCED,
    }


def _is_split(step: Step, name: str) -> bool:
    if step.sizes.tp_size == 1 or not SPLIT_BY_TP.search(name):
        return False
    # Fewer key and value heads than ranks: each computes all of them.
    return not re.search(r"\.[kv]_proj\.", name) or step.config.num_key_value_heads % step.sizes.tp_size == 0


def _runs(step: Step, batch: Batch) -> float:
    """Tensor parallelism: positions gathered before, and summed into runs after each pair of split matrices; backward
    the other way round. The embedding's are only summed (backward: gathered), the head's only gathered.

    Recomputation ends with the last value that backward needs: the sum behind an MLP is one if a gate weighs it.
    """
    num_attentions, num_mlps = step.count(ATTENTION), step.count(DENSE_MLP)
    num_exchanges = 4 * (num_attentions + num_mlps) + 2 + 2
    if step.options.activation_checkpointing:
        num_exchanges += 2 * num_attentions + num_mlps + step.count(SHARED_GATE)
    whole = step.num_positions(batch) * step.config.hidden_size * step.computed
    return num_exchanges * _others(step.sizes.tp_size) * whole


def _heads(step: Step, batch: Batch) -> float:
    """Context parallelism: each other rank gets its query heads, and the key and value heads that they need; outputs of
    its positions come back as many.
    """
    config, sizes = step.config, step.sizes
    query = config.num_attention_heads // sizes.tp_size // sizes.cp_size
    if "kv_lora_rank" in config:
        key, key_dim, value_dim = query, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        key = max(1, config.num_key_value_heads // sizes.tp_size // sizes.cp_size)
        key_dim = value_dim = config.head_dim
    numbers = (query + key) * (key_dim + value_dim) * step.num_positions(batch)
    return (sizes.cp_size - 1) * numbers * step.num_exchanges * step.count(ATTENTION) * step.computed


def _linear_heads(step: Step, batch: Batch) -> float:
    """Linear attention over cp and tp together: queries, keys, values, gates and two numbers of a value head there, the
    values back. Runs are 1 / tp of a cp index's positions.
    """
    num_modules = step.count(LINEAR_ATTENTION)
    num_ranks = step.sizes.cp_size * step.sizes.tp_size
    if not num_modules or num_ranks == 1:
        return 0.0
    config = step.config
    key, value = max(1, config.linear_num_key_heads // num_ranks), config.linear_num_value_heads // num_ranks
    numbers = 2 * key * config.linear_key_head_dim + 3 * value * config.linear_value_head_dim + 2 * value
    numbers *= step.num_positions(batch) // step.sizes.tp_size
    return (num_ranks - 1) * numbers * step.num_exchanges * num_modules * step.computed


def _loss(step: Step, batch: Batch) -> float:
    """Over a split vocabulary: the largest logit of each position, then its sum of exponentials and its label's logit,
    all-reduced.
    """
    num_numbers = step.num_positions(batch)
    if batch.loss_positions is not None:
        length = _round_up(batch.labels.size(1), step.sizes.cp_size * step.sizes.tp_size) // step.sizes.cp_size
        own = batch.labels[:, step.cp_rank * length : (step.cp_rank + 1) * length]
        num_numbers = batch.labels.size(0) * max(1, int((own != IGNORE_INDEX).any(dim=0).sum()))
    return 3 * num_numbers * 2 * _others(step.sizes.tp_size) * REDUCED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of tokens that one rank has for each rank of its EP group, itself included, over all layers and
    micro-batches: a row for each (token, expert) pair, or one for each token with any expert there.
    """

    pairs: tuple[int, ...]
    tokens: tuple[int, ...]


def count_rows(routes: Sequence[Tensor], num_experts: int, ep_size: int) -> Rows:
    """``routes``: the experts of each token, [T, K], of one layer and micro-batch after another."""
    chunk = -(-num_experts // ep_size)
    pairs, tokens = Counter[int](), Counter[int]()
    for experts_TK in routes:
        for row in (experts_TK // chunk).tolist():
            pairs.update(row)
            tokens.update(set(row))
    return Rows(pairs=tuple(pairs[p] for p in range(ep_size)), tokens=tuple(tokens[p] for p in range(ep_size)))


def least_rows(step: Step, rows: Sequence[Rows], rank: int) -> tuple[int, int]:
    """Bytes of tokens that the ``rank``-th of an EP group sends, ``rows`` being those of all its ranks: one row for
    each (token, distinct remote rank), and for comparison one for each (token, remote expert).

    What it sent comes back through the same ranks, and backward repeats both; also where tokens are sent again for
    recomputation.
    """
    passes = 3 if step.options.exchanged_tokens == "recompute" else 2
    row = step.config.hidden_size * step.computed
    others = [peer for peer in range(len(rows)) if peer != rank]
    tokens = sum(rows[rank].tokens[peer] + rows[peer].tokens[rank] for peer in others)
    pairs = sum(rows[rank].pairs[peer] + rows[peer].pairs[rank] for peer in others)
    return passes * row * tokens, passes * row * pairs


def _others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _round_up(number: int, multiple: int) -> int:
    return number + -number % multiple
