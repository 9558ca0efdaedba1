"""What context parallelism saves: the largest number of bytes that a rank's tensors hold in a step over one long
sequence, beside what they hold before it, with the ranks as cp and with each rank on a sequence of its own.

    python -m bench.context_memory [--nproc 4] [--positions 8192] [--json FILE]

Counted as in ``bench.memory``. Activations are what is there beside parameters: also gathered ones, and gradients,
which the model's size keeps small.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.memory import LiveBytes, build_batch
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.train.step import train_step

AIM = 0.35  # at 4 ranks


def build_config(num_positions: int) -> Qwen3MoeConfig:
    """A model whose activations outweigh its parameters by far."""
    return Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=512,
        max_position_embeddings=num_positions,
    )


def measure(folder: str, cp_size: int, num_positions: int, options: ParallelOptions) -> int:
    """Bytes at this rank's peak in a second step, beside those before it."""
    meshes = build_meshes("cpu", cp_size=cp_size, ep_size=dist.get_world_size())
    model = from_pretrained(folder, meshes, options=options, attn_implementation="sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = [build_batch(meshes.data.get_local_rank("dp"), num_positions)]
    train_step(model, batches, optimizer, None, meshes, 1.0)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        before = live.now()
        train_step(model, batches, optimizer, None, meshes, 1.0)
    return live.peak - before


def run_rank(rank: int, world_size: int, folder: str, num_positions: int, checkpoints: bool, out: str) -> None:
    """Measure without and with cp; rank 0 writes the fullest rank's bytes of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
    options = ParallelOptions(activation_checkpointing=checkpoints)
    peaks = []
    for cp_size in (1, world_size):
        peak = torch.tensor(measure(folder, cp_size, num_positions, options))
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        peaks.append(int(peak))
    if rank == 0:
        torch.save(peaks, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Make the checkpoint, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(0)
        config = build_config(arguments.positions)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        for checkpoints in (False, True):
            out = f"{scratch}/{checkpoints}"
            spawn_arguments = (arguments.nproc, str(folder), arguments.positions, checkpoints, out)
            torch.multiprocessing.spawn(run_rank, spawn_arguments, nprocs=arguments.nproc)
            alone, shared = torch.load(out)
            results["checkpointed" if checkpoints else "whole"] = row = {
                "cp1_mib": round(alone / 2**20, 2),
                f"cp{arguments.nproc}_mib": round(shared / 2**20, 2),
                "ratio": round(shared / alone, 3),
            }
            print("activation checkpointing" if checkpoints else "baseline", row, flush=True)
    if arguments.nproc == 4:
        print(
            f"aim: at most {AIM}", {name: "met" if row["ratio"] <= AIM else "NOT MET" for name, row in results.items()}
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.nproc == 4 and any(row["ratio"] > AIM for row in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
