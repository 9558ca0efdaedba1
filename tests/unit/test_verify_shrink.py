"""Small copies of large configs: every kind of layer, the ratios, and what the topology divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from moesaic.config import ParallelSizes
from moesaic.model.build import build_on_meta
from moesaic.verify.shrink import (
    count_layers_of_every_kind,
    count_parameters,
    layer_kinds,
    shrink_config,
    special_tokens,
    without_noise,
)

SIZES = ParallelSizes(world_size=8, cp_size=2, tp_size=2, ep_size=4)
# Of real sizes, and few layers only so that building them takes no time.
LARGE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 12, "vocab_size": 151936,
        "eos_token_id": 151645, "bos_token_id": 151643, "attention_dropout": 0.1,
    },
    "mixtral": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 8, "first_k_dense_replace": 3},
    "gpt_oss": {"num_hidden_layers": 6},
    "qwen3_5_moe_text": {"num_hidden_layers": 8},
}  # fmt: skip


def model_of(config: PreTrainedConfig) -> Any:
    return build_on_meta(config, attn_implementation=None, dtype=torch.float32)


@pytest.mark.parametrize("model_type", LARGE)
def test_small_copies(model_type: str) -> None:
    large = AutoConfig.for_model(model_type, **LARGE[model_type])
    small, left_out = shrink_config(large, SIZES)
    assert not left_out
    before, after = model_of(large), model_of(small)
    assert set(layer_kinds(after)) == set(layer_kinds(before))
    assert len(layer_kinds(after)) == count_layers_of_every_kind(large)
    assert count_parameters(after) < 2**26 < count_parameters(before)
    for one in (large, small):
        assert one.num_attention_heads % 4 == 0, "tp * cp divides the heads"
    ratio = large.num_attention_heads // large.num_key_value_heads
    assert small.num_attention_heads == small.num_key_value_heads * ratio
    experts = {name: value for name, value in large.to_dict().items() if name.endswith("experts") or "group" in name}
    assert {name: small.to_dict()[name] for name in experts} == experts
    assert small.num_experts_per_tok == large.num_experts_per_tok


def test_what_the_ranks_divide_stays_divided() -> None:
    small, _ = shrink_config(AutoConfig.for_model("qwen3_moe", **LARGE["qwen3_moe"]), SIZES)
    assert small.hidden_size % 8 == small.moe_intermediate_size % 8 == small.vocab_size % 8 == 0
    large = AutoConfig.for_model("qwen3_moe", **{**LARGE["qwen3_moe"], "moe_intermediate_size": 770})
    odd, _ = shrink_config(large, ParallelSizes(world_size=6))
    assert odd.moe_intermediate_size % 2 == 0 and odd.moe_intermediate_size < 770


def test_special_tokens_stay_in_the_vocabulary_and_apart() -> None:
    small, _ = shrink_config(AutoConfig.for_model("qwen3_moe", **LARGE["qwen3_moe"]), SIZES)
    ids = {small.eos_token_id, small.bos_token_id}
    assert len(ids) == 2 and ids <= special_tokens(small) and max(ids) < small.vocab_size


def test_noise_is_off_in_every_part() -> None:
    fields = {"attention_dropout": 0.1, "text_config": {"router_jitter_noise": 0.01, "hidden_size": 8}, "x": 1.0}
    assert without_noise(fields) == {
        "attention_dropout": 0.0,
        "text_config": {"router_jitter_noise": 0.0, "hidden_size": 8},
        "x": 1.0,
    }
    small, _ = shrink_config(AutoConfig.for_model("qwen3_moe", **LARGE["qwen3_moe"]), SIZES)
    assert small.attention_dropout == 0


def test_a_small_config_stays_as_it_is() -> None:
    fields = {**LARGE["qwen3_moe"], "hidden_size": 32, "moe_intermediate_size": 16, "vocab_size": 64}
    ids = {"eos_token_id": 1, "bos_token_id": 2}
    small, _ = shrink_config(AutoConfig.for_model("qwen3_moe", **{**fields, **ids}), SIZES)
    assert (small.hidden_size, small.moe_intermediate_size, small.vocab_size) == (32, 16, 64)


def test_a_family_without_any_small_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.verify.shrink.MAX_PARAMETERS", 1)
    with pytest.raises(ValueError, match="no small model of its structure could be made.*parameters"):
        shrink_config(AutoConfig.for_model("gpt_oss", **LARGE["gpt_oss"]), SIZES)
