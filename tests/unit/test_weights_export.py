"""Exporting in one process: plain transformers loads it bit for bit; the files are what the plan says."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import moesaic.weights.export as export_module
from moesaic.weights import export_hf, load_weights
from moesaic.weights.export_plan import Entry, FileEntry, Share, plan_export
from moesaic.weights.tiles import Grid
from tests.unit.tiny_checkpoints import MODEL_TYPES, assert_same_state, save_tiny


def load_strictly(folder: Path, **kwargs: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model


def keys_of(folder: Path) -> set[str]:
    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert not keys & set(handle.keys())
            keys |= set(handle.keys())
    return keys


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_plain_transformers_loads_it_bit_for_bit(model_type: str, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "hub", model_type, tie_word_embeddings=tied)
    export_hf(reference, tmp_path / "out", tokenizer_folder=tmp_path / "hub")
    assert_same_state(load_strictly(tmp_path / "out"), reference)
    if model_type != "qwen3_5_moe_text":  # transformers writes its experts apart, the Hub holds them stacked
        assert keys_of(tmp_path / "out") == keys_of(tmp_path / "hub")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config == expected
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert not (tmp_path / "out.tmp").exists()


def test_the_config_holds_nothing_of_the_run(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")
    model.config._experts_implementation = "eager"
    model.config._attn_implementation = "eager"
    export_hf(model, tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    assert "implementation" not in text
    assert json.loads(text)["architectures"] == ["Qwen3MoeForCausalLM"]


def test_files_keep_to_their_limit_and_the_index_names_them(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")
    limit = 8 * 1024
    export_hf(model, tmp_path / "out", max_shard_gib=limit / 2**30)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    for name in files:
        with safe_open(tmp_path / "out" / name, framework="pt") as handle:
            assert {key for key, file in index["weight_map"].items() if file == name} == set(handle.keys())
            assert sum(handle.get_tensor(key).nbytes for key in handle.keys()) <= limit
    assert_same_state(load_strictly(tmp_path / "out"), model)


def test_a_stack_can_be_exported_for_families_that_keep_it(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_5_moe_text")
    export_hf(model, tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in " ".join(keys_of(tmp_path / "out"))
    assert_same_state(load_strictly(tmp_path / "out"), model)


def test_cast_to_another_dtype(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "mixtral")
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    loaded = load_strictly(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_same_state(loaded, model.to(torch.bfloat16))


def test_what_the_family_keeps_in_fp32_is_not_cast(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "mixtral")
    model._keep_in_fp32_modules_strict = {"norm"}
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():
                tensor = handle.get_tensor(key)
                assert tensor.dtype == (torch.float32 if "norm" in key else torch.bfloat16)
                if "norm" in key:
                    assert torch.equal(tensor, model.state_dict()[key])


def test_our_own_loader_reads_it_back(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen2_moe")
    export_hf(model, tmp_path / "out")
    other = save_tiny(tmp_path / "other", "qwen2_moe")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_weights(other, tmp_path / "out")
    assert_same_state(other, model)


def test_the_tokenizer_is_copied(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "training_args.bin"):
        (tmp_path / "hub" / name).write_text(name)
    export_hf(model, tmp_path / "out", tokenizer_folder=tmp_path / "hub")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "tokenizer_config.json").exists()
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")
    with pytest.raises(ValueError, match=r"folder=.*isn't empty.*Name another folder"):
        export_hf(model, tmp_path / "hub")
    with pytest.raises(ValueError, match="max_shard_gib=0"):
        export_hf(model, tmp_path / "out", max_shard_gib=0)
    (tmp_path / "out").mkdir()  # empty: fine
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "left-by-a-killed-run").write_text("")
    export_hf(model, tmp_path / "out")
    assert not (tmp_path / "out" / "left-by-a-killed-run").exists()


def test_a_disk_that_is_full_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")

    def full(_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "_header", full)
    with pytest.raises(OSError, match="No space left"):
        export_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def share(name: str, num_rows: list[int], stream: int = 0, dtype: torch.dtype = torch.float32) -> Share:
    """A share of vectors of these lengths, which ranks 4 and 7 may write."""
    entries = tuple(
        Entry(key=f"{name}.{i}", shape=(rows,), tiles=Grid.whole(f"{name}.{i}", (rows,)).tiles)
        for i, rows in enumerate(num_rows)
    )
    return Share(
        name=name, offset=(0,), size=(8,), dtype=dtype, holders=(), writers=(4, 7), stream=stream, entries=entries
    )


def test_plan_rotates_writers_from_file_to_file() -> None:
    shares = [share("a", [2]), share("x", [2], stream=1), share("b", [2, 2, 2]), share("c", [9]), share("d", [1])]
    plan = plan_export(shares, max_file_bytes=16)
    assert [(file.writer, list(file.tensors), file.num_bytes) for file in plan.files] == [
        (4, ["a.0", "b.0"], 16),
        (4, ["x.0"], 8),
        (4, ["b.1", "b.2"], 16),  # the same share: its writer has it already
        (4, ["c.0"], 36),  # larger than the limit: alone. The third file of its stream, so its first writer's turn
        (7, ["d.0"], 4),
    ]
    assert [indices for _, indices in plan.steps] == [(0,), (1,), (0, 2, 2), (3,), (4,)]
    assert plan.file_name(1) == "model-00002-of-00005.safetensors"


def test_plan_never_begins_a_tensor_at_an_offset_that_cannot_be_mapped() -> None:
    plan = plan_export(
        [share("a", [3], dtype=torch.bfloat16), share("b", [2]), share("c", [1], dtype=torch.bfloat16)],
        max_file_bytes=1000,
    )
    assert [list(file.tensors) for file in plan.files] == [["a.0"], ["b.0", "c.0"]]
    assert plan.files[1].tensors["c.0"] == FileEntry(dtype="BF16", shape=(1,), start=8, num_bytes=2)


def test_one_parameter_at_a_time_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every box that is gathered is gone before the next one is."""
    model = save_tiny(tmp_path / "hub", "qwen3_moe", tie_word_embeddings=True)
    alive: list[weakref.ref[torch.Tensor]] = []
    original = export_module.gather_share

    def watched(*args: Any) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        box = original(*args)
        assert box is not None
        box = box.clone()
        alive.append(weakref.ref(box))
        return box

    monkeypatch.setattr(export_module, "gather_share", watched)
    export_hf(model, tmp_path / "out")
    assert len(alive) == len(list(model.parameters()))
