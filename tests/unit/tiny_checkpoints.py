"""Tiny Hugging Face models of each family, saved by transformers itself; a count of bytes read from safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # of the reference loads, which would fill the log of a parallel run

MODEL_TYPES = ("qwen3_moe", "qwen2_moe", "mixtral", "qwen3_5_moe_text")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 24, "head_dim": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "intermediate_size": 24,
        "shared_expert_intermediate_size": 12,
    },
    "mixtral": {"num_local_experts": 4, "intermediate_size": 8},
    "qwen3_5_moe_text": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    },
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A config whose model has some thousand parameters."""
    fields: dict[str, Any] = {**SIZES, **OWN_SIZES[model_type], "num_experts_per_tok": 2, **overrides}
    return AutoConfig.for_model(model_type, **fields)


def save_tiny(folder: Path, model_type: str, max_shard_size: str = "1GB", **overrides: Any) -> PreTrainedModel:
    """A randomly initialised model, also written to ``folder`` by transformers. Every tensor differs from its initial
    value (norms of ones would hide a mix-up)."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def assert_same_state(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """The same keys, and the same bits in each tensor."""
    mine, theirs = model.state_dict(), reference.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


class CountingSlice:
    """A safetensors slice that adds up what is taken from it."""

    def __init__(self, inner: Any, counter: dict[str, int]) -> None:
        self._inner, self._counter = inner, counter

    def __getitem__(self, index: Any) -> torch.Tensor:
        value = self._inner[index]
        self._counter["num_bytes"] += value.numel() * value.element_size()
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def counted_reads(max_open: int = 1) -> Iterator[dict[str, int]]:
    """Count the bytes and files that ``load_weights`` takes out of safetensors. Whole-tensor reads are refused, and so
    are more than ``max_open`` files at a time."""
    counter = {"num_bytes": 0, "num_open": 0}

    class CountingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._inner = safe_open(*args, **kwargs)

        def __enter__(self) -> CountingFile:
            counter["num_open"] += 1
            assert counter["num_open"] <= max_open, "too many files open at a time"
            self._inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            counter["num_open"] -= 1
            self._inner.__exit__(*error)

        def keys(self) -> list[str]:
            return self._inner.keys()

        def get_slice(self, key: str) -> CountingSlice:
            return CountingSlice(self._inner.get_slice(key), counter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.weights.load.safe_open", CountingFile)
        yield counter
