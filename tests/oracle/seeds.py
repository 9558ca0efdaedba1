"""The band of one process in bf16: plain transformers and torch.optim, seed by seed, and what lies beside it.

A seed changes what bf16 can't tell apart, and nothing else:

- the weights it starts from, each by a relative 2**-9 at most, which is never more than half of bf16's spacing: casting
  them rounds by as much. In fp32 this moves a gradient by 0.007 (relative L2); a seed is then 0.015 off, as without it;
- the order of the documents, and (every fourth seed) two micro-batches in place of one. Alone this would be no band:
  most roundings stay the same, and seeds are only 0.002 apart, while tp's ranks round other partial sums.

Documents are those whose routing bf16 doesn't change at the first step, as in fp32's cells: a near-tie that falls the
other way moves a router's gradient by 0.15 or more, in one process too. A band with that in it hides a factor of 1.2.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from moesaic.data.batch import IGNORE_INDEX, Sample
from tests.oracle.cells import build_batch, largest
from tests.oracle.reference import Case, backward_in_one_process, build_documents

NUM_DOCUMENTS = 16
NUM_SEEDS = 12
NUM_STEPS = 10
LEARNING_RATE = 1e-3
DITHER = 2.0**-9
# Between the logits of the k-th and the (k+1)-th expert. bf16 moves that by 0.013 (standard deviation), 0.07 at most in
# 60 seeds of 98 tokens in 2 layers.
MIN_LOGIT_GAP = 0.08
# Of the seeds' largest. One further seed in 2,000 is beyond it, on any tensor; with 1.25 it would be one in 30.
MARGIN = 1.5
# Of the seeds' standard deviations, either way of their mean. One further run of 10 steps in 400 is beyond it at some
# step; with 4 it would be one in 80.
NUM_DEVIATIONS = 5
# What the band must stay below to judge anything: a relative L2, or a factor of 1.1 somewhere.
MAX_BAND = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A checkpoint, the documents of every step, and in fp32 its weights and the first step's gradients."""

    folder: Path
    documents: list[Sample]
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """The loss of each step, and the first step's gradients, whole, and their norm.

    Later norms aren't kept: once weights have moved, some tokens meet other experts, and norms then differ by jumps.
    """

    losses: list[float]
    norm: float
    grads: dict[str, Tensor]


def load_one_process(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.train()


def build_adamw(params: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """With torch's own eps: what it makes of the rounding of small gradients is in the band."""
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.1, fused=True)


def build_task(folder: Path) -> Task:
    model = load_one_process(folder, torch.float32)
    documents = list(itertools.islice(decided_documents(model), NUM_DOCUMENTS))
    assert len(documents) == NUM_DOCUMENTS, f"only {len(documents)} documents without a near-tie"
    backward_in_one_process(model, documents)
    params = dict(model.named_parameters())
    weights = {name: param.detach() for name, param in params.items()}
    return Task(folder, documents, weights, {name: param.grad for name, param in params.items()})


def decided_documents(model: PreTrainedModel) -> Iterator[Sample]:
    """Those in which each token's choice of experts, in each layer, is further from another one than bf16 rounds."""
    top_k = model.config.num_experts_per_tok
    for document in build_documents(Case(num_documents=8 * NUM_DOCUMENTS)):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([document.input_ids]), output_router_logits=True, use_cache=False)
        ordered = torch.cat(out.router_logits).sort(descending=True).values
        if (ordered[:, top_k - 1] - ordered[:, top_k]).min() >= MIN_LOGIT_GAP:
            yield document


def run_seed(seed: int, task: Task, storage: torch.dtype, num_steps: int = NUM_STEPS) -> Run:
    """AdamW on the stored weights, with the gradients of a copy of them in bf16."""
    random = torch.Generator().manual_seed(seed)
    stored = {}
    for name, weight in task.weights.items():
        dither = DITHER * (2 * torch.rand(weight.shape, generator=random) - 1)
        stored[name] = nn.Parameter((weight * (1 + dither)).to(storage))
    model = load_one_process(task.folder, torch.bfloat16)
    optimizer = build_adamw(stored.values(), LEARNING_RATE)
    losses, first = [], {}
    for step in range(num_steps):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(stored[name])
        order = torch.randperm(NUM_DOCUMENTS, generator=random).tolist()
        num_micro_batches = 2 if seed % 4 == 0 else 1
        micro_batches = [[task.documents[i] for i in order[j::num_micro_batches]] for j in range(num_micro_batches)]
        loss, grads = backward_in_bf16(model, micro_batches)
        for name, param in stored.items():
            param.grad = grads[name].to(storage)
        losses.append(loss)
        if step == 0:
            first = {name: param.grad for name, param in stored.items()}
        optimizer.step()
    norm = torch.cat([grad.flatten().float() for grad in first.values()]).norm().item()
    return Run(losses, norm, first)


def backward_in_bf16(model: PreTrainedModel, micro_batches: list[list[Sample]]) -> tuple[float, dict[str, Tensor]]:
    """The loss, and gradients that are summed over micro-batches in fp32."""
    num_tokens = sum(document.num_loss_tokens for documents in micro_batches for document in documents)
    total, sums = 0.0, {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    for documents in micro_batches:
        batch = build_batch(documents, "padded")
        logits = model(**batch.model_inputs()).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX) / num_tokens
        loss.backward()
        total += loss.item()
        for name, param in model.named_parameters():
            sums[name] += param.grad
            param.grad = None
    return total, sums


class Band:
    """What the seeds of one process span. A run is judged by what it has of:

    - errors: each gradient's relative L2 to fp32's, at most ``MARGIN`` times the seeds' largest;
    - distances: to the nearest seed's, at most ``MARGIN`` times the largest distance of a seed to its nearest other;
    - the norm: within ``NUM_DEVIATIONS`` standard deviations of the seeds' mean;
    - the loss of each step: the same, with the largest deviation up to that step. Differences grow as training goes on;
      where the seeds agree better than a step before, that is chance.
    """

    def __init__(self, seeds: list[Run], exact: dict[str, Tensor]) -> None:
        self.seeds, self.exact = seeds, exact
        self.errors = {name: MARGIN * max(self._error(name, seed) for seed in seeds) for name in exact}
        self.distances = {name: MARGIN * max(self._distance(name, seed) for seed in seeds) for name in exact}
        (self.norm,) = spans([[seed.norm] for seed in seeds])
        self.losses = spans([seed.losses for seed in seeds])
        widest = max(largest(self.errors), largest(self.distances))
        assert widest[0] < MAX_BAND, f"one process in bf16 is spread too far to judge by: {widest}"

    def _error(self, name: str, run: Run) -> float:
        return self._relative(name, run.grads[name], self.exact[name])

    def _distance(self, name: str, run: Run) -> float:
        others = (seed.grads[name] for seed in self.seeds if seed is not run)
        return min(self._relative(name, run.grads[name], other) for other in others)

    def _relative(self, name: str, ours: Tensor, theirs: Tensor) -> float:
        assert ours.shape == theirs.shape
        return ((ours.float() - theirs.float()).norm() / self.exact[name].norm()).item()

    def parts(self, run: Run) -> dict[str, float]:
        """How much of its bound each quantity takes up: at most 1 inside the band. A run may have fewer steps."""
        assert run.grads.keys() == self.exact.keys(), run.grads.keys() ^ self.exact.keys()
        parts = {f"error of {name}": self._error(name, run) / bound for name, bound in self.errors.items()}
        parts |= {f"distance of {name}": self._distance(name, run) / bound for name, bound in self.distances.items()}
        pairs = {"norm": (run.norm, self.norm)}
        pairs |= {f"loss {step}": pair for step, pair in enumerate(zip(run.losses, self.losses, strict=False), 1)}
        return parts | {name: abs(value - mean) / width for name, (value, (mean, width)) in pairs.items()}

    def outside(self, run: Run) -> dict[str, float]:
        """The parts beyond their bounds. NaN is in no band."""
        return {name: part for name, part in self.parts(run).items() if not part <= 1}

    def describe(self, run: Run) -> str:
        """The run's numbers, each with the band's in brackets."""
        errors = {name: self._error(name, run) for name in self.exact}
        error, name = largest(errors)
        losses = [f"{v:.4f} [{m:.4f} +- {w:.4f}]" for v, (m, w) in zip(run.losses, self.losses, strict=False)]
        part, fullest = largest(self.parts(run))
        median, bound = (statistics.median(values.values()) for values in (errors, self.errors))
        return (
            f"relative L2 median {median:.4f} [{bound:.4f}], worst {error:.4f} [{self.errors[name]:.4f}] ({name}); "
            f"norm {run.norm:.4f} [{self.norm[0]:.4f} +- {self.norm[1]:.4f}]; loss {', '.join(losses)}; "
            f"{part:.2f} of its bound: {fullest}"
        )


def spans(seeds: list[list[float]]) -> list[tuple[float, float]]:
    """Mean and width of each step."""
    steps = list(zip(*seeds, strict=True))
    deviations = itertools.accumulate(map(statistics.stdev, steps), max)
    return [(statistics.fmean(step), NUM_DEVIATIONS * one) for step, one in zip(steps, deviations, strict=True)]
