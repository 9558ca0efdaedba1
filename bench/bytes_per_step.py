"""Bytes that a rank sends in a training step, by topology and purpose, beside the least that it must send.

    python -m bench.bytes_per_step [--topologies "ep4;tp2"] [--json FILE]

Prints a Markdown table: KiB of a step, mean over ranks, and in brackets the largest ratio of a rank's bytes to its
least, where that isn't 1.00. What counts as what: ``bench.traffic``; what is the least: ``bench.bounds``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.traffic import PURPOSES, Traffic, measure_step, ratio
from moesaic.data.batch import Batch
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained

NUM_ROWS, NUM_POSITIONS, VOCABULARY = 2, 128, 512
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
# Ranks, sizes of meshes, options.
TOPOLOGIES: dict[str, tuple[int, dict[str, int], ParallelOptions]] = {
    "fsdp4": (4, {}, ParallelOptions()),
    "fsdp4, kept gathered": (4, {}, ParallelOptions(reshard_after_forward=False)),
    "ep4": (4, {"ep_size": 4}, ParallelOptions()),
    "ep2 (efsdp 2)": (4, {"ep_size": 2}, ParallelOptions()),
    "tp2": (4, {"tp_size": 2}, ParallelOptions()),
    "ep2 tp2": (4, {"ep_size": 2, "tp_size": 2}, ParallelOptions()),
    "ep4 tp2": (4, {"ep_size": 4, "tp_size": 2}, ParallelOptions()),
    "ep4 tp2, checkpointed": (4, {"ep_size": 4, "tp_size": 2}, CHECKPOINTED),
    "cp2": (4, {"cp_size": 2}, ParallelOptions()),
    "ep4 cp2": (4, {"ep_size": 4, "cp_size": 2}, ParallelOptions()),
    "ep4 cp4": (4, {"ep_size": 4, "cp_size": 4}, ParallelOptions()),
    "ep4 cp2 tp2": (4, {"ep_size": 4, "cp_size": 2, "tp_size": 2}, ParallelOptions()),
    "ep4 cp2 tp2, checkpointed": (4, {"ep_size": 4, "cp_size": 2, "tp_size": 2}, CHECKPOINTED),
    "R2 ep2": (4, {"mp_replicate_size": 2, "ep_size": 2}, ParallelOptions()),
    "R2 tp2": (4, {"mp_replicate_size": 2, "tp_size": 2}, ParallelOptions()),
    "R2 ep2 tp2": (4, {"mp_replicate_size": 2, "ep_size": 2, "tp_size": 2}, ParallelOptions()),
    "R2 ep2 cp2": (4, {"mp_replicate_size": 2, "ep_size": 2, "cp_size": 2}, ParallelOptions()),
    "8 ranks: dp2 cp2 tp2 ep4": (8, {"cp_size": 2, "tp_size": 2, "ep_size": 4}, ParallelOptions()),
    "8 ranks: R2 ep2 tp2": (8, {"mp_replicate_size": 2, "ep_size": 2, "tp_size": 2}, ParallelOptions()),
    "8 ranks: R2 cp2 tp2 ep2": (
        8,
        {"mp_replicate_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": 2},
        ParallelOptions(),
    ),
}


def build_config() -> Qwen3MoeConfig:
    """Four layers of 16 experts, 1.9M parameters."""
    return Qwen3MoeConfig(
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        vocab_size=VOCABULARY,
        max_position_embeddings=NUM_POSITIONS,
    )


def build_batch(seed: int) -> Batch:
    """Random tokens in equally long rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (NUM_ROWS, NUM_POSITIONS + 1), generator=generator)
    return Batch(
        input_ids=tokens[:, :-1].clone(),
        labels=tokens[:, 1:].clone(),
        position_ids=torch.arange(NUM_POSITIONS).expand(NUM_ROWS, -1).clone(),
    )


def run_rank(rank: int, world_size: int, folder: str, names: list[str], out: str) -> None:
    """Measure one topology after another; rank 0 prints each, and writes every rank's traffic."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
    results = {}
    for name in names:
        _, sizes, options = TOPOLOGIES[name]
        meshes = build_meshes("cpu", **sizes)
        model = from_pretrained(folder, meshes, options=options, attn_implementation="sdpa")
        traffic = measure_step(model, meshes, options, [build_batch(meshes.data.get_local_rank("dp"))])
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, traffic)
        if rank == 0:
            print(table_row(name, every), flush=True)
            results[name] = [asdict(traffic) for traffic in every]
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


def table_row(name: str, ranks: list[Traffic]) -> str:
    """One line: the topology, then each purpose."""
    cells = [name]
    for purpose in PURPOSES:
        mean = sum(traffic.sent[purpose] for traffic in ranks) / len(ranks) / 1024
        largest = max(ratio(traffic, purpose) for traffic in ranks)
        shown = "" if purpose == "other" or f"{largest:.2f}" == "1.00" else f" ({largest:.2f})"
        cells.append("-" if mean == 0 else f"{mean:.{0 if mean >= 10 else 1}f}{shown}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Make the checkpoint, run each topology, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", help="separated by semicolons; default: all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.topologies.split(";") if arguments.topologies else list(TOPOLOGIES)
    results: dict[str, Any] = {}
    print(f"| topology | {' | '.join(PURPOSES)} |\n|{'---|' * (len(PURPOSES) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(build_config(), dtype=torch.float32).save_pretrained(folder)
        for world_size in sorted({TOPOLOGIES[name][0] for name in names}):
            out, own = f"{scratch}/{world_size}", [name for name in names if TOPOLOGIES[name][0] == world_size]
            torch.multiprocessing.spawn(run_rank, (world_size, str(folder), own, out), nprocs=world_size)
            results |= torch.load(out, weights_only=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
