"""What the ranks of a vLLM engine load of a Qwen3-MoE model, traced from vLLM's own loader. Needs vLLM.

Two layers are traced for every rank, resolved to the trained model's parameters, and repeated by name; ``check_full``
compares that with a trace of all layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from bench.engine_layouts import MoeShape
from moesaic.engines.base import Sources
from moesaic.engines.vllm_layout import EngineRank, describe_files, engine_rank, require_all_used, trace_model
from moesaic.reshard.coverage import require_complete
from moesaic.reshard.layout import Shape, TargetLayout
from moesaic.reshard.lift import replicate_layers
from moesaic.reshard.resolve import resolve_layout
from moesaic.weights.export import file_dtypes, find_layout, find_state
from moesaic.weights.tiles import Grid

HAS_VLLM = importlib.util.find_spec("vllm") is not None
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """An export of the trained model, in bf16: what ``trace_model`` and ``resolve_layout`` want to know."""

    sources: Sources
    grids: dict[str, Grid]
    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]


def build_config(shape: MoeShape, num_layers: int) -> Qwen3MoeConfig:
    """The model's config, with some number of layers."""
    return Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )


def build_model(shape: MoeShape, num_layers: int) -> PreTrainedModel:
    """On meta, in fp32."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(build_config(shape, num_layers), dtype=torch.float32)
    return model


def describe_export(shape: MoeShape, num_layers: int) -> Files:
    """The files of a model with ``num_layers`` layers: its experts one by one, as on the Hub."""
    model = build_model(shape, num_layers)
    state, _ = find_state(model)
    grids, shapes = find_layout(model, state)
    return Files(
        sources=describe_files(model, dtype=DTYPE),
        grids=grids,
        shapes=shapes,
        dtypes=file_dtypes(model, state, DTYPE),
    )


def start_vllm(shape: MoeShape, folder: Path) -> None:
    """vLLM's imports, its config of an engine, and its first model: seconds, once in a process."""
    build_config(shape, 2).save_pretrained(folder)
    with engine_rank(folder, EngineRank(), dtype="bfloat16"):
        pass


def trace_ranks(folder: Path, ranks: Sequence[EngineRank], files: Files) -> list[TargetLayout]:
    """The layouts of all ranks of one engine, in the files' keys. ``folder``: with the model's config."""
    layouts = []
    for rank in ranks:
        with engine_rank(folder, rank, dtype="bfloat16") as model:
            layouts.append(trace_model(model, files.sources))
    require_all_used(layouts, files.sources)
    return layouts


def resolve(layout: TargetLayout, files: Files) -> TargetLayout:
    """From the files' keys to the trained model's parameters."""
    return resolve_layout(layout, files.grids, files.shapes, files.dtypes)


def repeat(layouts: Sequence[TargetLayout], files: Files, num_layers: int) -> list[TargetLayout]:
    """From traces of two layers to the layouts of ``num_layers``, in the trained model's parameters."""
    return [replicate_layers(resolve(layout, files), range(num_layers)) for layout in layouts]


def check_full(shape: MoeShape, ranks: Sequence[EngineRank], repeated: Sequence[TargetLayout], folder: Path) -> None:
    """Raise where the repeated layouts aren't what a trace of all layers gives, or lack a parameter of the engine."""
    files = describe_export(shape, shape.num_layers)
    build_config(shape, shape.num_layers).save_pretrained(folder)
    for rank, layout in zip(ranks, repeated, strict=True):
        with engine_rank(folder, rank, dtype="bfloat16") as model:
            require_complete(layout, dict(model.named_parameters()))
            traced = trace_model(model, files.sources)
        if resolve(traced, files) != layout:
            raise AssertionError(f"{rank}: repeated layers differ from a trace of all {shape.num_layers}")
