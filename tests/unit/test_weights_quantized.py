"""fp8 by blocks and MXFP4, slice by slice, against transformers' own functions on whole tensors; and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.weights import export_hf, load_weights
from moesaic.weights.files import FileTensor
from moesaic.weights.quantized import Stored, find_stored
from moesaic.weights.source import match_folder
from tests.unit.tiny_checkpoints import SIZES, assert_same_state, counted_reads, save_tiny

FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def header(key: str, tensor: torch.Tensor, dtype: str) -> FileTensor:
    return FileTensor(file=Path("a"), key=key, shape=tuple(tensor.shape), dtype=dtype, start=0, end=tensor.nbytes)


def take_from(tensors: dict[str, torch.Tensor]) -> Callable[[FileTensor, tuple[range, ...]], torch.Tensor]:
    return lambda file, source: tensors[file.key][tuple(slice(r.start, r.stop, r.step) for r in source)]


def quantize_fp8(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """By blocks of 128; those at the edges are smaller."""
    grid = tuple(-(-size // 128) for size in weight.shape)
    scales = torch.empty(grid, dtype=scale_dtype)
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for col in range(grid[1]):
            block = (slice(row * 128, row * 128 + 128), slice(col * 128, col * 128 + 128))
            scales[row, col] = weight[block].abs().max() / 448
            packed[block] = (weight[block] / scales[row, col].float()).to(torch.float8_e4m3fn)
    return packed, scales


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(576, 200), (192, 256), (100, 30), (128, 384)])
def test_any_slice_of_an_fp8_tensor_is_that_of_the_whole(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed, scales = quantize_fp8(torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None], scale_dtype)
    whole = _dequantize_fp8_weight(packed.clone(), scales.float(), [128, 128], torch.float32)
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[scale_dtype]
    headers = {
        "w.weight": header("w.weight", packed, "F8_E4M3"),
        "w.weight_scale_inv": header("w.weight_scale_inv", scales, name),
    }
    found, problems = find_stored(headers, {"quantization_config": FP8_CONFIG})
    assert not problems and list(found) == ["w.weight"]
    take = take_from({"w.weight": packed, "w.weight_scale_inv": scales})
    rows, cols = shape
    for chosen in [
        (range(rows), range(cols)),
        (range(rows // 3, rows), range(cols)),
        (range(1, rows - 1, 2), range(cols // 2, cols)),
        (range(rows - 1, rows), range(5, 6)),
    ]:
        expected = whole[chosen[0].start : chosen[0].stop : chosen[0].step, chosen[1].start : chosen[1].stop]
        assert torch.equal(found["w.weight"].read(chosen, take), expected)


def packed_fp4(num_experts: int, num_out: int, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (num_experts, num_out, num_groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(100, 141, (num_experts, num_out, num_groups), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_slice_of_an_mxfp4_tensor_is_that_of_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks, scales = packed_fp4(3, 10, 4)
    whole = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    headers = {"w_blocks": header("w_blocks", blocks, "U8"), "w_scales": header("w_scales", scales, "U8")}
    found, problems = find_stored(headers, {})
    assert not problems and {key: stored.shape for key, stored in found.items()} == {"w": (3, 128, 10)}
    take = take_from({"w_blocks": blocks, "w_scales": scales})
    for experts, inputs, outputs in [
        (range(3), range(128), range(10)),
        (range(1, 2), range(45, 90), range(3, 10)),  # from within a byte, over two blocks
        (range(3), range(64, 65), range(0, 10, 2)),
        (range(2, 3), range(127, 128), range(9, 10)),
    ]:
        expected = whole[
            experts.start : experts.stop, inputs.start : inputs.stop, outputs.start : outputs.stop : outputs.step
        ]
        assert torch.equal(found["w"].read((experts, inputs, outputs), take).to(dtype), expected)


def test_companions_that_do_not_fit() -> None:
    weight, scales = torch.empty(300, 128, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
    headers = {
        "a.weight": header("a.weight", weight, "F8_E4M3"),
        "a.weight_scale_inv": header("a.weight_scale_inv", scales, "F32"),
        "b.weight": header("b.weight", weight, "F8_E4M3"),
        "b.weight_scale_inv": header("b.weight_scale_inv", scales, "I8"),
        "c.weight": header("c.weight", weight, "BF16"),
        "c.weight_scale_inv": header("c.weight_scale_inv", scales, "F32"),
        "d_blocks": header("d_blocks", weight, "BF16"),
        "d_scales": header("d_scales", scales, "U8"),
    }
    _, problems = find_stored(headers, {})
    assert problems == [
        "scales: a.weight_scale_inv is [2, 1], a.weight needs [3, 1]",
        "scales: b.weight_scale_inv is I8, needs one of ['BF16', 'F16', 'F32', 'F8_E8M0']",
        "blocks: d_blocks is BF16 [300, 128], needs U8 [E, out, in/32, 16]",
        "scales: c.weight_scale_inv has no F8_E4M3 weight beside it",
    ]


def build(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = build_on_meta(folder, attn_implementation=None, dtype=dtype)
    materialize(model, "cpu")
    return model


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def save_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """A model of sizes that blocks don't divide; what its tensors are, unpacked by transformers."""
    sizes = {"hidden_size": 160, "head_dim": 40, "moe_intermediate_size": 136, "num_hidden_layers": 1}
    save_tiny(folder, "qwen3_moe", **sizes)
    plain = load_file(folder / "model.safetensors")
    files: dict[str, torch.Tensor] = {}
    for key, tensor in plain.items():
        if tensor.ndim != 2 or "embed" in key or "lm_head" in key or "mlp.gate." in key:
            files[key] = tensor
            continue
        files[key], files[f"{key}_scale_inv"] = quantize_fp8(tensor, torch.float32)
        plain[key] = _dequantize_fp8_weight(files[key].clone(), files[f"{key}_scale_inv"], [128, 128], torch.float32)
    rewrite(folder, files, FP8_CONFIG)
    return plain


def test_an_fp8_folder_loads_and_comes_out_plain(tmp_path: Path) -> None:
    plain = save_fp8(tmp_path / "hub")
    model = build(tmp_path / "hub")
    with counted_reads() as counter:
        report = load_weights(model, tmp_path / "hub")
    packed = load_file(tmp_path / "hub" / "model.safetensors")
    assert counter["num_bytes"] == report.num_bytes_read == sum(tensor.nbytes for tensor in packed.values())
    export_hf(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported = contents(tmp_path / "out")
    assert exported.keys() == plain.keys()
    assert all(torch.equal(exported[key], plain[key]) for key in plain)
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_scales_in_another_file(tmp_path: Path) -> None:
    plain = save_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {"a": {}, "b": {}}
    for key, tensor in tensors.items():
        files["b" if "_scale_inv" in key else "a"][key] = tensor
    for name, content in files.items():
        save_file(content, tmp_path / f"{name}.safetensors")
    weight_map = {key: f"{name}.safetensors" for name, content in files.items() for key in content}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = build(tmp_path)
    with counted_reads(max_open=2):
        load_weights(model, tmp_path)
    key = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj[2], plain[key])


def test_an_fp8_weight_without_scales_is_named(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    del tensors[f"{key}_scale_inv"]
    rewrite(tmp_path, tensors, None)
    with pytest.raises(ValueError, match=rf"dtype: {key} is F8_E4M3 and has no {key}_scale_inv"):
        load_weights(build(tmp_path), tmp_path)


def save_gpt_oss(folder: Path) -> Any:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = AutoConfig.for_model("gpt_oss", **sizes, num_experts_per_tok=2, rope_parameters=rope)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


def test_an_mxfp4_folder_loads_and_comes_out_plain(tmp_path: Path) -> None:
    reference = save_gpt_oss(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    plain = dict(tensors)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(key).shape
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales = packed_fp4(
            num_experts, num_out, num_in // 32
        )
        plain[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    rewrite(tmp_path / "hub", tensors, {"quant_method": "mxfp4"})
    reference.load_state_dict(plain)
    model = build(tmp_path / "hub", torch.bfloat16)
    with counted_reads() as counter:
        load_weights(model, tmp_path / "hub")
    assert counter["num_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert_same_state(model, reference)
    export_hf(model, tmp_path / "out")
    exported = contents(tmp_path / "out")
    assert exported.keys() == plain.keys() and all(torch.equal(exported[key], plain[key]) for key in plain)
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"), reference)


def test_plain_values_under_a_packed_name_are_explained(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{key}_blocks"] = tensors.pop(key)
    rewrite(tmp_path, tensors, None)
    with pytest.raises(ValueError, match=r"down_proj_blocks .*save_original_format=False"):
        load_weights(build(tmp_path), tmp_path)


def test_what_the_model_has_no_use_for_is_exported_bit_for_bit(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_5_moe_text")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    unused = {
        "mtp.norm.weight": torch.randn(5).bfloat16(),
        "mtp.fp8": torch.randn(3, 2).to(torch.float8_e4m3fn),
        "model.visual.count": torch.tensor([3, 4]),
        "mtp.empty": torch.empty(0, 2),
        "mtp.scalar": torch.tensor(2.5, dtype=torch.float16),
    }
    rewrite(tmp_path / "hub", tensors | unused, None)
    model = build(tmp_path / "hub")
    report = load_weights(model, tmp_path / "hub")
    assert set(report.ignored_keys) == set(unused)
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16, max_shard_gib=40 / 2**30)
    exported = contents(tmp_path / "out")
    assert exported.keys() == (tensors | unused).keys()
    for key, tensor in unused.items():
        assert exported[key].dtype == tensor.dtype and exported[key].shape == tensor.shape, key
        mine, theirs = (each.reshape(-1).view(torch.uint8) for each in (exported[key], tensor))
        assert torch.equal(mine, theirs), key
    export_hf(model, tmp_path / "without", keep_unused=False)
    assert contents(tmp_path / "without").keys() == tensors.keys()
    (tmp_path / "hub" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"hub is gone, from which 5 tensors .*keep_unused=False"):
        export_hf(model, tmp_path / "again")
    assert not (tmp_path / "again.tmp").exists()


def test_quantised_layers_that_are_kept_are_unpacked(tmp_path: Path) -> None:
    """An MTP layer, at whatever number this config gives it."""
    config = {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    save_tiny(tmp_path / "hub", "qwen3_moe")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    packed, scales = quantize_fp8(torch.randn(130, 140), torch.float32)
    key = "model.layers.2.eh_proj.weight"
    rewrite(tmp_path / "hub", tensors | {key: packed, f"{key}_scale_inv": scales}, FP8_CONFIG)
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    model = build(tmp_path / "hub")
    report = load_weights(model, tmp_path / "hub")
    assert report.ignored_keys == (key, f"{key}_scale_inv")
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    exported = contents(tmp_path / "out")
    assert f"{key}_scale_inv" not in exported
    expected = _dequantize_fp8_weight(packed.clone(), scales, [128, 128], torch.float32).bfloat16()
    assert torch.equal(exported[key], expected)


def test_headers_alone_are_read_to_match(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    with counted_reads() as counter:
        source = match_folder(build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32), tmp_path)
    assert counter["num_bytes"] == 0 and isinstance(source.stored["lm_head.weight"], Stored)
    damaged = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damaged[:-1])
    with pytest.raises(ValueError, match="is cut off"):
        match_folder(build(tmp_path), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"oops")
    with pytest.raises(ValueError, match="isn't a safetensors file"):
        match_folder(build(tmp_path), tmp_path)
