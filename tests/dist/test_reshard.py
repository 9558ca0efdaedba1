"""Weights from sharded trainers straight into engine ranks: the right bits, the fewest bytes, and what may go wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.engine_layouts import EngineRank, engine_ranks
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.reshard.blocks import describe_source
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.run import RunReport, local_shards, run_plan
from moesaic.reshard.sinks import TensorSink
from moesaic.reshard.transfers import plan_transfers
from moesaic.reshard.transports import GlooTransport
from moesaic.weights import load_weights
from moesaic.weights.agree import state_tensors
from tests.dist.test_full_state import build_sharded
from tests.dist.test_weights import Layout
from tests.reshard_engines import cut, layout_of
from tests.unit.tiny_checkpoints import save_tiny

HEAD_DIM = 4
NUM_SYNCS = 2


# ------------------------------------------------------------------------------------------- every bit, fewest bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Trainers. ``by_torch``: sharded by torch's own means, with experts' dim 0 cut by both axes; else by moesaic.
    ``forward``: they run the model before each sync, and FSDP then holds whole tensors with the values of before."""

    num_ranks: int = 4
    sizes: dict[str, int] = field(default_factory=dict)
    options: ParallelOptions = field(default_factory=ParallelOptions)
    config: dict[str, Any] = field(default_factory=dict)
    by_torch: Layout | None = None
    forward: bool = False


TOPOLOGIES = {
    "ep4": Topology(sizes={"ep_size": 4}),
    "ep2-efsdp2": Topology(sizes={"ep_size": 2}, options=ParallelOptions(reshard_after_forward=False), forward=True),
    "r2-ep2-tied": Topology(sizes={"mp_replicate_size": 2, "ep_size": 2}, config={"tie_word_embeddings": True}),
    "tp2-ep2": Topology(sizes={"tp_size": 2, "ep_size": 2}),
    "ep2-cp2-offloaded": Topology(sizes={"ep_size": 2, "cp_size": 2}, options=ParallelOptions(offload=True)),
    # Experts 2, 2, 1, and none on the last rank.
    "path-a-fsdp4-uneven-5": Topology(options=ParallelOptions(expert_parallel=False), config={"num_experts": 5}),
    "strided": Topology(by_torch=Layout(1, 2, 2, expert_dim=0)),
    "uneven-7-on-ep4": Topology(sizes={"ep_size": 4}, config={"num_experts": 7}),
}
# Name -> its ranks (None: a plain transformers model), and in which processes they live; trainers are processes 0...
ENGINES: dict[str, tuple[Sequence[EngineRank | None], Callable[[int], list[int]]]] = {
    "hf": ([None], lambda num_trainers: [num_trainers]),
    "tp2": (engine_ranks("tp2", 2), lambda n: [n, n + 1]),
    "tp2ep2": (engine_ranks("tp2ep2", 2), lambda n: [n + 1, n]),
    "dp2tp2": (engine_ranks("dp2tp2", 2), lambda n: [n, n + 1, n + 2, n + 3]),
    "hf-colocated": ([None], lambda n: [0]),
    "tp2-colocated": (engine_ranks("tp2", 2), lambda n: [0, 1]),
    "tp2-half-colocated": (engine_ranks("tp2", 2), lambda n: [n, 1]),
}


def build_trainer(folder: Path, topology: Topology, reference: Any) -> Any:
    if topology.by_torch is None:
        return from_pretrained(folder, build_meshes("cpu", **topology.sizes), options=topology.options)
    model = build_sharded(reference, topology.by_torch)
    load_weights(model, folder)
    return model


def sync_all_engines(rank: int, folder: Path, topology: Topology, reference: Any) -> dict[str, list[RunReport]]:
    """Each engine gets two syncs, between which all weights change. Only trainers are in a default group."""
    store = dist.PrefixStore("reshard", dist.distributed_c10d._get_default_store())
    dist.barrier()  # gloo fails where one leaves while others still connect to it
    dist.destroy_process_group()
    num_trainers = topology.num_ranks
    full = {name: tensor.detach() for name, tensor in state_tensors(reference).items()}
    model = None
    if rank < num_trainers:
        dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=rank, world_size=num_trainers)
        model = build_trainer(folder, topology, reference)
        if rank == 0:
            store.set("source", pickle.dumps(describe_source(model)).hex())
    source = pickle.loads(bytes.fromhex(store.get("source").decode()))
    reports: dict[str, list[RunReport]] = {}
    for name, (ranks, find_processes) in ENGINES.items():
        layouts = [layout_of(reference.config, its, full, torch.float32) for its in ranks]
        processes = find_processes(num_trainers)
        plan = plan_transfers(source, layouts, target_process=processes, max_message_bytes=2048, min_share_bytes=64)
        is_in_plan = rank < plan.num_processes
        transport = GlooTransport.connect(store, rank, plan.num_processes, 30, name=name) if is_in_plan else None
        target = processes.index(rank) if rank in processes else None
        sink = None if target is None else TensorSink(make_targets(layouts[target]))
        reports[name] = []
        for _ in range(NUM_SYNCS):
            if model is not None and topology.forward:
                model(input_ids=torch.tensor([[1, 2, 3]]))
                assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) < len(full) / 2
            shards = local_shards(model) if model is not None else None
            for tensor in [*full.values(), *(shards or {}).values()]:
                tensor.mul_(-1.5)  # the same bits here and there
            if transport is None:
                continue
            report = run_plan(plan.messages_of(rank), transport, shards, sink, max_in_flight_bytes=8192)
            reports[name].append(report)
            assert report.bytes_sent == (plan.bytes_sent(rank) if rank < num_trainers else 0)
            assert report.peak_in_flight_bytes <= report.buffer_bytes <= 8192
            if target is None or sink is None:
                assert report.bytes_received == 0
                continue
            its = ranks[target]
            assert_equal(sink.tensors, cut(full, HEAD_DIM, its))
            assert report.bytes_received == plan.bytes_received(target) == plan.lower_bound(target)
        if sink is not None:
            assert sorted(sink.closed) == sorted([*sink.tensors] * NUM_SYNCS)
        if transport is not None:
            transport.close()
    return reports


def make_targets(layout: TargetLayout) -> dict[str, Tensor]:
    return {tensor.name: torch.full(tensor.shape, torch.nan, dtype=tensor.dtype) for tensor in layout.tensors}


def assert_equal(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys(), mine.keys() ^ expected.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", [pytest.param("ep4", marks=pytest.mark.slow), *list(TOPOLOGIES)[1:]])
def test_every_engine_gets_its_bits_and_no_byte_more(name: str, run_ranks: Any, tmp_path: Path) -> None:
    topology = TOPOLOGIES[name]
    reference = save_tiny(tmp_path, "qwen3_moe", **topology.config)
    results = run_ranks(sync_all_engines, topology.num_ranks + 4, tmp_path, topology, reference)
    for engine in ENGINES:
        bytes_sent, bytes_received = (
            sum(report.bytes_sent for reports in results for report in reports[engine]),
            sum(report.bytes_received for reports in results for report in reports[engine]),
        )
        assert bytes_sent == bytes_received > 0 or (engine == "hf-colocated" and bytes_sent == bytes_received)
