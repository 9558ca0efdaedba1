"""What each memory option costs: the largest number of bytes that a rank's tensors hold in a step, beside what the
parameters, gradients, optimizer state, whole blocks and activations add up to.

    python -m bench.memory [--nproc 4] [--ep 2] [--size large|small] [--options baseline,offload] [--json FILE]

Counted are the storages of live tensors, after every operator: resident memory on CPU also holds libraries, and what
the allocator keeps. What an operator allocates and frees again within itself isn't seen. On an accelerator, ``offload``
takes parameters, gradients and the optimizer's state off the device; on CPU ranks all of it is one memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moesaic.data.batch import Batch
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.units import UnitParam, list_units
from moesaic.train.step import train_step

NUM_EXPERTS, TOP_K, VOCABULARY = 16, 2, 512
REDUCED = 4  # bytes of a number while it is being reduced
# hidden, expert width, layers, tokens of a rank's micro-batch; parameters dominate.
SIZES = {"large": (512, 512, 6, 128), "small": (128, 128, 4, 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the step; two micro-batches where gradients are accumulated."""

    options: ParallelOptions = ParallelOptions()
    num_micro_batches: int = 1
    accumulation: Literal["sharded", "unsharded"] = "sharded"


OPTIONS: dict[str, Option] = {
    "baseline": Option(),
    "no reshard": Option(options=ParallelOptions(reshard_after_forward=False)),
    "checkpointed, keep": Option(options=ParallelOptions(activation_checkpointing=True)),
    "checkpointed, recompute": Option(
        options=ParallelOptions(activation_checkpointing=True, exchanged_tokens="recompute")
    ),
    "offload": Option(options=ParallelOptions(offload=True)),
    "sharded accumulation": Option(num_micro_batches=2),
    "unsharded accumulation": Option(num_micro_batches=2, accumulation="unsharded"),
    "bf16, fp32 masters": Option(options=ParallelOptions(compute_dtype=torch.bfloat16)),
    "bf16, bf16 masters": Option(options=ParallelOptions(compute_dtype=torch.bfloat16, storage_dtype=torch.bfloat16)),
    "custom": Option(options=ParallelOptions(fsdp_implementation="custom")),
}


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operators have returned and that are still alive, and the largest sum of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self._add(tensors)

    def now(self) -> int:
        """Bytes at this moment. FSDP frees a storage by resizing it, so sizes are asked for anew."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            ref = StorageWeakRef(local.untyped_storage())
            self._storages.setdefault(ref.cdata, ref)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.peak = max(self.peak, self.now())
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Numbers in one FSDP unit, of this rank's shard and gathered; of experts alone; of their last parameter."""

    local: int
    whole: int
    local_experts: int
    whole_experts: int
    last_experts: int


def measure_units(rows: list[UnitParam], num_layers: int) -> tuple[UnitSize, list[UnitSize]]:
    """The root's, and each layer's with its experts."""
    parts: list[list[UnitParam]] = [[] for _ in range(num_layers + 1)]
    for row in rows:
        parts[int(row.name.split(".")[2]) if row.name.startswith("model.layers.") else -1].append(row)
    sizes = []
    for part in parts:
        whole = {row.name: _numel(row) * _num_shards(row) for row in part}
        experts = [row for row in part if ".experts." in row.name]
        sizes.append(
            UnitSize(
                local=sum(map(_numel, part)),
                whole=sum(whole.values()),
                local_experts=sum(map(_numel, experts)),
                whole_experts=sum(whole[row.name] for row in experts),
                last_experts=whole[experts[-1].name] if experts else 0,
            )
        )
    return sizes[-1], sizes[:-1]


def _numel(row: UnitParam) -> int:
    return torch.Size(row.local_shape).numel()


def _num_shards(row: UnitParam) -> int:
    sizes = dict(axis.split("=") for axis in row.axes.split())
    return int(sizes.get("efsdp") or sizes["mp_shard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Bytes at the fullest moment of a step, by what holds them."""

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    whole_gradients: int
    activations: int

    @property
    def total(self) -> int:
        """Their sum."""
        return (
            self.parameters + self.optimizer + self.gradients + self.gathered + self.whole_gradients + self.activations
        )


def predict(option: Option, root: UnitSize, layers: list[UnitSize], activations: int, recomputed: int) -> Prediction:
    """The largest of the sums at each layer's backward, see ``_moments``, and at the root's, where blocks are gone.

    Args:
        activations: bytes held at the end of forward, beside parameters.
        recomputed: bytes of one layer's activations, where they are computed again.
    """
    options = option.options
    stored, computed = options.storage_dtype.itemsize, options.compute_dtype.itemsize
    numbers = root.local + sum(layer.local for layer in layers)
    is_summed = option.num_micro_batches > 1 and option.accumulation == "sharded"
    moments = []
    for index, layer in enumerate(layers):
        done = sum(later.local for later in layers[index + 1 :])
        ahead = layers[max(0, index - 1) : index] if options.reshard_after_forward else layers[:index]
        # Whole gradients of the micro-batches before: of everything that isn't reduced yet.
        held = root.whole + sum(other.whole for other in layers[:index]) + layer.whole - layer.whole_experts
        for gathered, whole_gradients in _moments(option, layer, is_last=index == len(layers) - 1):
            moments.append(
                Prediction(
                    parameters=stored * numbers,
                    optimizer=2 * stored * numbers,
                    gradients=stored * (numbers if is_summed else done),
                    gathered=gathered + computed * (root.whole + sum(other.whole for other in ahead)),
                    whole_gradients=whole_gradients + (REDUCED * held if option.accumulation == "unsharded" else 0),
                    activations=activations * (index + 1) // len(layers) + recomputed,
                )
            )
    moments.append(
        Prediction(
            parameters=stored * numbers,
            optimizer=2 * stored * numbers,
            gradients=stored * numbers,
            gathered=0,
            whole_gradients=2 * REDUCED * root.whole,
            activations=0,
        )
    )
    return max(moments, key=lambda moment: moment.total)


def _moments(option: Option, layer: UnitSize, is_last: bool) -> Iterator[tuple[int, int]]:
    """Bytes (gathered, of whole gradients) at two moments of a layer's backward.

    1. Its experts' gradients have been computed; they and all of its parameters are whole. What went into the reduction
       of the layer behind it is still held.
    2. Those gradients are being reduced: an input, what arrives from others (CPU ranks), and the sum, in fp32. FSDP2
       also still holds the last gradient that it rearranged, as it does for shards along dim 1.

    In one unit of two meshes all of a layer's gradients wait for its end, and what went into both reductions is held.
    """
    computed = option.options.compute_dtype.itemsize
    dense = layer.whole - layer.whole_experts
    is_native = option.options.fsdp_implementation == "native"
    waiting = layer.whole_experts if is_native else layer.whole
    yield (
        computed * layer.whole,
        computed * waiting + (0 if is_last else REDUCED * (dense if is_native else layer.whole)),
    )
    reducing = REDUCED * ((2 if is_native else 1) * layer.whole_experts + layer.local_experts)
    yield computed * dense, reducing + computed * (layer.last_experts + (0 if is_native else dense))


def build_config(size: str) -> Qwen3MoeConfig:
    """``large`` has 81M parameters."""
    hidden, width, num_layers, num_tokens = SIZES[size]
    return Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        vocab_size=VOCABULARY,
        max_position_embeddings=num_tokens,
    )


def build_batch(seed: int, num_tokens: int) -> Batch:
    """Random tokens in one row."""
    tokens = torch.randint(0, VOCABULARY, (1, num_tokens + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(
        input_ids=tokens[:, :-1].clone(),
        labels=tokens[:, 1:].clone(),
        position_ids=torch.arange(num_tokens)[None].clone(),
    )


def measure(folder: Path, option: Option, ep_size: int, num_tokens: int) -> dict[str, Any]:
    """Peak of a second step on this rank, bytes at the end of its forwards beside parameters, and the units."""
    meshes = build_meshes("cpu", ep_size=ep_size)
    model = from_pretrained(folder, meshes, options=option.options, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [build_batch(10 * dist.get_rank() + n, num_tokens) for n in range(option.num_micro_batches)]
    train_step(model, batches, optimizer, None, meshes, 1.0, gradient_accumulation=option.accumulation)
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    rows = list_units(model)
    root, layers = measure_units(rows, model.config.num_hidden_layers)
    kept: list[int] = []
    with LiveBytes([*model.parameters(), *model.buffers(), *state]) as live:
        before = live.now()

        def note(module: Any, args: Any, output: Any) -> None:
            kept.append(live.now() - before)

        handle = model.register_forward_hook(note)
        train_step(model, batches, optimizer, None, meshes, 1.0, gradient_accumulation=option.accumulation)
        handle.remove()
    gathered = root.whole + (0 if option.options.reshard_after_forward else sum(layer.whole for layer in layers))
    return {
        "peak": live.peak,
        "activations": kept[0] - gathered * option.options.compute_dtype.itemsize,
        "root": root,
        "layers": layers,
    }


def run_rank(rank: int, world_size: int, folder: str, name: str, ep_size: int, num_tokens: int, out: str) -> None:
    """Measure one option; rank 0 writes the result of the fullest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, measure(Path(folder), OPTIONS[name], ep_size, num_tokens))
    if rank == 0:
        torch.save(max(found, key=lambda result: result["peak"]), out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Make the checkpoint, run each option, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--size", choices=sorted(SIZES), default="large")
    parser.add_argument("--options", default=",".join(OPTIONS).replace(", ", "; "), help="separated by commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [name.replace("; ", ", ") for name in arguments.options.split(",")]
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(build_config(arguments.size), dtype=torch.float32).save_pretrained(folder)
        layer_activations = 0
        for number, name in enumerate(names):
            option, out = OPTIONS[name], f"{scratch}/{number}"
            num_tokens, num_layers = SIZES[arguments.size][3], SIZES[arguments.size][2]
            spawn_arguments = (arguments.nproc, str(folder), name, arguments.ep, num_tokens, out)
            torch.multiprocessing.spawn(run_rank, spawn_arguments, nprocs=arguments.nproc)
            found = torch.load(out, weights_only=False)
            if name == "baseline":
                layer_activations = found["activations"] // num_layers
            recomputed = layer_activations if option.options.activation_checkpointing else 0
            prediction = predict(option, found["root"], found["layers"], found["activations"], recomputed)
            results[name] = row = {
                "measured_mib": round(found["peak"] / 2**20, 2),
                "predicted_mib": round(prediction.total / 2**20, 2),
                "ratio": round(found["peak"] / prediction.total, 3),
                **{f"{part}_mib": round(number / 2**20, 2) for part, number in asdict(prediction).items()},
            }
            print(name, row, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
