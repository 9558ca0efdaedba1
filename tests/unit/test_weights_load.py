"""Loading in one process: against transformers' own loading, and the errors that a folder can cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.weights import load_weights
from tests.unit.tiny_checkpoints import MODEL_TYPES, assert_same_state, counted_reads, save_tiny


def build(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = build_on_meta(folder, attn_implementation=None, dtype=dtype)
    materialize(model, "cpu")
    return model


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_equals_from_pretrained(model_type: str, max_shard_size: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, model_type, max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size != "1GB")
    model = build(tmp_path)
    with counted_reads() as counter:
        report = load_weights(model, tmp_path)
    assert_same_state(model, reference)
    assert counter["num_bytes"] == report.num_bytes_read == sum(p.nbytes for p in model.parameters())
    assert report.ignored_keys == ()
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, reference.eval()(tokens).logits)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_stacked_files_without_renames_load_too(model_type: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, model_type)
    save_file(reference.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build(tmp_path)
    load_weights(model, tmp_path)
    assert_same_state(model, reference)


def test_values_are_cast_to_the_dtype_of_the_parameter(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    model = build(tmp_path, torch.bfloat16)
    load_weights(model, tmp_path)
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))


def test_all_problems_come_at_once_and_nothing_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")

    def break_it(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(17)
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].to(torch.int8)
        tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = torch.ones(8, 16)

    edit(tmp_path, break_it)
    model = build(tmp_path)
    with counted_reads() as counter, pytest.raises(ValueError, match="4 problems") as caught:
        load_weights(model, tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.experts.2.up_proj.weight [8, 16]" in message
    assert "shape: model.norm.weight is [17], model.norm.weight needs [16]" in message
    assert "dtype: model.layers.0.mlp.gate.weight is I8" in message
    assert "unknown: model.layers.0.mlp.experts.4.up_proj.weight" in message
    assert "register_checkpoint_conversion_mapping" in message
    assert counter["num_bytes"] == 0


def test_what_the_class_declares_ignorable_is_listed(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3_5_moe_text")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.layers.0.weight"] = torch.ones(2)
        tensors["model.visual.patch_embed.weight"] = torch.ones(2)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    edit(tmp_path, add)
    model = build(tmp_path)
    report = load_weights(model, tmp_path)
    assert set(report.ignored_keys) == {
        "mtp.layers.0.weight",
        "model.visual.patch_embed.weight",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
    }
    assert_same_state(model, reference)


@pytest.mark.parametrize("held", ["embedding", "head", "both"])
def test_tied_weights_are_read_once(held: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        assert "lm_head.weight" not in tensors
        if held != "embedding":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if held == "head":
            del tensors["model.embed_tokens.weight"]

    edit(tmp_path, rename)
    model = build(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with counted_reads() as counter:
        report = load_weights(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_state(model, reference)
    extra = reference.lm_head.weight.nbytes if held == "both" else 0  # read to compare
    assert counter["num_bytes"] == sum(p.nbytes for p in model.parameters()) + extra
    assert report.ignored_keys == (("lm_head.weight",) if held == "both" else ())


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(48, 16)}))
    with pytest.raises(ValueError, match=r"lm_head.weight is tied .* different values. Set tie_word_embeddings"):
        load_weights(build(tmp_path), tmp_path)


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3_moe")
    reference.model.register_buffer("scale", torch.tensor(3.0))
    reference.model.register_buffer("counts", torch.tensor([3, 4]))
    reference.save_pretrained(tmp_path)
    model = build(tmp_path)
    model.model.register_buffer("scale", torch.tensor(0.0))
    model.model.register_buffer("counts", torch.tensor([0, 0]))
    load_weights(model, tmp_path)
    assert model.model.scale == 3.0
    assert_same_state(model, reference)


def test_folders_that_hold_no_complete_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", "20KB")
    model = build(tmp_path)
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["never.there"] = index["weight_map"]["lm_head.weight"]
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"keys that its files don't hold: \['never.there'\]"):
        load_weights(model, tmp_path)
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(ValueError, match="names files that aren't there"):
        load_weights(model, tmp_path)
    index_file.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor .* Give a complete model folder"):
        load_weights(model, tmp_path)
