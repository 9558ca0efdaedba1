"""transformers' experts seam: what marks a module, and that no family at it is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from moesaic.model.build import build_on_meta
from moesaic.model.seam import find_experts, is_at_seam, num_experts, stacked_params, up_name
from moesaic.parallel.activation_checkpointing import apply_activation_checkpointing
from moesaic.parallel.outer import find_blocks
from moesaic.specs import ModelSpec, find_spec, refusal
from moesaic.train.flops import build_model_flops
from tests.families.configs import MODEL_TYPES, NUM_EXPERTS, tiny_config

# Of two classes of one family, the one that is no language model.
TRAINED = [model_type for model_type in MODEL_TYPES if refusal(model_type) is None]


def test_every_family_at_the_seam_is_listed() -> None:
    """A new release of transformers brings families: each needs a tiny model here, or a reason in specs/refused.py."""
    models = Path(transformers.__file__).parent / "models"
    at_seam = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "\n@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    listed = {type(tiny_config(model_type)).__module__.split(".")[-2] for model_type in MODEL_TYPES}
    assert len(at_seam) == 64 and listed == at_seam


@pytest.mark.parametrize("model_type", TRAINED)
def test_experts_are_found_and_counted(model_type: str) -> None:
    model = build_on_meta(tiny_config(model_type), attn_implementation=None, dtype=torch.float32)
    experts = find_experts(model)
    assert experts
    for module in experts.values():
        params = stacked_params(module)
        assert num_experts(module) == NUM_EXPERTS and up_name(module) in params
        assert (set(module.parameters()) == set(params.values())) == (model_type != "muse_spark")
    flops = build_model_flops(model, find_spec(model.config.model_type))
    num_params = sum(param.numel() for param in model.parameters())
    assert 0 < flops.per_token < 6 * num_params, "a token meets some of the experts only"


def test_a_pattern_names_some_of_the_experts() -> None:
    model = build_on_meta(tiny_config("ernie4_5_vl_moe"), attn_implementation=None, dtype=torch.float32)
    pattern = "model.language_model.layers.*.mlp.text_moe.experts"
    assert len(find_experts(model)) == 2 * len(find_experts(model, pattern)) == 2
    with pytest.raises(ValueError, match=r"not at transformers' experts seam.*self_attn.*FSDP2 alone"):
        find_experts(model, "model.language_model.layers.*.self_attn")
    with pytest.raises(ValueError, match="matches no name"):
        find_experts(model, "model.layers.*.experts")


def test_a_parameter_that_the_seam_does_not_know_is_refused() -> None:
    model = build_on_meta(tiny_config("qwen3_moe"), attn_implementation=None, dtype=torch.float32)
    experts = next(iter(find_experts(model).values()))
    assert is_at_seam(experts) and not is_at_seam(model)
    experts.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"scale.*'down_proj', 'gate_up_proj'.*FSDP2 alone"):
        stacked_params(experts)


def test_a_spec_is_derived_where_none_is_registered() -> None:
    spec = find_spec("any_at_all")
    assert spec == ModelSpec(model_types=("any_at_all",)) and spec.experts is None


def test_a_family_that_chooses_without_a_topk_is_not_checkpointed() -> None:
    """Nothing would keep its choice, and the recomputation might make another."""
    model = build_on_meta(tiny_config("phimoe"), attn_implementation=None, dtype=torch.float32)
    with pytest.raises(ValueError, match="phimoe.*choose without a top-k"):
        apply_activation_checkpointing(model, find_blocks(model))
