"""Plan the weights of large models into rollout engines, on one core with no other process: seconds, bytes, balance.

    python -m bench.reshard_plan [--case 30B|235B|all] [--engine vllm|closed-form] [--table] [--json FOLDER] [--full]

The trained model is a real one on meta, sharded by ``parallelize`` under a process group in which nothing is sent. Two
layers are sharded, and described for all by name. What engines load: two layers of each rank's vLLM model are traced
and repeated by name (traced_layouts.py); or, without vLLM, it is written down (engine_layouts.py). ``--full`` does all
layers, once, on both sides, and checks that it gives the same. Each case runs in a process of its own.

Seconds are CPU time of this process. What is in brackets doesn't count as planning: checks, vLLM's own start (imports,
its config, its first model: once in a process), and what is asked of the finished plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import traced_layouts
from bench.engine_layouts import EngineRank, MoeShape, build_target
from moesaic.engines import vllm_layout
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import parallelize
from moesaic.reshard.blocks import describe_source
from moesaic.reshard.layout import Held, SourceLayout, TargetLayout
from moesaic.reshard.transfers import ReshardPlan, plan_transfers

MAX_SECONDS = 5.0
MAX_IMBALANCE = 1.1
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``num_ranks`` trainer ranks with ``ep_size`` -> ``num_engines`` engines of ``tp_size``."""

    shape: MoeShape
    num_ranks: int
    ep_size: int
    num_engines: int
    tp_size: int


CASES = {
    "30B": Case(
        shape=MoeShape(
            num_layers=48,
            hidden_size=2048,
            num_experts=128,
            intermediate_size=768,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=151936,
        ),
        num_ranks=64,
        ep_size=8,
        num_engines=8,
        tp_size=8,
    ),
    "235B": Case(
        shape=MoeShape(
            num_layers=94,
            hidden_size=4096,
            num_experts=128,
            intermediate_size=1536,
            num_heads=64,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=151936,
        ),
        num_ranks=512,
        ep_size=32,
        num_engines=32,
        tp_size=8,
    ),
}


def describe(case: Case, num_layers: int) -> SourceLayout:
    """The trained model with ``num_layers`` layers, in fp32, exported as bf16."""
    model = traced_layouts.build_model(case.shape, num_layers)
    parallelize(model, build_meshes("cpu", ep_size=case.ep_size))
    return describe_source(model, dtype=torch.bfloat16)


def repeat_layers(source: SourceLayout, num_layers: int) -> SourceLayout:
    """A model of two layers -> one of ``num_layers`` that all lie as the second does."""
    tensors: list[Held] = []
    second = [held for held in source.tensors if held.name.startswith("model.layers.1.")]
    for held in source.tensors:
        if not tensors or not held.name.startswith("model.layers.1."):
            tensors.append(held)
        elif held is second[0]:
            for layer in range(1, num_layers):
                tensors += [
                    dataclasses.replace(each, name=re.sub(r"(?<=layers\.)1", str(layer), each.name, count=1))
                    for each in second
                ]
    return dataclasses.replace(source, tensors=tuple(tensors))


class Clock:
    """Named spans of this process's own time, in seconds: neighbours on the core don't count."""

    def __init__(self) -> None:
        self.spans: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        start = time.process_time()
        yield
        self.spans[name] = time.process_time() - start


def build_engine(case: Case, engine: str, clock: Clock, *, full: bool) -> list[TargetLayout]:
    """The layouts of one engine's ranks."""
    if engine == "closed-form":
        with clock.span("engine layouts, closed form"):
            ranks = [EngineRank(tp_size=case.tp_size, tp_rank=rank) for rank in range(case.tp_size)]
            return [build_target(case.shape, rank) for rank in ranks]
    vllm_ranks = vllm_layout.EngineRank.all_of(tp_size=case.tp_size)
    with tempfile.TemporaryDirectory() as name:
        two, whole = Path(name) / "two", Path(name) / "whole"
        with clock.span("(vLLM starts: imports, config, first model)"):
            traced_layouts.start_vllm(case.shape, two)
        with clock.span("describe the files of 2 layers"):
            files = traced_layouts.describe_export(case.shape, 2)
        with clock.span(f"build and trace 2 layers of {case.tp_size} vLLM ranks"):
            traces = traced_layouts.trace_ranks(two, vllm_ranks, files)
        with clock.span("resolve to parameters, repeat"):
            layouts = traced_layouts.repeat(traces, files, case.shape.num_layers)
        if full:
            with clock.span("(build and trace all layers, compare)"):
                traced_layouts.check_full(case.shape, vllm_ranks, layouts, whole)
    return layouts


def run_case(name: str, engine: str, *, full: bool, folder: Path | None) -> tuple[dict[str, object], ReshardPlan]:
    """Plan one case; what was measured."""
    case, clock = CASES[name], Clock()
    targets = build_engine(case, engine, clock, full=full) * case.num_engines
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    with clock.span("shard and describe 2 layers, repeat"):
        source = repeat_layers(describe(case, 2), case.shape.num_layers)
    if full:
        with clock.span("(shard and describe all layers)"):
            whole = describe(case, case.shape.num_layers)
        assert whole == source, "layers don't all lie alike"
    with clock.span("plan"):
        plan = plan_transfers(source, targets)
    dist.destroy_process_group()
    with clock.span("bounds and sums"):
        received = [plan.bytes_received(target) for target in range(plan.num_targets)]
        bounds = [plan.lower_bound(target) for target in range(plan.num_targets)]
    with clock.span("(one trainer rank's messages)"):
        sender = plan.messages_of(case.num_ranks // 2)
    with clock.span("(one engine rank's messages)"):
        receiver = plan.messages_of(case.num_ranks + plan.num_targets // 2)
    with clock.span("(table)"):
        plan.table()
    planned = sum(seconds for span, seconds in clock.spans.items() if not span.startswith("("))
    sent = [plan.bytes_sent(rank) for rank in range(plan.num_ranks)]
    result: dict[str, object] = {
        "case": f"{name}: {case.num_ranks} ranks, ep {case.ep_size} -> {case.num_engines} engines of tp {case.tp_size}",
        "engine": engine,
        "plan_s": planned,
        "spans_s": clock.spans,
        "received_gib": sum(received) / GIB,
        "received_over_bound": max(mine / least for mine, least in zip(received, bounds, strict=True)),
        "received_per_engine_rank_gib": [min(received) / GIB, max(received) / GIB],
        "sent_per_trainer_rank_gib": [min(sent) / GIB, max(sent) / GIB],
        "imbalance": plan.imbalance,
        "peak_buffer_mib": plan.peak_buffer_bytes / 2**20,
        "messages_of_one_trainer_rank": len(sender.sends),
        "messages_of_one_engine_rank": len(receiver.receives),
        "pieces_of_one_engine_rank": sum(len(message.pieces) for message in receiver.receives),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"plan-{name}.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    return result, plan


def show(result: dict[str, object]) -> str:
    """One line per number."""
    lines = []
    for key, value in result.items():
        if isinstance(value, dict):
            lines += [f"    {span:<44}{seconds:8.2f} s" for span, seconds in value.items()]
        elif isinstance(value, float):
            lines.append(f"  {key:<42}{value:10.4f}")
        elif isinstance(value, list):
            lines.append(f"  {key:<42}{' to '.join(f'{each:.4f}' for each in value)}")
        else:
            lines.append(f"  {key:<42}{value}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 where one misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    default = "vllm" if traced_layouts.HAS_VLLM else "closed-form"
    parser.add_argument("--engine", choices=["vllm", "closed-form"], default=default, help="default: vllm, where it is")
    parser.add_argument("--table", action="store_true", help="print the plan itself too")
    parser.add_argument("--json", type=Path, help="write each plan to a file in this folder")
    parser.add_argument("--full", action="store_true", help="check the repeated layers against all of them")
    options = parser.parse_args(arguments)
    if options.case == "all":
        given = list(sys.argv[1:] if arguments is None else arguments)
        runs = [subprocess.run([sys.executable, "-m", "bench.reshard_plan", *given, "--case", name]) for name in CASES]
        return max(run.returncode for run in runs)
    if options.engine == "vllm" and not traced_layouts.HAS_VLLM:
        parser.error("--engine vllm: vLLM isn't installed here; run in the venv of `make test-engines`")
    torch.set_num_threads(1)
    result, plan = run_case(options.case, options.engine, full=options.full, folder=options.json)
    print(show(result))
    if options.table:
        print(plan.table())
    print(json.dumps(result))
    seconds, over = result["plan_s"], result["received_over_bound"]
    assert isinstance(seconds, float) and isinstance(over, float)
    return int(seconds > MAX_SECONDS or over != 1.0 or plan.imbalance > MAX_IMBALANCE)


if __name__ == "__main__":
    sys.exit(main())
