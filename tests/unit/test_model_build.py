"""A model built on meta and given storage equals what from_pretrained makes, weights aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from tests.unit.tiny_checkpoints import MODEL_TYPES, save_tiny, tiny_config


@pytest.mark.parametrize("attn_implementation", [None, "sdpa", "eager"])
def test_attention_is_what_from_pretrained_picks(attn_implementation: str | None, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, **chosen)
    model = build_on_meta(tmp_path, attn_implementation=attn_implementation, dtype=torch.float32)
    assert type(model) is type(reference)
    assert model.config._attn_implementation == reference.config._attn_implementation
    assert model.config._experts_implementation == reference.config._experts_implementation
    assert model.config.to_dict() == reference.config.to_dict()
    assert model.config.use_cache == reference.config.use_cache
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_attention_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="made_up"):
        build_on_meta(tmp_path, attn_implementation="made_up", dtype=torch.float32)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_equal_from_pretrained(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = build_on_meta(tmp_path, attn_implementation=None, dtype=dtype)
    state = torch.get_rng_state()
    materialize(model, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    mine, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    assert list(mine) == list(theirs)
    assert any(name.endswith("inv_freq") for name in mine)
    for name, buffer in theirs.items():
        assert mine[name].dtype == buffer.dtype, name
        assert torch.equal(mine[name], buffer), name
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in reference.named_parameters()
    }
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_scaled_rotary_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    save_tiny(tmp_path, "qwen3_moe", rope_parameters=rope)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)
    materialize(model, "cpu")
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == reference.model.rotary_emb.attention_scaling != 1.0


def test_generation_config_is_what_from_pretrained_loads(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3_moe")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=[3, 4])
    model.generation_config.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    built = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)
    assert built.generation_config.temperature == 0.5
    assert built.generation_config.to_dict() == reference.generation_config.to_dict()
    (tmp_path / "generation_config.json").unlink()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    built = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)
    assert built.generation_config.to_dict() == reference.generation_config.to_dict()


def test_a_config_is_copied() -> None:
    config = tiny_config("qwen3_moe")
    before = config.to_dict()
    model = build_on_meta(config, attn_implementation="eager", dtype=torch.bfloat16)
    assert config.to_dict() == before
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.bfloat16


def test_the_text_model_of_a_multimodal_config(tmp_path: Path) -> None:
    """What the Hub's Qwen3.5 folders hold: a config with a text part, of which the text model is built."""
    text = tiny_config("qwen3_5_moe_text")
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text.to_dict())
    config.save_pretrained(tmp_path)
    model = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM"
    assert model.config.model_type == "qwen3_5_moe_text"


def test_what_a_family_keeps_in_fp32_stays_so() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    model = build_on_meta(config, attn_implementation=None, dtype=torch.bfloat16)
    bias = model.get_buffer("model.layers.0.mlp.gate.e_score_correction_bias")
    assert (bias.dtype, model.dtype) == (torch.float32, torch.bfloat16)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model=.*has no config.json.*Download"):
        build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)


def test_tied_tensors_stay_tied() -> None:
    config = tiny_config("qwen3_moe", tie_word_embeddings=True)
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    materialize(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def test_what_nothing_computes_is_named() -> None:
    model = build_on_meta(tiny_config("qwen3_moe"), attn_implementation=None, dtype=torch.float32)
    with torch.device("meta"):
        model.model.layers[1].register_buffer("lost", torch.ones(3), persistent=False)
        model.model.layers[0].mlp.forgotten = torch.ones(2)
        model.model.layers[0].register_buffer("kept", torch.ones(3))  # persistent: the files hold it
    with pytest.raises(ValueError, match="can't be built on meta") as caught:
        materialize(model, "cpu")
    assert "model.layers.1.lost" in str(caught.value)
    assert "model.layers.0.mlp.forgotten" in str(caught.value)
    assert "kept" not in str(caught.value)
    assert "inv_freq" not in str(caught.value)


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_parameters_are_left_to_the_loader() -> None:
    """Their memory is whatever it was: initialising them would cost time at every start."""
    model = build_on_meta(tiny_config("qwen3_moe"), attn_implementation=None, dtype=torch.float32)
    with Operators() as ran:
        materialize(model, "cpu")
    assert "copy_" in ran.names  # the rotary frequencies
    assert not ran.names & {"normal_", "uniform_", "fill_", "zero_"}
    assert json.dumps(model.config.to_dict())  # nothing of ours got into the config
