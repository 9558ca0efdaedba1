"""What an engine of tensor, expert and pipeline parallel ranks loads of a Qwen3-MoE model, written down by hand.

Names and layout as vLLM's Qwen3-MoE: q, k and v fused in rows, gate and up fused in rows of ``w13``, key heads repeated
where there are fewer than tp ranks, the vocabulary padded. For tests and benchmarks without vLLM; that it is what
vLLM's own loader does is asserted by tests/engines/test_closed_form.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moesaic.reshard.layout import Copy, Fill, Shape, TargetLayout, TargetTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Sizes of a Qwen3-MoE model; ``intermediate_size`` is an expert's."""

    num_layers: int
    hidden_size: int
    num_experts: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """One rank of an engine.

    Attributes:
        tp_size, tp_rank: for attention and vocabulary, and for experts where ``ep_size`` is 1.
        ep_size, ep_rank: whole experts in even runs, in the place of tp for experts.
        layers: that a pipeline stage has; the embedding, the last norm and the head are on every stage.
        vocab_multiple: rows of the vocabulary are padded with zeros to a multiple of it.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    layers: range | None = None
    vocab_multiple: int = 64


def build_target(shape: MoeShape, rank: EngineRank, dtype: torch.dtype = torch.bfloat16) -> TargetLayout:
    """The layout of one engine rank, sources under the trained model's names (experts stacked)."""
    builder = _Builder(dtype)
    layers = range(shape.num_layers) if rank.layers is None else rank.layers
    _add_vocabulary(builder, shape, rank, "model.embed_tokens.weight")
    for layer in layers:
        _add_attention(builder, shape, rank, f"model.layers.{layer}.")
        _add_experts(builder, shape, rank, f"model.layers.{layer}.mlp.")
    builder.add("model.norm.weight", (shape.hidden_size,), ("model.norm.weight", (0,), (shape.hidden_size,)))
    _add_vocabulary(builder, shape, rank, "lm_head.weight")
    return TargetLayout(tensors=tuple(builder.tensors), copies=tuple(builder.copies), fills=tuple(builder.fills))


class _Builder:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: list[TargetTensor] = []
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []

    def add(self, name: str, shape: Shape, *parts: tuple[str, Shape, Shape], along: int = 0) -> None:
        """A tensor that boxes (source, start, size) fill, one behind the other along one dim."""
        strides = _strides(shape)
        offset = 0
        for source, start, size in parts:
            self.copies.append(
                Copy(
                    source=source,
                    target=name,
                    shape=size,
                    source_start=start,
                    source_dims=tuple(range(len(size))),
                    source_steps=(1,) * len(size),
                    target_offset=offset,
                    target_strides=strides,
                )
            )
            offset += size[along] * strides[along]
        self.tensors.append(TargetTensor(name=name, shape=shape, dtype=self.dtype))


def _add_vocabulary(builder: _Builder, shape: MoeShape, rank: EngineRank, name: str) -> None:
    padded = -(-shape.vocab_size // rank.vocab_multiple) * rank.vocab_multiple
    rows = padded // rank.tp_size
    start = rows * rank.tp_rank
    num_real = max(0, min(rows, shape.vocab_size - start))
    parts = [(name, (start, 0), (num_real, shape.hidden_size))] if num_real else []
    builder.add(name, (rows, shape.hidden_size), *parts)
    if num_real < rows:
        size = (rows - num_real, shape.hidden_size)
        offset = num_real * shape.hidden_size
        builder.fills.append(
            Fill(target=name, shape=size, target_offset=offset, target_strides=_strides(size), value=0.0)
        )


def _add_attention(builder: _Builder, shape: MoeShape, rank: EngineRank, layer: str) -> None:
    hidden, prefix = shape.hidden_size, f"{layer}self_attn."
    q_rows = shape.num_heads // rank.tp_size * shape.head_dim
    kv_rows = max(1, shape.num_kv_heads // rank.tp_size) * shape.head_dim
    # Where there are fewer key heads than ranks, neighbours share one.
    kv_start = rank.tp_rank * shape.num_kv_heads // rank.tp_size * shape.head_dim
    q_start = q_rows * rank.tp_rank
    builder.add(
        f"{prefix}qkv_proj.weight",
        (q_rows + 2 * kv_rows, hidden),
        (f"{prefix}q_proj.weight", (q_start, 0), (q_rows, hidden)),
        (f"{prefix}k_proj.weight", (kv_start, 0), (kv_rows, hidden)),
        (f"{prefix}v_proj.weight", (kv_start, 0), (kv_rows, hidden)),
    )
    o_proj = f"{prefix}o_proj.weight"
    builder.add(o_proj, (hidden, q_rows), (o_proj, (0, q_start), (hidden, q_rows)))
    for name in (f"{prefix}q_norm.weight", f"{prefix}k_norm.weight"):
        builder.add(name, (shape.head_dim,), (name, (0,), (shape.head_dim,)))
    for name in (f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"):
        builder.add(name, (hidden,), (name, (0,), (hidden,)))


def _add_experts(builder: _Builder, shape: MoeShape, rank: EngineRank, mlp: str) -> None:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    router = f"{mlp}gate.weight"
    builder.add(router, (shape.num_experts, hidden), (router, (0, 0), (shape.num_experts, hidden)))
    each, left = divmod(shape.num_experts, rank.ep_size)  # the first ranks have one more
    first = each * rank.ep_rank + min(rank.ep_rank, left)
    count = each + (rank.ep_rank < left)
    width = inner // rank.tp_size if rank.ep_size == 1 else inner
    start = width * rank.tp_rank if rank.ep_size == 1 else 0
    gate_up, down = f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"
    builder.add(
        f"{mlp}experts.routed_experts.w13_weight",
        (count, 2 * width, hidden),
        (gate_up, (first, start, 0), (count, width, hidden)),
        (gate_up, (first, inner + start, 0), (count, width, hidden)),
        along=1,
    )
    w2 = f"{mlp}experts.routed_experts.w2_weight"
    builder.add(w2, (count, hidden, width), (down, (first, 0, start), (count, hidden, width)))


def engine_ranks(name: str, num_layers: int) -> Sequence[EngineRank]:
    """The ranks of an engine by the name of its layout: ``tp<n>``, ``ep2``, ``tp2ep2``, ``dp2tp2``, ``pp2``."""
    half = num_layers // 2
    known = {
        "ep2": [EngineRank(ep_size=2, ep_rank=ep) for ep in range(2)],
        "tp2ep2": [EngineRank(tp_size=2, tp_rank=rank, ep_size=2, ep_rank=rank) for rank in range(2)],
        "dp2tp2": [EngineRank(tp_size=2, tp_rank=rank % 2, ep_size=4, ep_rank=rank) for rank in range(4)],
        "pp2": [EngineRank(layers=range(half)), EngineRank(layers=range(half, num_layers))],
    }
    if name in known:
        return known[name]
    size = int(name.removeprefix("tp"))
    return [EngineRank(tp_size=size, tp_rank=rank) for rank in range(size)]


def _strides(shape: Shape) -> Shape:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))
