"""Engine ranks for reshard tests: a plain transformers model, and the tensors of ``bench.engine_layouts`` cut from
whole ones by slicing alone."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from bench.engine_layouts import EngineRank, MoeShape, build_target
from moesaic.reshard.layout import Copy, Shape, TargetLayout, TargetTensor


def whole(shapes: Mapping[str, Shape], dtype: torch.dtype = torch.float32) -> TargetLayout:
    """Every tensor whole, under its own name."""
    copies = [
        Copy(
            source=name,
            target=name,
            shape=shape,
            source_start=(0,) * len(shape),
            source_dims=tuple(range(len(shape))),
            source_steps=(1,) * len(shape),
            target_offset=0,
            target_strides=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
        )
        for name, shape in shapes.items()
    ]
    tensors = [TargetTensor(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]
    return TargetLayout(tensors=tuple(tensors), copies=tuple(copies), fills=())


def layout_of(config: object, rank: EngineRank | None, full: Mapping[str, Tensor], dtype: torch.dtype) -> TargetLayout:
    """The layout of one engine rank (None: plain transformers) for a Qwen3-MoE model of ``config``."""
    if rank is None:
        return whole({name: tuple(tensor.shape) for name, tensor in full.items()}, dtype)
    layout = build_target(shape_of(config), rank, dtype)
    if "lm_head.weight" in full:
        return layout
    return dataclasses.replace(  # tied: the engine has one tensor too
        layout,
        tensors=tuple(tensor for tensor in layout.tensors if tensor.name != "lm_head.weight"),
        copies=tuple(copy for copy in layout.copies if copy.target != "lm_head.weight"),
        fills=tuple(fill for fill in layout.fills if fill.target != "lm_head.weight"),
    )


def shape_of(config: object) -> MoeShape:
    """Sizes from a transformers config."""
    fields = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_experts": "num_experts",
        "intermediate_size": "moe_intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
    }
    return MoeShape(**{ours: getattr(config, theirs) for ours, theirs in fields.items()})


def cut(full: Mapping[str, Tensor], head_dim: int, rank: EngineRank | None) -> dict[str, Tensor]:
    """The tensors that ``layout_of`` describes, cut from the whole ones."""
    if rank is None:
        return dict(full)
    tp_size, tp_rank = rank.tp_size, rank.tp_rank
    result = {}
    for name, tensor in full.items():
        if re.search(r"\.[kv]_proj\.weight$", name):
            continue
        if name.endswith("q_proj.weight"):
            parts = [tensor.chunk(tp_size)[tp_rank]]
            for kind in "kv":
                heads = full[name.replace("q_proj", f"{kind}_proj")].split(head_dim)
                share = max(1, len(heads) // tp_size)
                start = tp_rank * len(heads) // tp_size
                parts += heads[start : start + share]
            result[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif name.endswith("o_proj.weight"):
            result[name] = tensor.chunk(tp_size, 1)[tp_rank]
        elif name.endswith("experts.gate_up_proj"):
            halves = _experts(tensor, rank).chunk(2, 1)
            if rank.ep_size == 1:
                halves = tuple(half.chunk(tp_size, 1)[tp_rank] for half in halves)
            result[name.replace("gate_up_proj", "routed_experts.w13_weight")] = torch.cat(halves, 1)
        elif name.endswith("experts.down_proj"):
            mine = _experts(tensor, rank)
            result[name.replace("down_proj", "routed_experts.w2_weight")] = (
                mine if rank.ep_size > 1 else mine.chunk(tp_size, 2)[tp_rank]
            )
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            padding = tensor.new_zeros(-len(tensor) % rank.vocab_multiple, *tensor.shape[1:])
            result[name] = torch.cat([tensor, padding]).chunk(tp_size)[tp_rank]
        else:
            result[name] = tensor
    return result


def _experts(stack: Tensor, rank: EngineRank) -> Tensor:
    return stack.tensor_split(rank.ep_size)[rank.ep_rank]  # the first ranks have one more
