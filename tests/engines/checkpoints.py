"""Tiny checkpoints whose sizes vLLM's CPU kernels take, and what its layouts are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moesaic.engines.base import Sources
from moesaic.engines.vllm_layout import EngineRank, engine_rank, load_targets
from moesaic.reshard.layout import Copy, TargetLayout

# Heads and experts' sizes are multiples of 32: what the CPU's kernels ask for. 500 words are padded to 512.
SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 32},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "shared_expert_intermediate_size": 64,
        "num_attention_heads": 4,
        "hidden_size": 128,
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 64, "head_dim": 32},
    # A bias of the router that vLLM's reload treats apart.
    "glm4_moe": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "head_dim": 32,
        "first_k_dense_replace": 0,
    },
    # Has a buffer that is loaded.
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 32,
        "intermediate_size": 96,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def save_checkpoint(folder: Path, model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random model, also in ``folder``; no tensor has its initial value (norms of ones would hide a mix-up)."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**SIZES, **OWN_SIZES[model_type], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def read_files(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def sources_of(files: dict[str, Tensor]) -> Sources:
    """What ``trace_model`` needs of them."""
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in files.items()}


# The engines that are planned for; each as all of its ranks.
ENGINES: dict[str, list[EngineRank]] = {
    "tp1": EngineRank.all_of(),
    "tp2": EngineRank.all_of(tp_size=2),
    "tp4": EngineRank.all_of(tp_size=4),
    "ep2": EngineRank.all_of(tp_size=2, expert_parallel=True),
    "dp2-ep2": EngineRank.all_of(dp_size=2, expert_parallel=True),
    "dp2-tp2": EngineRank.all_of(dp_size=2, tp_size=2),
    "tp2-ep2": EngineRank.all_of(dp_size=2, tp_size=2, expert_parallel=True),
    "pp2": EngineRank.all_of(pp_size=2),
}


@torch.no_grad()
def replay(layout: TargetLayout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a layout says that the loader does, done to real tensors; NaN where it says nothing."""
    made = {each.name: torch.full(each.shape, torch.nan, dtype=each.dtype) for each in layout.tensors}
    for fill in layout.fills:
        made[fill.target].as_strided(fill.shape, fill.target_strides, fill.target_offset).fill_(fill.value)
    for copy in layout.copies:
        made[copy.target].as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(
            cut_source(copy, tensors[copy.source])
        )
    return made


def cut_source(copy: Copy, source: Tensor) -> Tensor:
    """The elements that a copy reads, in its shape."""
    strides = source.stride()
    offset = sum(start * stride for start, stride in zip(copy.source_start, strides, strict=True))
    steps = [
        0 if dim is None else step * strides[dim] for dim, step in zip(copy.source_dims, copy.source_steps, strict=True)
    ]
    return source.as_strided(copy.shape, steps, source.storage_offset() + offset)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    """The same names, and the same bits."""
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), f"{what}: {name}"


def pairs(files: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """As ``load_weights`` wants them; each its own copy, since a loader may write to what it is given."""
    return ((key, tensor.clone()) for key, tensor in files.items())


def load_real(
    folder: Path, rank: EngineRank, weights: Callable[[], Iterable[tuple[str, Tensor]]], *, dtype: str
) -> dict[str, Tensor]:
    """Every parameter (and buffer that is loaded) of one rank after vLLM's own loader has run on real tensors, in
    load-time layout: what a plan is compared with."""
    with engine_rank(folder, rank, dtype=dtype) as model:
        model.load_weights(weights())
        keys = [key for key, _ in weights()]
        return {name: tensor.data.clone() for name, tensor in load_targets(model, keys).items()}
