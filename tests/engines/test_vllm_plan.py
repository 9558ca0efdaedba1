"""From trained shards on gloo ranks into vLLM's layouts, by plan: every parameter of every engine rank as that engine
loads it from the exported checkpoint, bit for bit, with no byte more than it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from moesaic.engines.base import Sources
from moesaic.engines.vllm_layout import describe_files, trace_engine
from moesaic.meshes import build_meshes
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.reshard.blocks import describe_source
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.resolve import resolve_layout
from moesaic.reshard.run import local_shards, run_plan
from moesaic.reshard.sinks import TensorSink
from moesaic.reshard.transfers import plan_transfers
from moesaic.reshard.transports import GlooTransport
from moesaic.weights.export import export_hf, file_dtypes, find_layout, find_state
from moesaic.weights.load import load_weights
from tests.dist.test_weights import Layout, shard
from tests.engines.checkpoints import ENGINES, assert_equal, load_real, pairs, read_files, save_checkpoint, sources_of
from tests.pool import RunRanks

WORLD_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How four ranks hold the model: by this project's means (``sizes``), or by torch's alone (``layout``)."""

    sizes: dict[str, int] = field(default_factory=dict)
    options: ParallelOptions = field(default_factory=ParallelOptions)
    layout: Layout | None = None

    def load(self, folder: Path) -> PreTrainedModel:
        if self.layout is None:
            return from_pretrained(folder, build_meshes("cpu", **self.sizes), options=self.options)
        model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
        shard(model, self.layout)
        materialize(model, "cpu")
        load_weights(model, folder)
        return model


TRAINED = {
    "ep4": Trained(sizes={"ep_size": 4}),
    "ep2-efsdp2": Trained(sizes={"ep_size": 2}),
    "r2-ep2": Trained(sizes={"mp_replicate_size": 2, "ep_size": 2}),
    "tp2-ep2": Trained(sizes={"tp_size": 2, "ep_size": 2}),
    "ep2-cp2": Trained(sizes={"cp_size": 2, "ep_size": 2}),
    "path-a": Trained(options=ParallelOptions(expert_parallel=False)),
    "strided": Trained(layout=Layout(1, 2, 2, expert_dim=0)),
}
UNEVEN = Trained(layout=Layout(1, 1, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A checkpoint; and for each engine the layouts of its ranks (in keys of files), and what vLLM's loader makes."""

    folder: Path
    layouts: dict[str, list[TargetLayout]]
    parameters: Path  # of torch.save: engine -> rank -> name -> tensor
    dtype: torch.dtype


def expect(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Expected:
    save_checkpoint(folder, model_type, **overrides)
    files = {key: tensor.to(dtype) for key, tensor in read_files(folder).items()}
    name = str(dtype).removeprefix("torch.")
    layouts = {each: trace_engine(folder, ranks, sources_of(files), dtype=name) for each, ranks in ENGINES.items()}
    parameters = {
        each: [load_real(folder, rank, lambda: pairs(files), dtype=name) for rank in ranks]
        for each, ranks in ENGINES.items()
    }
    torch.save(parameters, folder / "expected.pt")
    return Expected(folder=folder, layouts=layouts, parameters=folder / "expected.pt", dtype=dtype)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    yield expect(tmp_path_factory.mktemp("qwen3"), "qwen3_moe")


@torch.no_grad()
def sync_all(rank: int, trained: Trained, expected: Expected) -> dict[str, int]:
    """Bytes received for each engine, by the engine rank of this process. Engine rank t is in process t + 1: what it
    needs is held here, elsewhere, or both."""
    model = trained.load(expected.folder)
    state, _ = find_state(model)
    files = (*find_layout(model, state), file_dtypes(model, state, expected.dtype))
    source = describe_source(model, dtype=expected.dtype)
    wanted = torch.load(expected.parameters, mmap=True)
    shards = local_shards(model)
    received = {}
    store = dist.distributed_c10d._get_default_store()
    for name, layouts in expected.layouts.items():
        processes = [(target + 1) % WORLD_SIZE for target in range(len(layouts))]
        plan = plan_transfers(
            source,
            [resolve_layout(layout, *files) for layout in layouts],
            source_process=range(WORLD_SIZE),
            target_process=processes,
        )
        view = plan.messages_of(rank)
        transport = GlooTransport.connect(store, rank, WORLD_SIZE, 30.0, name=name)
        for factor in (1.0, 2.0):  # the second sync is of other weights
            sink = None
            if view.target_rank is not None:
                sink = TensorSink(
                    {each.name: torch.full(each.shape, torch.nan, dtype=each.dtype) for each in view.tensors}
                )
            _scale(shards, factor)
            report = run_plan(view, transport, shards, sink)
            _scale(shards, 1 / factor)
            if view.target_rank is not None:
                assert sink is not None
                target = view.target_rank
                assert_equal(sink.tensors, {k: t * factor for k, t in wanted[name][target].items()}, f"{name} {target}")
                assert report.bytes_received == plan.bytes_received(target) == plan.lower_bound(target), name
                received[name] = report.bytes_received
        transport.close()
    return received


def _scale(shards: dict[str, Tensor], factor: float) -> None:
    """By a power of two: exact in every dtype."""
    for tensor in shards.values():
        tensor.mul_(factor)


@pytest.mark.parametrize("topology", TRAINED)
def test_every_parameter_from_every_topology(topology: str, qwen3: Expected, run_ranks: RunRanks) -> None:
    results = run_ranks(sync_all, WORLD_SIZE, TRAINED[topology], qwen3)
    assert {name for result in results for name in result} == ENGINES.keys()
    assert len(results[0]) == 3  # the engines of four ranks: the last is here


@pytest.mark.parametrize("case", ["qwen2_moe", "mixtral", "qwen3_moe-tied", "qwen3_moe-bf16", "qwen3_moe-7-experts"])
def test_every_parameter_of_other_models(case: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    model_type, _, kind = case.partition("-")
    overrides: dict[str, dict[str, Any]] = {
        "tied": {"tie_word_embeddings": True},
        "7-experts": {"num_experts": 7},
        "bf16": {"dtype": torch.bfloat16},
    }
    expected = expect(tmp_path, model_type, **overrides.get(kind, {}))
    run_ranks(sync_all, WORLD_SIZE, UNEVEN if kind == "7-experts" else TRAINED["ep2-efsdp2"], expected)


def export(rank: int, folder: Path, out: Path) -> Sources:
    model = TRAINED["ep2-efsdp2"].load(folder)
    export_hf(model, out)
    return describe_files(model)


def test_what_is_compared_with_is_the_exported_checkpoint(qwen3: Expected, run_ranks: RunRanks, tmp_path: Path) -> None:
    described = run_ranks(export, WORLD_SIZE, qwen3.folder, tmp_path / "out")
    exported = read_files(tmp_path / "out")
    assert_equal(exported, read_files(qwen3.folder), "exported")
    assert all(each == sources_of(exported) for each in described)
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in exported  # one by one, as every engine takes them
