"""Which Hub tensors tile a parameter, and which slices of them fill a block."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import moesaic.weights.keys as keys_module
from moesaic.ops.placements import Block, blocks_at
from moesaic.specs import ModelSpec, find_spec
from moesaic.weights.keys import Layout, find_expert_param, find_hub_tensors, hub_name, hub_tensors, plan_reads

QWEN3 = find_spec("qwen3_moe")
MIXTRAL = find_spec("mixtral")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_the_file_itself_needs_no_torch() -> None:
    code = (
        "import importlib.util, sys; sys.modules['torch'] = None\n"
        f"spec = importlib.util.spec_from_file_location('keys', {keys_module.__file__!r})\n"
        "module = sys.modules['keys'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(len(module.hub_tensors('lm_head.weight', (2, 3), None)))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("1\n", "")


def test_per_expert_tiling_of_the_docstring() -> None:
    prefix = "model.layers.0.mlp.experts"
    assert [(t.key, t.offset, t.size, t.shape) for t in hub_tensors(GATE_UP, (2, 8, 3), QWEN3)] == [
        (f"{prefix}.0.gate_proj.weight", (0, 0, 0), (1, 4, 3), (4, 3)),
        (f"{prefix}.0.up_proj.weight", (0, 4, 0), (1, 4, 3), (4, 3)),
        (f"{prefix}.1.gate_proj.weight", (1, 0, 0), (1, 4, 3), (4, 3)),
        (f"{prefix}.1.up_proj.weight", (1, 4, 0), (1, 4, 3), (4, 3)),
    ]


def test_renames_and_other_parameters() -> None:
    assert hub_name("model.layers.3.mlp.gate.weight", MIXTRAL) == "model.layers.3.block_sparse_moe.gate.weight"
    (gate,) = hub_tensors("model.layers.3.mlp.gate.weight", (4, 3), MIXTRAL)
    assert (gate.key, gate.shape, gate.size) == ("model.layers.3.block_sparse_moe.gate.weight", (4, 3), (4, 3))
    assert [t.key for t in hub_tensors("model.layers.3.mlp.experts.down_proj", (1, 3, 4), MIXTRAL)] == [
        "model.layers.3.block_sparse_moe.experts.0.w2.weight"
    ]
    assert hub_name("lm_head.weight", None) == "lm_head.weight"


def test_only_experts_are_expert_parameters() -> None:
    assert find_expert_param(GATE_UP, QWEN3) is QWEN3.expert_params[0]
    assert find_expert_param("model.layers.0.mlp.shared_experts.gate_up_proj", QWEN3) is None
    assert find_expert_param("model.layers.0.1.mlp.experts.gate_up_proj", QWEN3) is None
    assert find_expert_param("model.layers.0.mlp.experts.other", QWEN3) is None
    assert find_expert_param(GATE_UP, None) is None


def test_the_layout_that_the_files_have_is_found() -> None:
    shape = (2, 8, 3)
    per_expert = {tensor.key for tensor in hub_tensors(GATE_UP, shape, QWEN3, "per_expert")}
    assert {tensor.key for tensor in find_hub_tensors(GATE_UP, shape, QWEN3, per_expert)} == per_expert
    assert [tensor.key for tensor in find_hub_tensors(GATE_UP, shape, QWEN3, {GATE_UP})] == [GATE_UP]
    # Files that kept the module's names, and both ways at once: the spec's own wins.
    plain = {"model.layers.0.mlp.gate.weight"}
    assert find_hub_tensors("model.layers.0.mlp.gate.weight", (4, 3), MIXTRAL, plain)[0].key in plain
    assert len(find_hub_tensors(GATE_UP, shape, QWEN3, per_expert | {GATE_UP})) == 4
    # Incomplete: the tiling with the most keys, so that a message names the few that are missing.
    some = per_expert - {"model.layers.0.mlp.experts.1.up_proj.weight"}
    assert {tensor.key for tensor in find_hub_tensors(GATE_UP, shape, QWEN3, some)} == per_expert
    assert {tensor.key for tensor in find_hub_tensors(GATE_UP, shape, QWEN3, ())} == per_expert


def test_rows_that_parts_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equal parts.*Correct ModelSpec"):
        hub_tensors(GATE_UP, (2, 7, 3), QWEN3)


def test_a_spec_with_a_prefix_of_its_own() -> None:
    spec = ModelSpec(model_types=("made_up",), hub_layout="stacked", hub_renames=(("model.", "model.language_model."),))
    with_prefix = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert [tensor.key for tensor in hub_tensors(GATE_UP, (2, 8, 3), spec)] == [with_prefix]
    assert [tensor.key for tensor in find_hub_tensors(GATE_UP, (2, 8, 3), spec, {GATE_UP})] == [GATE_UP]


def test_reads_of_the_docstring() -> None:
    tensors = hub_tensors(GATE_UP, (2, 8, 3), QWEN3)
    reads = plan_reads(tensors, Block((1, 2, 0), (0, 0, 0), (1, 4, 3)))
    assert [(read.key, read.source, read.dest) for read in reads] == [
        (tensors[2].key, (slice(2, 4), slice(0, 3)), (slice(0, 1), slice(0, 2), slice(0, 3))),
        (tensors[3].key, (slice(0, 2), slice(0, 3)), (slice(0, 1), slice(2, 4), slice(0, 3))),
    ]


@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Shard(2), Shard(0))),
        ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
        ((2, 2, 2), (Replicate(), Shard(1), Shard(0))),
        ((3,), (Shard(1),)),
    ],
)
def test_reads_fill_every_rank_exactly(
    layout: Layout, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    shape = (7, 8, 3)
    full = torch.arange(7 * 8 * 3).reshape(shape)
    tensors = hub_tensors(GATE_UP, shape, QWEN3, layout)
    file = {
        tensor.key: full[tuple(slice(o, o + s) for o, s in zip(tensor.offset, tensor.size, strict=True))].reshape(
            tensor.shape
        )
        for tensor in tensors
    }
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        for block in blocks_at(shape, mesh_shape, coordinate, placements):
            local = torch.full(tuple(o + s for o, s in zip(block.local_offset, block.size, strict=True)), -1)
            num_values = 0
            for read in plan_reads(tensors, block):
                value = file[read.key][read.source]
                num_values += value.numel()
                local[read.dest].copy_(value)
            assert torch.equal(local[block.local_slices], full[block.global_slices])
            assert num_values == torch.Size(block.size).numel()
