"""What is measured while training, and where it goes: console, ``metrics.jsonl``, boards (TensorBoard, ...).

Measuring (``Meter``) is collective and happens on every rank, at logging steps only. Writing (``MetricsWriter``) is for
rank 0.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from moesaic.data.batch import Batch
from moesaic.meshes import Meshes
from moesaic.ops import host
from moesaic.parallel.experts import expert_parallel, find_expert_modules
from moesaic.runtime import device_type
from moesaic.train.evaluate import HeldOut
from moesaic.train.flops import ModelFlops, num_causal_pairs, peak_flops_per_s
from moesaic.train.router import RouterTraining
from moesaic.train.step import StepResult
from moesaic.train.writer import RunWriter


def memory_bytes() -> int:
    """Peak memory of this rank so far: allocated on its accelerator, or the process's resident set on CPU."""
    if device_type() != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def gather_expert_load(model: nn.Module) -> dict[str, float]:
    """Most loaded expert over the mean, per MoE layer, since the last call; 1.0 is even. Resets the counters.

    Collective over the default group: one all-reduce of all layers' counts. Empty for a model without expert
    parallelism. A layer that saw no token has load 1.0.

    Example, 2 ep ranks with experts {0, 1} and {2, 3} that received 6 2 | 4 4 tokens: mean 4, load 1.5.
    """
    modules = find_expert_modules(model)
    if not modules:
        return {}
    rows = [_own_counts(module) for module in modules.values()]
    counts = torch.cat(rows)
    dist.all_reduce(counts)
    (numbers,) = host.read_ints(counts[None])
    load: dict[str, float] = {}
    for name, row in zip(modules, rows, strict=True):
        layer, numbers = numbers[: row.numel()], numbers[row.numel() :]
        load[name] = max(layer) * len(layer) / sum(layer) if any(layer) else 1.0
    return load


def _own_counts(module: nn.Module) -> torch.Tensor:
    """[experts] int64: tokens that this rank's experts received, zeros for the others'. Resets the counter."""
    state = expert_parallel(module)
    tokens = state.load.tokens
    counts = torch.zeros(state.num_experts, dtype=torch.int64, device=state.ep_mesh.device_type)
    if tokens is not None:
        first = state.ep_mesh.get_local_rank() * math.ceil(state.num_experts / state.ep_mesh.size())
        counts[first : first + tokens.numel()] = tokens
    state.load.reset()
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One logging step, equal on every rank.

    Attributes:
        step: optimizer steps done, from 1.
        epoch: passes over the training rows begun, from 1.
        loss: of this step's global batch: sum of token losses / number of tokens with loss, in nats.
        grad_norm: global L2 norm of this step's gradients before clipping.
        lr: learning rate of this step.
        num_loss_tokens: tokens with loss in this step's global batch.
        step_time_s: mean wall-clock time of the steps since the last logging step (or evaluation, or checkpoint, whose
            own time doesn't count), in seconds.
        tokens_per_s: the documents' tokens per second over all ranks in that time; no padding, packed or not.
        tflops_per_rank: useful work, 1e12 FLOP/s per rank (see ``flops``), from the documents' own lengths.
        mfu: ``tflops_per_rank`` over the device's bf16 peak; None where the peak isn't known.
        memory_gib: each rank's peak memory in GiB, by rank.
        expert_load: tokens of the most loaded expert / mean, per MoE layer, since the last logging step.
        router: what the recipe's ``router_config`` asks for: ``aux_loss`` and ``z_loss`` of this step, without their
            coefficients, which aren't part of ``loss``, and ``max_bias``, the largest correction bias by size.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    num_loss_tokens: int
    step_time_s: float
    tokens_per_s: float
    tflops_per_rank: float
    mfu: float | None
    memory_gib: list[float]
    expert_load: dict[str, float]
    router: dict[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Everything as flat numbers, for curves: per-layer loads under their names, memory as the ranks' maximum."""
        scalars = {key: value for key, value in asdict(self).items() if isinstance(value, int | float)}
        del scalars["step"]
        scalars["memory_gib_max"] = max(self.memory_gib)
        scalars |= {f"router/{name}": value for name, value in self.router.items()}
        return scalars | {f"expert_load/{name}": load for name, load in self.expert_load.items()}


class Meter:
    """Counts tokens and time between logging steps. Every rank has one and calls the same methods in the same order.

    Args:
        model: the sharded model.
        meshes: its meshes.
        flops: the model's, see ``build_model_flops``.
        router: what trains its routers, if anything does.
    """

    def __init__(
        self, model: nn.Module, meshes: Meshes, flops: ModelFlops, router: RouterTraining | None = None
    ) -> None:
        self._model = model
        self._meshes = meshes
        self._flops = flops
        self._router = router
        kind = meshes.data.device_type
        self._device = torch.device(kind)
        self._peak = peak_flops_per_s(None if kind == "cpu" else torch.get_device_module(kind).get_device_name())
        self.restart()

    def restart(self) -> None:
        """Start the clock anew, e.g. after an evaluation, whose time is no training time."""
        self._num_tokens = 0
        self._num_pairs = 0
        self._num_steps = 0
        self._began_ns = time.perf_counter_ns()

    def count(self, micro_batches: Iterable[Batch]) -> None:
        """Add one optimizer step with this rank's micro-batches, as a loader gives them. Not collective."""
        for batch in micro_batches:
            assert batch.document_lengths is not None, "a loader's batch says how long its documents are"
            self._num_tokens += sum(batch.document_lengths)
            self._num_pairs += num_causal_pairs(batch.document_lengths)
        self._num_steps += 1

    def measure(self, step: int, epoch: int, lr: float, result: StepResult) -> StepMetrics:
        """Metrics of step ``step`` and of the time since the last call; starts the clock anew.

        Collective: an all-reduce over ``meshes.tokens``, an all-gather over all ranks, with EP an all-reduce over them.
        """
        loss = result.loss_share.clone()
        dist.all_reduce(loss, group=self._meshes.tokens.get_group())
        loss_value = host.read_float(loss)  # waits for the step to end: the clock is read after it
        elapsed_ns = time.perf_counter_ns() - self._began_ns
        world_size = dist.get_world_size()
        numbers = [self._num_tokens, self._num_pairs, memory_bytes(), elapsed_ns]
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = own.new_empty(world_size * own.numel())
        dist.all_gather_single(gathered, own)
        tokens, pairs, memory, elapsed = zip(*host.read_ints(gathered.view(world_size, -1)), strict=True)
        elapsed_s = max(elapsed) / 1e9
        # cp and tp peers are given the same samples.
        num_copies = self._meshes.sizes.cp_size * self._meshes.sizes.tp_size
        flops_per_rank = self._flops.total(sum(tokens), sum(pairs)) / num_copies / elapsed_s / world_size
        metrics = StepMetrics(
            step=step,
            epoch=epoch,
            loss=loss_value,
            grad_norm=result.grad_norm,
            lr=lr,
            num_loss_tokens=int(result.num_tokens),
            step_time_s=elapsed_s / self._num_steps,
            tokens_per_s=sum(tokens) / num_copies / elapsed_s,
            tflops_per_rank=flops_per_rank / 1e12,
            mfu=None if self._peak is None else flops_per_rank / self._peak,
            memory_gib=[num_bytes / 2**30 for num_bytes in memory],
            expert_load=gather_expert_load(self._model),
            router={} if self._router is None else self._router.measure(),
        )
        self.restart()
        return metrics


class MetricsWriter(RunWriter):
    """Writes what supervised training measures.

    ``metrics.jsonl`` gets one JSON object per logging step (``kind: train``, the fields of ``StepMetrics``) and one per
    evaluation (``kind: eval``; ``step``, ``loss`` in nats per token, ``num_loss_tokens``, and of each set by name these
    two in ``sets``).
    """

    def write_step(self, metrics: StepMetrics) -> None:
        """One line to the console and to ``metrics.jsonl``, and a point on each curve."""
        self.append({"kind": "train", **asdict(metrics)})
        self.plot({f"train/{name}": value for name, value in metrics.scalars().items()}, metrics.step)
        self.print(_step_line(metrics, self.num_steps))

    def write_eval(self, step: int, held_out: HeldOut) -> None:
        """The held-out losses after optimizer step ``step``."""
        sets = {name: {"loss": loss, "num_loss_tokens": count} for name, (loss, count) in held_out.sets.items()}
        loss, count = held_out.loss, held_out.num_loss_tokens
        self.append({"kind": "eval", "step": step, "loss": loss, "num_loss_tokens": count, "sets": sets})
        each = {name: loss for name, (loss, _) in held_out.sets.items()} if len(sets) > 1 else {}
        self.plot({"eval/loss": loss} | {f"eval/loss/{name}": value for name, value in each.items()}, step)
        parts = "".join(f"  {name} {value:.4f}" for name, value in each.items())
        self.print(f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  held-out loss {loss:.4f}{parts}")


def _step_line(metrics: StepMetrics, num_steps: int) -> str:
    mfu = "n/a" if metrics.mfu is None else f"{metrics.mfu:.1%}"
    parts = [
        f"step {metrics.step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {metrics.loss:.4f}",
        f"norm {metrics.grad_norm:.3f}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_s:,.0f} tok/s",
        f"{metrics.tflops_per_rank:.3g} TFLOP/s per rank",
        f"MFU {mfu}",
        f"{max(metrics.memory_gib):.2f} GiB",
    ]
    if metrics.expert_load:
        parts.append(f"expert load max/mean {max(metrics.expert_load.values()):.2f}")
    parts += [f"{name} {value:.4g}" for name, value in metrics.router.items()]
    return "  ".join(parts)
