"""Weights of 4 training ranks (ep 2, efsdp 2) into one engine of tp 4: the direct plan beside a streaming gather.

    python -m bench.sync [--size 246m|1b] [--dtype bfloat16|float32] [--pairs 5] [--json FILE]

Three ways, in one run, alternating, over gloo on this machine:

    direct       each engine rank gets its own slices from the ranks that hold them
    parameters   one parameter at a time: ``full_tensor()`` on all training ranks, then rank 0 broadcasts to the engine
    buckets      buckets of 512 MiB gathered on training rank 0 alone, which then broadcasts each tensor to the engine

The engine's ranks are processes that hold what an engine's loader makes of a Qwen3-MoE model (fused, cut, padded); of
whole tensors each copies its slices. Reported: bytes received (what a rank gets that it didn't hold; of collectives
computed, of messages counted), seconds from one barrier of all 8 processes to the next, and the most memory that any
rank took beyond what it had before (high-water mark of its resident set). All three must lead to the same bits.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3MoeConfig

from bench.engine_layouts import MoeShape, build_target, engine_ranks
from moesaic.meshes import build_meshes
from moesaic.model.build import build_on_meta
from moesaic.parallel.apply import ParallelOptions, give_storage, parallelize
from moesaic.reshard.blocks import describe_source
from moesaic.reshard.layout import Copy, SourceLayout, TargetLayout
from moesaic.reshard.packing import checksum
from moesaic.reshard.run import local_shards, run_plan
from moesaic.reshard.sinks import TensorSink
from moesaic.reshard.transfers import plan_transfers
from moesaic.reshard.transports import GlooTransport
from moesaic.weights import stream_hf_tensors
from moesaic.weights.agree import state_tensors

NUM_TRAINERS, NUM_ENGINE_RANKS = 4, 4
WAYS = ("direct", "parameters", "buckets")
AIMS = {"bytes": 0.30, "seconds": 0.5, "peak_extra_mib": 64.0}
MIB = 2**20
SIZES = {
    "tiny": MoeShape(
        num_layers=2,
        hidden_size=64,
        num_experts=8,
        intermediate_size=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=512,
    ),
    "246m": MoeShape(
        num_layers=12,
        hidden_size=512,
        num_experts=16,
        intermediate_size=688,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32768,
    ),
    "1b": MoeShape(
        num_layers=12,
        hidden_size=1024,
        num_experts=16,
        intermediate_size=1536,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32768,
    ),
}


def build_config(shape: MoeShape) -> Qwen3MoeConfig:
    """The model's config."""
    return Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=2,
        vocab_size=shape.vocab_size,
    )


def build_trainer(shape: MoeShape, dtype: torch.dtype) -> PreTrainedModel:
    """A random model, ep 2 x efsdp 2."""
    options = ParallelOptions(storage_dtype=dtype, compute_dtype=dtype)
    meshes = build_meshes("cpu", ep_size=2)
    model = build_on_meta(build_config(shape), attn_implementation="sdpa", dtype=dtype)
    parallelize(model, meshes, None, options)
    give_storage(model, meshes, options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for tensor in local_shards(model).values():
        tensor.normal_(generator=generator)
    return model


class Process:
    """One of the 8: training rank 0..3, or engine rank 0..3 in processes 4..7."""

    def __init__(self, process: int, store: dist.Store, shape: MoeShape, dtype: torch.dtype) -> None:
        self.process, self.dtype = process, dtype
        self.model: PreTrainedModel | None = None
        if process < NUM_TRAINERS:
            trainers = dist.PrefixStore("trainers", store)
            dist.init_process_group("gloo", store=trainers, rank=process, world_size=NUM_TRAINERS)
            self.model = build_trainer(shape, dtype)
        if process == 0:
            assert self.model is not None
            store.set("source", pickle.dumps(describe_source(self.model)).hex())
        self.source: SourceLayout = pickle.loads(bytes.fromhex(store.get("source").decode()))
        layouts = [build_target(shape, rank, dtype) for rank in engine_ranks(f"tp{NUM_ENGINE_RANKS}", shape.num_layers)]
        self.plan = plan_transfers(self.source, layouts)
        self.layout = layouts[process - NUM_TRAINERS] if process >= NUM_TRAINERS else None
        self.sink = TensorSink(make_targets(self.layout)) if self.layout else None
        self.copies: defaultdict[str, list[Copy]] = defaultdict(list)
        for copy in self.layout.copies if self.layout else ():
            self.copies[copy.source].append(copy)
        self.transport = GlooTransport.connect(store, process, NUM_TRAINERS + NUM_ENGINE_RANKS, 600)
        self.to_engine: Any = None  # training rank 0 and the engine, as verl's and others' weight groups
        if process == 0 or self.layout:
            rank = 0 if process == 0 else 1 + process - NUM_TRAINERS
            timeout = timedelta(seconds=600)
            self.to_engine = dist.ProcessGroupGloo(
                dist.PrefixStore("engine", store), rank, 1 + NUM_ENGINE_RANKS, timeout
            )

    def direct(self) -> int:
        """The plan; bytes received."""
        shards = local_shards(self.model) if self.model is not None else None
        return run_plan(self.plan.messages_of(self.process), self.transport, shards, self.sink).bytes_received

    @torch.no_grad()
    def parameters(self) -> int:
        """One parameter at a time; bytes received."""
        num_bytes = 0
        state = state_tensors(self.model) if self.model is not None else {}
        for held in self.source.tensors:
            whole = None
            if self.model is not None:
                tensor = state[held.name]
                assert isinstance(tensor, DTensor)
                whole = tensor.full_tensor()
                num_bytes += whole.nbytes - tensor.to_local().nbytes
            num_bytes += self.broadcast(held.name, held.shape, whole)
        return num_bytes

    @torch.no_grad()
    def buckets(self) -> int:
        """Gathered in buckets on training rank 0; bytes received."""
        num_bytes = 0
        if self.model is not None:
            for name, whole in stream_hf_tensors(self.model, 512, experts="stacked", dst=0):
                num_bytes += self.broadcast(name, tuple(whole.shape), whole)
            if self.process == 0:
                lacks = [t.numel() * t.dtype.itemsize - t.to_local().nbytes for t in self.sharded()]
                num_bytes += sum(lacks)
            return num_bytes
        for held in self.source.tensors:
            num_bytes += self.broadcast(held.name, held.shape, None)
        return num_bytes

    def sharded(self) -> Iterator[DTensor]:
        """The model's DTensors."""
        assert self.model is not None
        for tensor in state_tensors(self.model).values():
            assert isinstance(tensor, DTensor)
            yield tensor

    def broadcast(self, name: str, shape: tuple[int, ...], whole: Tensor | None) -> int:
        """From training rank 0 to the engine's ranks, which copy their slices; bytes received."""
        if self.to_engine is None:
            return 0
        is_engine = self.process >= NUM_TRAINERS
        tensor = torch.empty(shape, dtype=self.dtype) if is_engine else whole
        assert tensor is not None
        self.to_engine.broadcast([tensor.detach()], dist.BroadcastOptions()).wait()
        if not is_engine:
            return 0
        assert self.sink is not None
        for copy in self.copies[name]:
            target = self.sink.tensors[copy.target]
            box = tuple(slice(start, start + size) for start, size in zip(copy.source_start, copy.shape, strict=True))
            target.as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(tensor[box])
        return tensor.nbytes

    def checksums(self) -> list[int]:
        """Of all that the engine holds; which is then wiped."""
        sums = []
        for tensor in self.sink.tensors.values() if self.sink else ():
            sums += checksum(tensor.reshape(-1).view(torch.uint8)).tolist()
            tensor.zero_()
        return sums


def make_targets(layout: TargetLayout) -> dict[str, Tensor]:
    """The engine rank's memory."""
    return {tensor.name: torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layout.tensors}


def status_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(process: Process, way: str, number: int) -> dict[str, float]:
    """One sync: bytes, seconds between barriers, peak memory beyond what was there."""
    run: Callable[[], int] = {"direct": process.direct, "parameters": process.parameters, "buckets": process.buckets}[
        way
    ]
    process.transport.agree("start", str(number))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status_bytes("VmRSS")
    start_s = time.perf_counter()
    num_bytes = run()
    process.transport.agree("end", str(number))
    spent_s = time.perf_counter() - start_s
    return {"bytes": num_bytes, "seconds": spent_s, "peak_extra_mib": (status_bytes("VmHWM") - before) / MIB}


def run_process(process: int, port: int, size: str, dtype: str, num_pairs: int) -> None:
    """One of the 8 processes: all three ways, in turn, ``num_pairs`` times after a warm-up."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600))
    its = Process(process, store, SIZES[size], getattr(torch, dtype))
    results: list[dict[str, Any]] = []
    sums: list[list[int]] = []
    for number in range((1 + num_pairs) * len(WAYS)):
        way = WAYS[number % len(WAYS)]
        result = measure(its, way, number)
        sums.append(its.checksums())
        if number >= len(WAYS):
            results.append({"way": way, **result})
    assert all(other == sums[0] for other in sums), "the ways lead to different bits"
    bound = its.plan.lower_bound(process - NUM_TRAINERS) if its.layout else 0
    parameters = sum(torch.Size(held.shape).numel() for held in its.source.tensors)
    store.set(f"result/{process}", json.dumps({"runs": results, "bound": bound, "parameters": parameters}))
    its.transport.agree("outcome", "measured")


def summarize(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Per way: bytes in total and of the fullest rank, median seconds, peak of any rank; then ratios to the direct."""
    table: dict[str, Any] = {}
    for way in WAYS:
        runs = [[run for run in answer["runs"] if run["way"] == way] for answer in answers]
        table[way] = {
            "bytes": sum(its[0]["bytes"] for its in runs),
            "bytes_per_training_rank": max(its[0]["bytes"] for its in runs[:NUM_TRAINERS]),
            "bytes_per_engine_rank": max(its[0]["bytes"] for its in runs[NUM_TRAINERS:]),
            "seconds": statistics.median(max(its[i]["seconds"] for its in runs) for i in range(len(runs[0]))),
            "peak_extra_mib": max(run["peak_extra_mib"] for its in runs for run in its),
            "peak_extra_mib_engine": max(run["peak_extra_mib"] for its in runs[NUM_TRAINERS:] for run in its),
        }
    bound = sum(answer["bound"] for answer in answers)
    return {
        "parameters": answers[0]["parameters"],
        "lower_bound": bound,
        "bytes_over_bound": table["direct"]["bytes"] / bound,
        "ways": table,
        "ratios": {
            way: {key: table["direct"][key] / table[way][key] for key in ("bytes", "bytes_per_engine_rank", "seconds")}
            for way in WAYS[1:]
        },
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="246m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_arguments = (store.port, arguments.size, arguments.dtype, arguments.pairs)
    torch.multiprocessing.spawn(run_process, spawn_arguments, nprocs=NUM_TRAINERS + NUM_ENGINE_RANKS)
    answers = [json.loads(store.get(f"result/{process}")) for process in range(NUM_TRAINERS + NUM_ENGINE_RANKS)]
    result = summarize(answers)
    print(f"{result['parameters'] / 1e6:.0f}M parameters, {arguments.dtype}, {arguments.pairs} of each, alternating")
    print(f"{'':<12}{'MiB moved':>11}{'per engine rank':>17}{'seconds':>9}{'peak extra MiB':>16}")
    for way, row in result["ways"].items():
        moved, engine = row["bytes"] / MIB, row["bytes_per_engine_rank"] / MIB
        print(f"{way:<12}{moved:>11.1f}{engine:>17.1f}{row['seconds']:>9.3f}{row['peak_extra_mib']:>16.1f}")
    print(f"direct / lower bound: {result['bytes_over_bound']:.4f}")
    for way, ratios in result["ratios"].items():
        print(f"direct / {way}:", {key: round(value, 3) for key, value in ratios.items()})
    met = {
        key: all(ratios[key] <= AIMS[key] for ratios in result["ratios"].values()) for key in ("bytes", "seconds")
    } | {"peak_extra_mib": result["ways"]["direct"]["peak_extra_mib"] <= AIMS["peak_extra_mib"]}
    print("aims:", {key: f"{AIMS[key]}: {'met' if is_met else 'NOT MET'}" for key, is_met in met.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
