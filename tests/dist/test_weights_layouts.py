"""Sharded models and files of other layouts: packed, transposed, alternating, in parts; loaded and exported again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.model.seam import find_experts
from moesaic.ops.placements import local_blocks
from moesaic.weights import export_hf, load_weights
from tests.dist.test_weights import Layout, shard
from tests.unit.test_weights_layouts import assert_same, contents, save_random
from tests.unit.test_weights_quantized import rewrite, save_fp8
from tests.unit.tiny_checkpoints import counted_reads


def shard_by_torch(model: PreTrainedModel, dim: int) -> None:
    """FSDP2 alone, experts along ``dim``."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for experts in find_experts(model).values():
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda param: Shard(dim if param.ndim > dim else 0))
    fully_shard(model, mesh=mesh)


def load_and_export(rank: int, folder: Path, out: Path, layout: Layout | None, dim: int) -> float:
    """Bytes read, relative to those of this rank's values in the files' types."""
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    whole = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    materialize(whole, "cpu")
    load_weights(whole, folder)
    if layout is None:
        shard_by_torch(model, dim)
    else:
        shard(model, layout)
    materialize(model, "cpu")
    with counted_reads() as counter:
        report = load_weights(model, folder)
    assert counter["num_bytes"] == report.num_bytes_read
    own_values = 0
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        local = mine.to_local().detach()
        own_values += local.numel()
        for block in local_blocks(mine.shape, mine.device_mesh, mine.placements):
            assert torch.equal(local[block.local_slices], theirs[block.global_slices]), name
    export_hf(model, out, max_shard_gib=60_000 / 2**30)
    return counter["num_bytes"] / own_values


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("model_type", ["kimi_linear", "inkling2_text", "aria_text", "qwen3_vl_moe"])
def test_other_layouts(model_type: str, dim: int, run_ranks: Any, tmp_path: Path) -> None:
    save_random(tmp_path / "hub", model_type)
    files = contents(tmp_path / "hub")
    if model_type == "qwen3_vl_moe":  # as on the Hub, and not as transformers saves it
        files = {key: t.transpose(1, 2).contiguous() if ".experts." in key else t for key, t in files.items()}
        save_file(files, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    bytes_per_value = run_ranks(load_and_export, 2, tmp_path / "hub", tmp_path / "out", None, dim)
    assert all(each <= 4 * 1.02 for each in bytes_per_value)
    assert_same(contents(tmp_path / "out"), files)


@pytest.mark.parametrize("expert_dim", [0, 1])
def test_packed_values_and_what_is_kept(expert_dim: int, run_ranks: Any, tmp_path: Path) -> None:
    plain = save_fp8(tmp_path / "hub")
    unused = {f"model.layers.1.part{i}": torch.randn(50, 60).bfloat16() for i in range(30)}
    rewrite(tmp_path / "hub", load_file(tmp_path / "hub" / "model.safetensors") | unused, None)
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    layout = Layout(1, 2, 2, expert_dim=expert_dim)
    run_ranks(load_and_export, 4, tmp_path / "hub", tmp_path / "out", layout, 0)
    assert_same(contents(tmp_path / "out"), plain | unused)
