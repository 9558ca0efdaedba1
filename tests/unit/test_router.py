"""Which routers, logits and biases are found in which families; what a recipe and a model's own config ask for."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from moesaic.config import Recipe
from moesaic.model.build import build_on_meta
from moesaic.model.routers import RoutingRecorder, find_biases, find_routers
from moesaic.parallel.freeze import freeze_modules
from moesaic.train.router import RouterOptions
from moesaic.train.setup import router_options
from tests.families.configs import tiny_config


def on_meta(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_on_meta(tiny_config(model_type), attn_implementation=None, dtype=dtype)


@pytest.mark.parametrize(
    ("model_type", "bias"),
    [
        ("deepseek_v3", "gate.e_score_correction_bias"),
        ("minimax_m2", "e_score_correction_bias"),
        ("lfm2_moe", "expert_bias"),
        ("ernie4_5_moe", "gate.moe_statics.e_score_correction_bias"),
        ("laguna", "gate.e_score_correction_bias"),
    ],
)
def test_biases_are_buffers_or_frozen_parameters(model_type: str, bias: str) -> None:
    model = on_meta(model_type)
    found = find_biases(model)
    named = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    expected = [f"{experts.rpartition('.')[0]}.{bias}" for experts in found]
    assert expected and [named[id(tensor)] for tensor in found.values()] == expected
    assert find_routers(model).keys() == found.keys()


def test_layers_that_hash_tokens_have_no_router_losses() -> None:
    model = on_meta("deepseek_v4")
    assert list(find_routers(model)) == ["model.layers.1.mlp.experts"]
    assert list(find_biases(model)) == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize("model_type", ["gemma4_text", "ernie4_5_vl_moe"])
def test_families_without_router_logits_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"{model_type}.*give out no logits"):
        find_routers(on_meta(model_type))


def test_models_without_experts_or_biases_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM: no router has a correction bias"):
        find_biases(on_meta("qwen3_moe"))
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    with pytest.raises(ValueError, match="LlamaForCausalLM.*give out no logits"):
        find_routers(build_on_meta(config, attn_implementation=None, dtype=torch.float32))


def test_a_bias_in_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match="needs one fp32 number per expert"):
        find_biases(on_meta("laguna", torch.bfloat16))


def test_a_router_that_scores_more_than_experts_is_refused() -> None:
    config = tiny_config("zaya")
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    RoutingRecorder(model.train(), find_routers(model))
    with pytest.raises(ValueError, match="scores 9 choices, and there are 8 experts"):
        model(input_ids=torch.tensor([[9, 10, 11]]), use_cache=False)


def asked(recipe_fields: dict[str, object], **config_fields: object) -> RouterOptions:
    fields = {"model": "m", "train_dataset": "d", "router_config": recipe_fields}
    config = Qwen3MoeConfig(
        hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, vocab_size=8, num_experts=2, num_experts_per_tok=1, **config_fields,
    )  # fmt: skip
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
    return router_options(Recipe.model_validate(fields), model)


def test_the_models_own_coefficient_counts_where_the_recipe_says_nothing() -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    assert asked({}) == RouterOptions()
    assert asked({}, **own) == RouterOptions(aux_loss_coef=0.25)
    assert asked({"aux_loss_coef": 0.0, "z_loss_coef": 0.5}, **own) == RouterOptions(z_loss_coef=0.5)
    assert asked({"aux_loss_coef": 0.125}, **own) == RouterOptions(aux_loss_coef=0.125)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.layers.*.gate",), "matches no name"),
        (("model.rotary_emb",), "only modules without parameters"),
        (("model", "lm_head"), "freeze the whole model"),
    ],
)
def test_frozen_modules_that_mean_nothing_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        freeze_modules(on_meta("qwen3_moe"), patterns)


def test_freezing_takes_all_that_is_in_a_module() -> None:
    model = on_meta("qwen3_moe")
    freeze_modules(model, ("model.layers.0", "model.layers.*.mlp.gate"))
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    expected = {name for name, _ in model.named_parameters() if "layers.0." in name or "mlp.gate." in name}
    assert frozen == expected
