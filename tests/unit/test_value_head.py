"""A value is what the head makes of the last hidden state, whatever the family does to logits around its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moesaic.model.buffers import materialize
from moesaic.model.value_head import build_value_model_on_meta, value_head_name
from tests.families.configs import tiny_config

# A scale of logits; of hidden states; a cap that may be none; one that must be there, under a scale that routers share.
FAMILIES = (
    *("cohere2_moe", "granitemoe", "inkling_text", "gemma4_text", "beam"),
    *("inkling2_text", "mistral_large4", "muse_spark"),
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_nothing_is_done_to_values_but_what_the_head_does(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    model = build_value_model_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32).eval()
    materialize(model, "cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    name = value_head_name(model)
    assert name is not None
    weight = model.get_submodule(name).weight
    nn.init.normal_(weight, std=400.0)  # beyond every cap, norms being of 0.1
    last: list[Tensor] = []
    model.base_model.register_forward_hook(lambda _module, _args, output: last.append(output.last_hidden_state))
    with torch.no_grad():
        values = model(input_ids=torch.arange(7, 15)[None], use_cache=False, logits_to_keep=torch.tensor([2, 5])).logits
    assert values.abs().max() > 50
    torch.testing.assert_close(values, (last[0] @ weight.T)[:, [2, 5]])
