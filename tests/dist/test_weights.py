"""Loading and exporting sharded models: each rank reads its own bytes, and the export is the checkpoint again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moesaic.weights.export as export_module
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.ops.placements import local_blocks
from moesaic.weights import export_hf, load_weights
from tests.unit.tiny_checkpoints import SIZES, assert_same_state, counted_reads, save_tiny


@dataclass(frozen=True)
class Layout:
    """How the test shards: mesh sizes, and the dim along which experts are sharded again."""

    edp: int
    efsdp: int
    ep: int
    expert_dim: int = 1

    @property
    def world_size(self) -> int:
        return self.edp * self.efsdp * self.ep


def shard(model: PreTrainedModel, layout: Layout) -> None:
    """Experts on ep, then on efsdp; blocks and root over all ranks (HSDP where edp > 1). By torch's own means alone."""
    expert = init_device_mesh("cpu", (layout.edp, layout.efsdp, layout.ep), mesh_dim_names=("edp", "efsdp", "ep"))
    dense = init_device_mesh("cpu", (layout.edp, layout.efsdp * layout.ep), mesh_dim_names=("replicate", "shard"))
    expert_fsdp = expert["efsdp"] if layout.edp == 1 else expert["edp", "efsdp"]
    dense_fsdp = dense["shard"] if layout.edp == 1 else dense
    ignored: set[nn.Parameter] = set()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        if layout.ep > 1:
            for name, parameter in list(experts.named_parameters()):
                sharded = distribute_tensor(parameter.detach(), expert["ep"], [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, nn.Parameter(sharded))
        fully_shard(experts, mesh=expert_fsdp, shard_placement_fn=lambda _: Shard(layout.expert_dim))
        ignored |= set(experts.parameters())
        fully_shard(layer, mesh=dense_fsdp, ignored_params=ignored)
    fully_shard(model, mesh=dense_fsdp, ignored_params=ignored)


def load_sharded(folder: Path, model_type: str, layout: Layout) -> tuple[PreTrainedModel, Any, int]:
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    shard(model, layout)
    materialize(model, "cpu")
    with counted_reads() as counter:
        report = load_weights(model, folder)
    return model, report, counter["num_bytes"]


def load_and_export(rank: int, folder: Path, model_type: str, layout: Layout) -> dict[str, Any]:
    model, report, num_bytes = load_sharded(folder, model_type, layout)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    shard(reference, layout)  # the same cut, of tensors that transformers loaded
    own_bytes = 0
    for (name, mine), (other, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert isinstance(mine, DTensor) and isinstance(theirs, DTensor)
        local, expected = mine.to_local().detach(), theirs.to_local().detach()
        assert torch.equal(local, expected), name
        blocks = local_blocks(mine.shape, mine.device_mesh, mine.placements)
        assert sum(torch.Size(block.size).numel() for block in blocks) == local.numel()
        own_bytes += local.nbytes
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight

    boxes = Boxes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "gather_share", boxes)
        export_hf(model, folder.parent / "out", max_shard_gib=20 * 2**10 / 2**30)
    return {
        "own_bytes": own_bytes,
        "num_bytes": num_bytes,
        "reported_bytes": report.num_bytes_read,
        "boxes": boxes.sizes,
        "largest": max(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "architecture": type(model).__name__,
    }


class Boxes:
    """Sizes in bytes of what this rank gathers; two at a time are an error."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._last: weakref.ref[torch.Tensor] | None = None
        self._gather = export_module.gather_share

    def __call__(self, *args: Any) -> torch.Tensor | None:
        assert self._last is None or self._last() is None, "two gathered parameters are held at a time"
        box = self._gather(*args)
        if box is not None:
            box = box.clone()
            self.sizes.append(box.nbytes)
            self._last = weakref.ref(box)
        return box


LAYOUTS: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "fsdp2": ("qwen3_moe", {}, Layout(1, 2, 1, expert_dim=0)),
    "ep2": ("mixtral", {}, Layout(1, 1, 2)),
    "efsdp2-ep2": ("qwen2_moe", {}, Layout(1, 2, 2)),
    "efsdp2-ep2-tied": ("qwen3_moe", {"tie_word_embeddings": True}, Layout(1, 2, 2)),
    "efsdp2-ep2-dim0": ("qwen3_moe", {}, Layout(1, 2, 2, expert_dim=0)),
    "uneven-7-on-ep4": ("qwen3_moe", {"num_experts": 7}, Layout(1, 1, 4)),
    "more-shards-than-experts-dim0": ("mixtral", {"num_local_experts": 2}, Layout(1, 2, 2, expert_dim=0)),
    "hsdp-edp2-ep2": ("qwen3_moe", {}, Layout(2, 1, 2)),
    "stacked": ("qwen3_5_moe_text", {}, Layout(1, 2, 2)),
    # FSDP gives 2 2 0 rows of the first ep rank and 1 1 1 of the second: here DTensor's own full_tensor() is wrong.
    "uneven-7-on-efsdp3-ep2-dim0": ("qwen3_moe", {"num_experts": 7}, Layout(1, 3, 2, expert_dim=0)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_load_reads_own_bytes_and_export_is_the_checkpoint(name: str, run_ranks: Any, tmp_path: Path) -> None:
    model_type, overrides, layout = LAYOUTS[name]
    reference = save_tiny(tmp_path / "hub", model_type, "40KB", **overrides)
    results = run_ranks(load_and_export, layout.world_size, tmp_path / "hub", model_type, layout)
    for result in results:
        assert result["num_bytes"] == result["reported_bytes"]
        assert result["num_bytes"] <= 1.02 * result["own_bytes"]
        assert max(result["boxes"], default=0) <= result["largest"]
        assert result["architecture"].startswith("FSDP")
    # Nobody gathers a second replica, and nothing is gathered twice.
    assert sum(sum(result["boxes"]) for result in results) == sum(
        parameter.nbytes for parameter in reference.parameters()
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(loaded, reference)
    assert loaded.config.architectures == [type(reference).__name__]


def test_each_ep_rank_writes_its_own_experts(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    results = run_ranks(load_and_export, 4, tmp_path / "hub", "qwen3_moe", Layout(1, 1, 4))
    assert all(len(result["boxes"]) >= 4 for result in results)  # 2 layers x (gate_up, down), nothing sent
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as handle:
            experts = {key.split(".experts.")[1].split(".")[0] for key in handle.keys() if ".experts." in key}
        assert len(experts) <= 1, f"{file.name} holds experts of several ranks: {experts}"


def fail_to_load(rank: int, folder: Path, mesh_folder: Path) -> str:
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    shard(model, Layout(1, 2, 1))
    materialize(model, "cpu")
    try:
        load_weights(model, mesh_folder if rank == 1 else folder)
    except (ValueError, RuntimeError) as error:
        dist.barrier()  # nobody hangs, and the group still works
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_one_rank_that_cannot_load_fails_all(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    first, second = run_ranks(fail_to_load, 2, tmp_path / "hub", tmp_path / "not-there")
    assert first.startswith("PeerFailed: loading") and "failed on another rank" in first
    assert second.startswith("ValueError: model=") and "neither model.safetensors" in second


def fail_to_export(rank: int, folder: Path, out: Path) -> str:
    model, _, _ = load_sharded(folder, "qwen3_moe", Layout(1, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(export_module, "_header", raise_disk_full)
        try:
            export_hf(model, out)
        except (OSError, RuntimeError) as error:
            dist.barrier()
            return f"{type(error).__name__}: {error}"
    return "exported"


def raise_disk_full(_: object) -> bytes:
    raise OSError(28, "No space left on device")


def test_one_rank_that_cannot_write_fails_all(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    first, second = run_ranks(fail_to_export, 2, tmp_path / "hub", tmp_path / "out")
    assert first.startswith("PeerFailed: exporting") and "No space left" in second
    assert not (tmp_path / "out").exists()


def export_after_a_forward(rank: int, folder: Path, out: Path) -> bool:
    """The root keeps its parameters whole after a forward; the export takes them as shards all the same."""
    model, _, _ = load_sharded(folder, "qwen3_moe", Layout(1, 2, 1))
    model(torch.arange(8).reshape(1, 8)).logits.sum()
    export_hf(model, out, dtype=torch.bfloat16)
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_export_after_a_forward_and_in_another_dtype(run_ranks: Any, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "hub", "qwen3_moe")
    assert run_ranks(export_after_a_forward, 2, tmp_path / "hub", tmp_path / "out") == [True, True]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same_state(loaded, reference.to(torch.bfloat16))


def keys_in(folder: Path) -> set[str]:
    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            keys |= set(handle.keys())
    return keys


def test_the_hubs_names_are_read_and_written(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "hub", "qwen3_moe")
    model = build_on_meta(tmp_path / "hub", attn_implementation=None, dtype=torch.float32)
    materialize(model, "cpu")
    load_weights(model, tmp_path / "hub")
    assert_same_state(model, reference)
    export_hf(model, tmp_path / "out")
    assert keys_in(tmp_path / "out") == keys_in(tmp_path / "hub")


def test_stacked_experts_of_an_unknown_family_are_not_written(tmp_path: Path) -> None:
    """Their keys would be the module's own, which nobody else reads."""
    reference = save_tiny(tmp_path / "hub", "qwen3_moe")
    loaded = build_on_meta(tmp_path / "hub", attn_implementation=None, dtype=torch.float32)
    materialize(loaded, "cpu")
    load_weights(loaded, tmp_path / "hub")
    reference.config.model_type = loaded.config.model_type = "unheard_of"
    with pytest.raises(ValueError, match=r"'unheard_of' stacks its experts.*register_checkpoint_conversion_mapping"):
        export_hf(reference, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    export_hf(loaded, tmp_path / "as-it-came")  # its files have said how they are named
    assert keys_in(tmp_path / "as-it-came") == keys_in(tmp_path / "hub")


def test_a_dense_model_needs_no_mapping(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES, intermediate_size=24, head_dim=4)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    export_hf(reference, tmp_path / "out")
    model = build_on_meta(tmp_path / "out", attn_implementation=None, dtype=torch.float32)
    materialize(model, "cpu")
    load_weights(model, tmp_path / "out")
    assert_same_state(model, reference)


def test_files_of_an_unknown_family_say_that_a_mapping_is_missing(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    model = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.float32)
    materialize(model, "cpu")
    model.config.model_type = "unheard_of"
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.0\.mlp\.experts\.0\.down(.|\n)*conversion_mapping"):
        load_weights(model, tmp_path)


def coordinates(rank: int) -> bool:
    """The mesh that fully_shard makes of efsdp and ep knows where its rank is, and so do its blocks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    full = torch.arange(8 * 4.0).reshape(8, 4)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(full, mesh["ep"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["efsdp"])
    weight = module.weight
    assert isinstance(weight, DTensor) and isinstance(weight.device_mesh, DeviceMesh)
    (block,) = local_blocks(weight.shape, weight.device_mesh, weight.placements)
    return torch.equal(full[block.global_slices], weight.to_local().detach())


def test_blocks_of_a_strided_shard_on_real_ranks(run_ranks: Any) -> None:
    assert run_ranks(coordinates, 4) == [True] * 4


def export_what_lies_on_some_ranks(rank: int, source: str, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    model = AutoModelForCausalLM.from_pretrained(source)
    for name, axis in (("model.embed_tokens", "all"), ("lm_head", "one")):
        module = model.get_submodule(name)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh[axis], [Shard(0)]))
    with pytest.raises(ValueError) as error:
        export_hf(model, folder)
    return str(error.value)


def test_what_lies_on_some_ranks_is_not_exported(run_ranks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "qwen3_moe")
    for message in run_ranks(export_what_lies_on_some_ranks, 2, str(tmp_path / "source"), str(tmp_path / "out")):
        assert message.startswith("lm_head.weight lies on 1 of the model's 2 ranks"), message
    assert not list(tmp_path.glob("out*"))
