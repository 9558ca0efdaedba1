"""One training step: ours beside transformers' own expert parallelism, in one run, alternating.

    python -m bench.train_step [--nproc 4] [--ep 4] [--size large|small] [--pairs 11] [--json FILE]

Both sides: the same checkpoint, ranks, batch, dtype (fp32), AdamW, clipping at 1.0, loss = sum / global tokens. What is
reported is the ratio (ours / theirs) of each adjacent pair of steps: these machines are noisy, and a ratio within a
pair is not. The floor is one process with as many threads as cores on the whole batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from moesaic.data.batch import Batch
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.train.step import train_step

ROWS, COLUMNS = 2, 256  # per rank
LEARNING_RATE, MAX_NORM = 1e-4, 1.0

SIZES: dict[str, dict[str, Any]] = {
    "large": {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8},
    "small": {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4},
}


def build_config(size: str) -> Qwen3MoeConfig:
    """16 experts, top-4, vocabulary 8192; ``large`` has 65M parameters."""
    return Qwen3MoeConfig(
        **SIZES[size],
        num_key_value_heads=4,
        head_dim=SIZES[size]["hidden_size"] // SIZES[size]["num_attention_heads"],
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        vocab_size=8192,
        max_position_embeddings=COLUMNS,
    )


def build_batch(rank: int) -> Batch:
    """Random tokens, another batch for each rank."""
    tokens = torch.randint(0, 8192, (ROWS, COLUMNS + 1), generator=torch.Generator().manual_seed(rank))
    positions = torch.arange(COLUMNS).expand(ROWS, -1).clone()
    return Batch(input_ids=tokens[:, :-1].clone(), labels=tokens[:, 1:].clone(), position_ids=positions)


def build_our_step(folder: Path, ep_size: int) -> Callable[[], float]:
    """Our side: one call is one optimizer step; returns the gradient norm."""
    meshes = build_meshes(ep_size=ep_size)
    model = from_pretrained(folder, meshes, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batch = build_batch(dist.get_rank())
    return lambda: train_step(model, [batch], optimizer, None, meshes, MAX_NORM).grad_norm


def build_their_step(folder: Path, ep_size: int) -> Callable[[], float]:
    """transformers' side: its loading, FSDP2 and dispatch; the norm as its Trainer computes it on mixed meshes."""
    world_size = dist.get_world_size()
    config = DistributedConfig(fsdp_size=world_size, ep_size=ep_size)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batch = build_batch(dist.get_rank())
    inputs = batch.model_inputs()

    def step() -> float:
        num_tokens = torch.tensor(batch.labels.numel())
        dist.all_reduce(num_tokens)
        # Its FSDP averages gradients over the data-parallel ranks.
        loss = their_loss_sum(model(**inputs).logits, batch.labels) / num_tokens * world_size
        loss.backward()
        norm = their_clip_grad_norm(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return step


def their_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers' own loss of causal language models, but summed."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


@torch.no_grad()
def their_clip_grad_norm(parameters: list[torch.nn.Parameter]) -> float:
    """One norm per mesh, each made whole, combined, and one scaling: the way transformers' Trainer does it."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for param in parameters:
        if param.grad is not None:
            groups.setdefault(param.grad.device_mesh if isinstance(param.grad, DTensor) else None, []).append(param)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]) for params in groups.values()
    ]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for params in groups.values():
        torch.nn.utils.clip_grads_with_norm_(params, MAX_NORM, total)
    return total.item()


BUILDERS: dict[str, Callable[[Path, int], Callable[[], float]]] = {"ours": build_our_step, "theirs": build_their_step}


def run_rank(
    rank: int, world_size: int, folder: str, ep_size: int, sides: tuple[str, ...], num_rounds: int, out: str
) -> None:
    """``num_rounds`` times a step of each side, the order turning every round; rank 0 writes times and peak memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
    steps: dict[str, Callable[[], float]] = {}
    for side in sides:
        steps[side] = BUILDERS[side](Path(folder), ep_size)
        norms = [steps[side](), steps[side]()]  # builds communicators and the optimizer's state
        if rank == 0:
            print(f"{side}: gradient norms of the first two steps {norms}", flush=True)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(num_rounds):
        for side in sides if turn % 2 else reversed(sides):
            dist.barrier()
            start = time.perf_counter()
            steps[side]()
            dist.barrier()
            times[side].append(time.perf_counter() - start)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(out).write_text(json.dumps({"times_s": times, "peak_rss_gib": peak.item()}))
    dist.barrier()
    dist.destroy_process_group()


def spawn(arguments: argparse.Namespace, folder: Path, sides: tuple[str, ...], num_rounds: int) -> dict[str, Any]:
    """Run the ranks, return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        ranks = (arguments.nproc, str(folder), arguments.ep, sides, num_rounds, str(out))
        torch.multiprocessing.spawn(run_rank, ranks, nprocs=arguments.nproc)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def measure_floor(folder: Path, world_size: int) -> float:
    """Median time of one process's step on the whole batch with all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = [build_batch(rank) for rank in range(world_size)]
    ids, labels = torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        (their_loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def summarize(
    times_s: dict[str, list[float]], peaks_gib: dict[str, float], floor_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Median and 75th percentile of the pairwise ratio, medians of each side, the floor, peak memory of a rank."""
    ours, theirs = times_s["ours"], times_s["theirs"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "size": arguments.size,
        "nproc": arguments.nproc,
        "ep": arguments.ep,
        "pairs": len(ratios),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_p75": round(statistics.quantiles(ratios, n=4)[2], 3),
        "ours_s": round(statistics.median(ours), 4),
        "theirs_s": round(statistics.median(theirs), 4),
        "one_process_s": round(floor_s, 4),
        "peak_rss_gib": {side: round(peak, 3) for side, peak in peaks_gib.items()},
    }


def main() -> None:
    """Make the checkpoint, run the ranks, print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--ep", type=int, default=4)
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(build_config(arguments.size), dtype=torch.float32).save_pretrained(folder)
        # Memory apart, one side a run: in a shared process the second would hide the first.
        peaks_gib = {side: spawn(arguments, folder, (side,), 2)["peak_rss_gib"] for side in BUILDERS}
        times_s = spawn(arguments, folder, tuple(BUILDERS), arguments.pairs)["times_s"]
        floor_s = measure_floor(folder, arguments.nproc)
        summary = summarize(times_s, peaks_gib, floor_s, arguments)
    print(json.dumps(summary, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
