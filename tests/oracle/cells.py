"""What each rank runs for a parity cell: two steps of our own ``train_step``, compared with one process's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from moesaic.data.batch import IGNORE_INDEX, Batch, Sample
from moesaic.meshes import Meshes, build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.experts import expert_parallel, find_expert_modules
from moesaic.train.grad_norm import clip_grad_norm_
from moesaic.train.step import train_step
from moesaic.weights.load import load_weights
from tests.oracle.reference import NUM_STEPS, OPTIMIZERS, Reference

# rel. = max|a-b| / max|b| per tensor, fp32: what summing in another order costs, with some room. SGD follows gradients,
# AdamW divides by their size, so its rounding is larger.
TOLERANCES = {"loss": 1e-6, "grads": 1e-5, "norms": 1e-5, "sgd": 1e-5, "adamw": 5e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One topology and one way to lay out the documents.

    Attributes:
        sizes: keyword arguments of ``build_meshes``.
        layout: ``padded`` (a document a row), ``packed`` (all of a micro-batch in one row).
        num_micro_batches, accumulation: how a step is cut, and when its gradients are reduced.
        shares: documents per dp rank, in turn; None shares them evenly. 0 gives a rank nothing but padding.
        optimizers: those whose weights after two steps are compared.
    """

    world_size: int
    sizes: dict[str, int] = field(default_factory=dict)
    options: ParallelOptions = field(default_factory=ParallelOptions)
    layout: str = "padded"
    num_micro_batches: int = 1
    accumulation: Literal["sharded", "unsharded"] = "sharded"
    shares: tuple[int, ...] | None = None
    optimizers: tuple[str, ...] = ("sgd", "adamw")


@torch.no_grad()
def rel_error(ours: Tensor, reference: Tensor) -> float:
    """max|a-b| over what this rank holds of ``ours`` / max|b| over the whole, plain reference.

    0 where both are zero; infinite where a value on either side isn't finite. Every rank judges its own shards,
    replicas each for itself. Gathers strided shards: every rank must call.
    """
    assert ours.shape == reference.shape, f"{tuple(ours.shape)}, not {tuple(reference.shape)}"
    mine, part = _local_pair(ours, reference)
    if not (mine.isfinite().all() and reference.isfinite().all()):
        return math.inf
    difference = (mine - part).abs().max().item() if mine.numel() else 0.0
    return difference if difference == 0 else difference / max(reference.abs().max().item(), 1e-30)


def _local_pair(ours: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's shard, and the same part of the reference, cut by torch without communication."""
    if not isinstance(ours, DTensor):
        return ours, reference
    if not all(isinstance(placement, (Shard, Replicate)) for placement in ours.placements):
        return full(ours), reference
    part = distribute_tensor(reference.detach(), ours.device_mesh, ours.placements, src_data_rank=None)
    return ours.to_local(), part.to_local()


def largest(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and its name. NaN is infinite: ``max`` alone would pass over it, for no comparison holds."""
    assert errors, "nothing was compared"
    return max((math.inf if math.isnan(error) else error, name) for name, error in errors.items())


class ShardOptimizer:
    """An optimizer of plain tensors over each rank's shards: what it computes is elementwise.

    DTensor derives how to shard each operation anew for every tensor of every topology; over the whole suite that costs
    more than the training. ``test_an_optimizer_of_shards_is_one_of_dtensors`` compares the two bit for bit.
    """

    def __init__(self, build: Callable[[Iterable[nn.Parameter]], Optimizer], params: Iterable[nn.Parameter]) -> None:
        self.params = [param for param in params if param.requires_grad]
        self.shards = [nn.Parameter(self._shard(param)) for param in self.params]
        self.optimizer = build(self.shards)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @staticmethod
    def _shard(tensor: Tensor) -> Tensor:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

    def step(self) -> None:
        for param, shard in zip(self.params, self.shards, strict=True):
            if isinstance(param, DTensor) and param.grad is not None:
                assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements
            shard.grad = None if param.grad is None else self._shard(param.grad)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            param.grad = None


def full(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def share_documents(documents: list[Sample], cell: Cell, rank: int) -> list[list[Sample]]:
    """This rank's documents, one list per micro-batch; cp and tp peers have the same."""
    num_peers = cell.sizes.get("cp_size", 1) * cell.sizes.get("tp_size", 1)
    num_dp, dp_rank = cell.world_size // num_peers, rank // num_peers
    shares = cell.shares or (len(documents) // num_dp,) * num_dp
    assert sum(shares) == len(documents) and len(shares) == num_dp, shares
    mine = documents[sum(shares[:dp_rank]) : sum(shares[: dp_rank + 1])]
    return [mine[i :: cell.num_micro_batches] for i in range(cell.num_micro_batches)]


def build_batch(documents: list[Sample], layout: str) -> Batch:
    """Rows of documents, built here by hand so that the product's own packing is not its own judge."""
    if not documents:
        documents = [Sample(input_ids=[0, 0], labels=[IGNORE_INDEX] * 2)]
    if layout == "packed":
        ids = [token for document in documents for token in document.input_ids]
        labels = [label for document in documents for label in document.labels]
        positions = [t for document in documents for t in range(len(document))]
        loss_positions = [t for t, label in enumerate(labels) if label != IGNORE_INDEX] or [0]
        return Batch(
            input_ids=torch.tensor([ids]),
            labels=torch.tensor([labels]),
            position_ids=torch.tensor([positions]),
            loss_positions=torch.tensor(loss_positions),
        )
    width = max(map(len, documents))
    return Batch(
        input_ids=torch.tensor([[*d.input_ids, *[0] * (width - len(d))] for d in documents]),
        labels=torch.tensor([[*d.labels, *[IGNORE_INDEX] * (width - len(d))] for d in documents]),
        position_ids=torch.arange(width).expand(len(documents), -1).clone(),
        attention_mask=torch.tensor([[1] * len(d) + [0] * (width - len(d)) for d in documents]),
    )


def run_cell(rank: int, cell: Cell, reference: Reference) -> dict[str, Any]:
    """Worst error per quantity, with the parameter where it is; and the tokens each expert received."""
    meshes = build_meshes("cpu", **cell.sizes)
    batches = [build_batch(docs, cell.layout) for docs in share_documents(reference.documents, cell, rank)]
    errors: dict[str, Any] = {}
    model = load_parallel(reference, meshes, cell)
    errors |= measure_gradients(model, batches, meshes, reference, cell.accumulation)
    for name in cell.optimizers:
        load_weights(model, reference.folder)  # from the beginning again
        optimizer = cast(Optimizer, ShardOptimizer(OPTIMIZERS[name], model.parameters()))
        for _ in range(NUM_STEPS):
            result = train_step(
                model, batches, optimizer, None, meshes, max_grad_norm=None, gradient_accumulation=cell.accumulation
            )
            assert result.is_finite
        errors[name] = worst(dict(model.named_parameters()), reference.weights[name])
    return errors


def load_parallel(reference: Reference, meshes: Meshes, cell: Cell) -> PreTrainedModel:
    # The listed models take the attention that transformers picks for each: not all of them have sdpa.
    attn_implementation = None if reference.is_listed else "sdpa"
    return from_pretrained(reference.folder, meshes, options=cell.options, attn_implementation=attn_implementation)


def measure_gradients(
    model: PreTrainedModel,
    batches: list[Batch],
    meshes: Meshes,
    reference: Reference,
    accumulation: Literal["sharded", "unsharded"] = "sharded",
) -> dict[str, Any]:
    """One step that moves nothing: loss, every gradient, and the norms that clipping sees."""
    errors: dict[str, Any] = {}

    class Recorder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            errors["grads"] = worst(grads_of(model), reference.grads)
            norms = {p: clip_grad_norm_(model.parameters(), None, p).item() for p in reference.norms}
            errors["norms"] = largest({str(p): abs(norms[p] - norm) / norm for p, norm in reference.norms.items()})

    for experts in find_expert_modules(model).values():
        expert_parallel(experts).load.reset()
    recorder = Recorder(model.parameters(), lr=0.0)
    result = train_step(model, batches, recorder, None, meshes, max_grad_norm=None, gradient_accumulation=accumulation)
    loss = result.loss_share.clone()
    dist.all_reduce(loss, group=meshes.tokens.get_group())
    assert abs(result.grad_norm - reference.norms[2.0]) <= TOLERANCES["norms"] * reference.norms[2.0]
    return errors | {
        "loss": (abs(loss.item() - reference.loss) / reference.loss, "loss"),
        "load": {n: expert_parallel(m).load.tokens for n, m in find_expert_modules(model).items()},
    }


def grads_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def worst(ours: Mapping[str, Any], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest relative error over all tensors, of what this rank holds, and its name. Every rank must call, and judge.

    Both sides must hold the same names: a tensor that only one of them has is no equality.
    """
    assert ours.keys() == reference.keys(), f"only on one side: {sorted(ours.keys() ^ reference.keys())}"
    return largest({name: rel_error(value, reference[name]) for name, value in ours.items()})


def assert_within_tolerance(errors: dict[str, Any]) -> None:
    """Every quantity within its tolerance; the message shows all of them."""
    too_large = {key: errors[key] for key, bound in TOLERANCES.items() if not errors[key][0] <= bound}
    assert not too_large, f"beyond tolerance: {too_large}; all: { ({k: errors[k] for k in TOLERANCES}) }"
