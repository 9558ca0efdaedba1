"""Dumps of two topologies: the same files, equal to rounding; and what a dump refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from typer.testing import CliRunner

from moesaic.checkpoint import save_checkpoint
from moesaic.cli import app
from moesaic.config import DumpConfig
from moesaic.ops.gather import gather_to_rank_0
from moesaic.ops.placements import local_blocks, local_shape
from moesaic.train.dump import Dumper
from moesaic.train.step import train_step
from moesaic.verify.diff import diff
from tests.dist.test_checkpoint_topologies import build_state
from tests.oracle.cells import TOLERANCES, Cell, build_batch, rel_error, share_documents
from tests.oracle.reference import Case, Reference, load_reference

PLACEMENTS: list[tuple[tuple[int, ...], tuple[int, int], list[Placement]]] = [
    ((8, 6), (2, 2), [Shard(1), Shard(0)]),
    ((7, 3), (3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((1, 5), (2, 2), [Replicate(), Shard(0)]),  # one rank of each replica holds nothing
    ((), (2, 2), [Replicate(), Replicate()]),
]


def gather_on_rank(rank: int, shape: tuple[int, ...], mesh_shape: tuple[int, int], placements: Any) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 0.5).bfloat16()
    blocks = local_blocks(shape, mesh, placements)
    local = torch.empty(local_shape(blocks, len(shape)), dtype=whole.dtype)
    for block in blocks:
        local[block.local_slices] = whole[block.global_slices]
    tensor = DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=whole.stride())
    gathered = gather_to_rank_0(tensor)
    return (gathered is None) if rank else bool(torch.equal(gathered, whole))


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), PLACEMENTS)
def test_a_tensor_comes_together_on_rank_0_and_nowhere_else(
    run_ranks, shape: tuple[int, ...], mesh_shape: tuple[int, int], placements: list[Placement]
) -> None:
    assert all(run_ranks(gather_on_rank, mesh_shape[0] * mesh_shape[1], shape, mesh_shape, placements))


def dump_on_rank(rank: int, reference: Reference, folder: str, sizes: dict[str, int] | None, world_size: int) -> None:
    state, meshes = build_state(reference.folder, sizes)
    dumper = Dumper(state.model, DumpConfig(steps=(1,)), Path(folder), num_steps=2)
    assert dumper.is_due(1) and not dumper.is_due(2)
    documents = share_documents(reference.documents, Cell(world_size=world_size), rank)
    batches = [build_batch(docs, "padded") for docs in documents]
    save_grads = partial(dumper.save, 1, "grad")
    train_step(state.model, batches, state.optimizer, None, meshes, max_grad_norm=1e-3, before_clip=save_grads)
    dumper.save(1, "param")
    save_checkpoint(Path(folder), state, step=1)


@pytest.fixture
def reference(reference_root: Path) -> Reference:
    return load_reference(Case(), reference_root)


def test_two_topologies_dump_the_same(run_ranks, reference: Reference, tmp_path: Path) -> None:
    run_ranks(dump_on_rank, 4, reference, str(tmp_path / "ep"), {"ep_size": 2}, 4)
    run_ranks(dump_on_rank, 2, reference, str(tmp_path / "fsdp2"), None, 2)
    folders = [tmp_path / name / "dumps" / "step-000001" for name in ("ep", "fsdp2")]
    files = [sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) for folder in folders]
    assert files[0] == files[1] and "grad/model.layers.0.mlp.experts.gate_up_proj.safetensors" in files[0]
    report = diff(*folders)
    assert len(report.differences) == 2 * len(reference.grads) and report.is_equal(TOLERANCES["adamw"])
    assert not report.is_equal(0.0)
    for name, dumped in zip(("ep", "fsdp2"), folders, strict=True):  # a checkpoint also has moments, a dump none
        checkpoint = tmp_path / name / "step-000001"
        for sides in ((checkpoint, dumped / "param"), (dumped / "param", checkpoint)):
            result = CliRunner().invoke(app, ["diff", *map(str, sides)])
            assert result.exit_code == 0, result.output
    # Not scaled by the clipping to a norm of 0.001.
    for name, grad in reference.grads.items():
        dumped = load_file(folders[0] / "grad" / f"{name}.safetensors")[name]
        assert rel_error(dumped, grad) <= TOLERANCES["grads"], name


def refuse_on_rank(rank: int, reference: Reference, folder: str, config: DumpConfig, is_frozen: bool) -> str:
    model = build_state(reference.folder, None)[0].model
    if is_frozen:
        model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        Dumper(model, config, Path(folder), num_steps=3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "is_frozen", "words"),
    [
        (DumpConfig(steps=(2, 4)), False, "dump.steps=4: the run ends after step 3"),
        (
            DumpConfig(steps=(1,), params=("*.norm.weight", "layers.*")),
            False,
            "dump.params='layers.*' matches no param",
        ),
        (
            DumpConfig(steps=(1,), params=("model.embed_tokens.*",), what=("grad",)),
            True,
            "matches no trained parameter",
        ),
    ],
)
def test_what_can_not_be_dumped_is_an_error_before_training(
    run_ranks, reference: Reference, tmp_path: Path, config: DumpConfig, is_frozen: bool, words: str
) -> None:
    assert words in run_ranks(refuse_on_rank, 1, reference, str(tmp_path), config, is_frozen)[0]
    assert list(tmp_path.iterdir()) == []
