"""vLLM's own classes, built for any rank: what the trace says is what their loader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.engines.vllm_layout import EngineRank, engine_rank, require_all_used, trace_engine, trace_model
from tests.engines.checkpoints import (
    ENGINES,
    assert_equal,
    load_real,
    pairs,
    read_files,
    replay,
    save_checkpoint,
    sources_of,
)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gemma4": ("gemma4_text", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_what_the_loader_does(case: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    save_checkpoint(tmp_path, model_type, **overrides)
    files = read_files(tmp_path)
    for name, ranks in ENGINES.items():
        layouts = trace_engine(tmp_path, ranks, sources_of(files))
        for rank, layout in zip(ranks, layouts, strict=True):
            theirs = load_real(tmp_path, rank, lambda: pairs(files), dtype="float32")
            traced = {tensor.name for tensor in layout.tensors}
            assert traced == theirs.keys()
            # Padding that no loader writes is whatever the memory was: then a fill says so, and zero is as good.
            assert_equal(replay(layout, files), {key: theirs[key] for key in traced}, f"{name} {rank}")


def test_a_pipeline_stage_has_its_own_layers_only(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3_moe")
    first, last = trace_engine(tmp_path, ENGINES["pp2"], sources_of(read_files(tmp_path)))
    for layout, own, other in ((first, ".layers.0.", ".layers.1."), (last, ".layers.1.", ".layers.0.")):
        names = [tensor.name for tensor in layout.tensors]
        assert any(own in name for name in names) and not any(other in name for name in names)
    assert "model.embed_tokens.weight" in {tensor.name for tensor in first.tensors}
    assert "lm_head.weight" in {tensor.name for tensor in last.tensors}


def test_a_bias_that_the_checkpoint_lacks_is_zero(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen2_moe", qkv_bias=False)
    files = read_files(tmp_path)
    assert not any(key.endswith("bias") for key in files)
    for rank, layout in zip(ENGINES["tp2"], trace_engine(tmp_path, ENGINES["tp2"], sources_of(files)), strict=True):
        made = replay(layout, files)
        assert not any(tensor.isnan().any() for tensor in made.values()), rank
        assert made["model.layers.0.self_attn.qkv_proj.bias"].abs().max() == 0


def test_keys_that_no_rank_loads_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "mixtral")
    files = read_files(tmp_path)
    prefix = "model.layers.0.mlp.experts."
    rest = {key: tensor for key, tensor in files.items() if ".layers.0.block_sparse_moe.experts." not in key}
    stacked = {f"{prefix}gate_up_proj": torch.zeros(8, 128, 64), f"{prefix}down_proj": torch.zeros(8, 64, 64)}
    with pytest.raises(ValueError, match="experts"):
        trace_engine(tmp_path, ENGINES["tp1"], sources_of(rest | stacked))
    with engine_rank(tmp_path, EngineRank()) as model:
        layout = trace_model(model, sources_of(files))
    with pytest.raises(ValueError, match="no rank of the engine loads"):
        require_all_used([layout], [*files, "extra.weight"])
