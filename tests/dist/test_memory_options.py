"""What every memory option leaves as it was: checkpoints, exports, types of buffers and of reductions."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.checkpoint import TrainState, load_checkpoint, save_checkpoint
from moesaic.config import LrSchedulerConfig, OptimConfig
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.experts import find_expert_modules
from moesaic.parallel.gloo_exchange import GlooAllGather, GlooReduceScatter
from moesaic.train.optim import build_optimizer, build_scheduler
from moesaic.train.step import train_step
from moesaic.weights import export_hf
from tests.oracle.cells import Cell, build_batch, full, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

OPTIONS: dict[str, dict[str, Any]] = {
    "offload": {"offload": True},
    "custom": {"fsdp_implementation": "custom"},
    "hooks-offload": {"hook_modules": ("model.layers.*.mlp",), "offload": True},
    "bf16-offload": {"offload": True, "compute_dtype": torch.bfloat16, "storage_dtype": torch.bfloat16},
}


class Start:
    """A data position that stays where it is."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def build_state(reference: Reference, options: ParallelOptions) -> tuple[TrainState, Any]:
    meshes = build_meshes("cpu", ep_size=2)
    model = from_pretrained(reference.folder, meshes, options=options, attn_implementation="sdpa")
    optimizer = build_optimizer(model, OptimConfig(), 0.01)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(), num_steps=4)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=Start()), meshes


def stop_and_resume(rank: int, name: str, folder: str, reference: Reference) -> list[str]:
    """Names of what differs, bit for bit, between a run that went on and one that was resumed and then exported."""
    options = ParallelOptions(**OPTIONS[name])
    (documents,) = share_documents(reference.documents, Cell(world_size=4), rank)
    batches = [build_batch(documents, "padded")]

    def step(state: TrainState, meshes: Any) -> None:
        assert train_step(state.model, batches, state.optimizer, state.scheduler, meshes, 1.0).is_finite

    straight, meshes = build_state(reference, options)
    step(straight, meshes)
    path = save_checkpoint(Path(folder), straight, step=1)
    step(straight, meshes)

    resumed, meshes = build_state(reference, options)
    assert load_checkpoint(path, resumed) == 1
    step(resumed, meshes)
    expected = {name: full(param) for name, param in straight.model.named_parameters()}
    differing = [
        name for name, param in resumed.model.named_parameters() if not torch.equal(full(param), expected[name])
    ]
    export_hf(resumed.model, Path(folder) / "export")
    dist.barrier()
    whole = AutoModelForCausalLM.from_pretrained(Path(folder) / "export", dtype=options.storage_dtype)
    return differing + [name for name, param in whole.named_parameters() if not torch.equal(param, expected[name])]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "bf16-offload" else []) for n in OPTIONS]
)
def test_resuming_and_exporting(
    name: str, run_ranks: RunRanks, reference_root: Path, tmp_path: Path
) -> None:
    reference = load_reference(Case(), reference_root)
    assert run_ranks(stop_and_resume, 4, name, str(tmp_path / "run"), reference) == [[]] * 4


class DtypesOfAllReduces(TorchDispatchMode):
    """Types of what is summed over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d.allreduce_") and args[0][0].numel() > 1:
            self.dtypes.add(args[0][0].dtype)
        return func(*args, **(kwargs or {}))


def dtypes_in_a_step(rank: int, storage: torch.dtype, reference: Reference) -> dict[str, set[torch.dtype]]:
    """Types of what is stored, gathered, reduced, of modules in forward and of the optimizer's state; with replicas."""
    meshes = build_meshes("cpu", ep_size=2, mp_replicate_size=2, edp_size=1)
    options = ParallelOptions(compute_dtype=torch.bfloat16, storage_dtype=storage)
    model = from_pretrained(reference.folder, meshes, options=options, attn_implementation="sdpa")
    found: dict[str, set[torch.dtype]] = {"stored": {param.dtype for param in model.parameters()}}
    found["buffers"] = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
    for key in ("gathered", "reduced", "experts", "attention"):
        found[key] = set()

    def watch(comm: Any, key: str) -> Any:
        exchange = comm.__call__

        def watched(this: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, **rest: Any) -> Any:
            found[key].add(input_tensor.dtype)
            return exchange(this, output_tensor, input_tensor, group, **rest)

        return mock.patch.object(comm, "__call__", watched)

    def note(key: str) -> Any:
        return lambda module, *_: found[key].update(param.dtype for param in module.parameters())

    for experts in find_expert_modules(model).values():
        experts.register_forward_pre_hook(note("experts"))
    model.model.layers[0].self_attn.register_forward_pre_hook(note("attention"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    (documents,) = share_documents(reference.documents, Cell(world_size=4), rank)
    with watch(GlooAllGather, "gathered"), watch(GlooReduceScatter, "reduced"), DtypesOfAllReduces() as sums:
        train_step(model, [build_batch(documents, "padded")], optimizer, None, meshes, 1.0)
    state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    return found | {"summed over replicas": sums.dtypes, "optimizer": {value.dtype for value in state}}


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_types_of_a_step_in_bf16(run_ranks: RunRanks, reference_root: Path, storage: torch.dtype) -> None:
    fp32, bf16 = {torch.float32}, {torch.bfloat16}
    for found in run_ranks(dtypes_in_a_step, 4, storage, load_reference(Case(), reference_root)):
        assert found == {
            "stored": {storage},
            "optimizer": {storage},
            "buffers": fp32,
            "gathered": bf16,
            "experts": bf16,
            "attention": bf16,
            "reduced": fp32,
            "summed over replicas": fp32,
        }


def frequencies(rank: int, storage: torch.dtype, offload: bool, reference: Reference) -> Tensor:
    options = ParallelOptions(compute_dtype=torch.bfloat16, storage_dtype=storage, offload=offload)
    model = from_pretrained(reference.folder, build_meshes("cpu", ep_size=2), options=options)
    return model.model.rotary_emb.inv_freq.clone()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_rotary_frequencies_are_never_rounded(
    run_ranks: RunRanks, reference_root: Path, storage: torch.dtype, offload: bool
) -> None:
    reference = load_reference(Case(), reference_root)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(reference.folder), dtype=torch.float32)
    expected = plain.model.rotary_emb.inv_freq
    assert not torch.equal(expected.bfloat16().float(), expected), "these could be rounded without anyone noticing"
    for found in run_ranks(frequencies, 2, storage, offload, reference):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
