"""Families' own disk layouts: what transformers saves loads bit for bit, and is exported as it came. One of each kind;
all families: tests/families/layouts.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta, find_auto_class
from moesaic.weights import export_hf, load_weights
from tests.families.configs import tiny_config
from tests.unit.tiny_checkpoints import counted_reads

KINDS = {
    "qwen3_moe": "one tensor per expert",
    "mixtral": "w1, w3, w2, and renamed",
    "qwen3_5_moe_text": "stacked",
    "qwen3_vl_moe": "stacked, perhaps transposed",
    "aria_text": "stacked and transposed in the module too",
    "inkling2_text": "gate and up rows alternating",
    "nemotron_h": "no gate",
    "granitemoe": "stacked, renamed",
    "kimi_linear": "a convolution in three parts",
    "ernie4_5_vl_moe": "text and vision experts in one list",
}

# Whose models, if they weren't loaded, are exported otherwise than transformers saves them: as the Hub has them
# (see STACKED_ON_HUB); a tied tensor under the first of its names.
WRITTEN_OTHERWISE = frozenset({"qwen3_5_moe_text", "diffusion_gemma"})


def save_random(folder: Path, model_type: str) -> PreTrainedModel:
    """A model whose every value differs, also written by transformers."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = find_auto_class(config).from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        values = torch.rand(tensor.shape) if tensor.is_floating_point() else torch.randint(0, 100, tensor.shape)
        tensor.copy_(values)
    model.save_pretrained(folder)
    return model


def load_equals(folder: Path, reference: PreTrainedModel) -> PreTrainedModel:
    """The model of a folder, loaded by us; its values are ``reference``'s."""
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    materialize(model, "cpu")
    with counted_reads() as counter:
        report = load_weights(model, folder)
    assert not report.ignored_keys
    expected = {id(tensor): tensor.nbytes for tensor in reference.state_dict(keep_vars=True).values()}
    assert counter["num_bytes"] == sum(expected.values())
    mine, theirs = model.state_dict(), reference.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    return model


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def check_layouts(model_type: str, folder: Path) -> None:
    """As transformers writes it, and under the module's own names: load, export, compare files bit for bit."""
    reference = save_random(folder / "hub", model_type)
    files = contents(folder / "hub")
    export_hf(load_equals(folder / "hub", reference), folder / "again")
    assert_same(contents(folder / "again"), files)
    if model_type not in WRITTEN_OTHERWISE:
        export_hf(reference, folder / "default")
        assert_same(contents(folder / "default"), files)

    unique = {id(tensor): name for name, tensor in reversed(reference.state_dict(keep_vars=True).items())}
    own = {name: reference.state_dict()[name].contiguous() for name in unique.values()}
    save_file(own, folder / "hub" / "model.safetensors", metadata={"format": "pt"})
    export_hf(load_equals(folder / "hub", reference), folder / "own")
    assert_same(contents(folder / "own"), own)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_layout(model_type: str, tmp_path: Path) -> None:
    check_layouts(model_type, tmp_path)
