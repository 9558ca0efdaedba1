"""One family in every cell of the matrix: what its ranks compute beside one process, or why they refuse to."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from moesaic.meshes import build_meshes
from moesaic.model.build import build_on_meta, find_auto_class
from moesaic.model.seam import find_experts
from moesaic.parallel.apply import parallelize
from moesaic.specs import refusal
from tests.oracle.cells import TOLERANCES, Cell, run_cell
from tests.oracle.floors import bounds_above, measure_floor
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import WorkerPool

NUM_DOCUMENTS = 8
QUANTITIES = ("loss", "grads", "norms", "sgd")
# Generous: on a busy machine a cell takes many times its seconds.
CELL_TIMEOUT_S = 300.0

# What the model itself doesn't show.
NOTES = {
    "phimoe": "trained with `router_jitter_noise` it draws experts at random; compared with 0, where it doesn't",
    "zaya": "top-1; tokens that skip the experts count as expert 0's, with weight 0",
    "ernie4_5_vl_moe": "train on text: only images call its vision experts, and then all EP ranks must have some",
    "inkling2_text": "its router wants weights in fp32: compute in fp32",
    "deepseek_v4": "its first layers route by token id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One family in one cell: relative errors by quantity, or why there are none.

    Attributes:
        where: the parameter with the worst gradient.
        refused: what was said when the model was parallelized.
        failure: a traceback.
    """

    errors: dict[str, float] = field(default_factory=dict)
    where: str = ""
    refused: str | None = None
    failure: str | None = None

    def is_within(self, bounds: Mapping[str, float]) -> bool:
        """True where it was refused, or all errors are within ``bounds``."""
        if self.refused is not None:
            return True
        return self.failure is None and all(self.errors[key] <= bounds[key] for key in QUANTITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family in all cells. ``floor``: how far rounding alone moves each quantity; None where nobody had to ask."""

    family: str
    lm_class: str = "-"
    special: tuple[str, ...] = ()
    outcomes: dict[str, Outcome]
    floor: dict[str, float] | None = None

    @property
    def failed(self) -> list[str]:
        """Cells that are neither within the bounds nor refused."""
        return [name for name, each in self.outcomes.items() if not each.is_within(bounds_above(self.floor or {}))]


def measure(pool: WorkerPool, family: str, cells: Mapping[str, Cell], root: Path) -> Row:
    """Compare one family in each cell with the same one process. Nothing is raised: a failure is an outcome."""
    if (reason := refusal(family)) is not None:
        return Row(family=family, outcomes=dict.fromkeys(cells, Outcome(refused=reason)))
    try:
        reference = load_reference(Case(family=family, is_listed=True, num_documents=NUM_DOCUMENTS), root)
        model = load_whole(reference)
        special = describe(family, model, reference)
    except Exception:  # the other families are measured all the same
        return Row(family=family, outcomes=dict.fromkeys(cells, Outcome(failure=traceback.format_exc(limit=-3))))
    outcomes = {name: run(pool, cell, reference) for name, cell in cells.items()}
    row = Row(family=family, lm_class=type(model).__name__, special=special, outcomes=outcomes)
    measured = [outcome for outcome in outcomes.values() if outcome.errors]
    if all(outcome.is_within(TOLERANCES) for outcome in measured):
        return row
    floor = measure_floor(model, reference, ["sgd"])
    return Row(family=family, lm_class=row.lm_class, special=special, outcomes=outcomes, floor=floor)


def run(pool: WorkerPool, cell: Cell, reference: Reference) -> Outcome:
    """One cell of one family."""
    try:
        results = pool.run(compare_or_refuse, cell.world_size, cell, reference, timeout_s=CELL_TIMEOUT_S)
    except Exception as error:
        return Outcome(failure=str(error)[-1500:])
    refusals = {result for result in results if isinstance(result, str)}
    if refusals:
        is_common = len(refusals) == 1 and all(isinstance(result, str) for result in results)
        return Outcome(refused=refusals.pop()) if is_common else Outcome(failure=f"ranks disagree: {results}")
    errors = {key: max(result[key][0] for result in results) for key in QUANTITIES}
    where = max((result["grads"] for result in results), key=lambda error: error[0])[1]
    return Outcome(errors=errors, where=where)


def compare_or_refuse(rank: int, cell: Cell, reference: Reference) -> dict[str, Any] | str:
    """On each rank: errors by quantity; or the shortened refusal, if parallelizing the model is refused."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = build_on_meta(reference.folder, attn_implementation=None, dtype=torch.float32)
    try:
        parallelize(model, meshes, options=cell.options)
    except ValueError as error:
        return shorten(str(error), model.config.model_type)
    result = run_cell(rank, cell, reference)
    return {key: result[key] for key in QUANTITIES}


def shorten(message: str, model_type: str) -> str:
    """A refusal without sizes, the numbers of layers, and what comes more than once.

    Example: ``tp_size=2: model.layers.0.self_attn (A): k has 3 heads; model.layers.1.self_attn (A): k has 3 heads.
    Choose a tp_size that divides them, or 1.`` -> ``A: k has 3 heads``.
    """
    text = re.sub(r"(cp_size=\d+, )?tp_size=\d+: ", "", message).replace(f"{model_type}: ", "")
    text = text.removesuffix(" Choose a tp_size that divides them, or 1.").replace("; set cp_size and tp_size 1", "")
    text = re.sub(r"[\w.]*\.\d+\.[\w.]+ \((\w+)\)", r"\1", text)
    parts = [part.rstrip(".") for part in re.split(r"\n|; ", text)]
    return "; ".join(dict.fromkeys(re.sub(r"\b(\w+)(, \1\b)+", r"\1", part) for part in parts))


def load_whole(reference: Reference) -> PreTrainedModel:
    """The model in one process, as transformers loads it."""
    config = AutoConfig.from_pretrained(reference.folder)
    return find_auto_class(config).from_pretrained(reference.folder, dtype=torch.float32).train()


def describe(family: str, model: PreTrainedModel, reference: Reference) -> tuple[str, ...]:
    """What sets the family apart at the seam, and which parameters a text never reaches."""
    found: list[str] = []
    experts: list[Any] = list(find_experts(model).values())
    kind = experts[0]
    found += ["transposed"] if kind.is_transposed else []
    found += ["biases"] if kind.has_bias else []
    found += ["gate and up interleaved"] if not kind.is_concatenated else []
    found += ["no gate"] if not kind.has_gate else []
    found += ["norm behind each expert"] if kind.has_post_expert_norm else []
    found += ["own gate function"] if type(kind)._apply_gate is not _default_apply_gate else []
    width = kind.down_proj.size(2 if kind.is_transposed else 1)
    hidden_size = model.config.get_text_config().hidden_size
    found += [f"experts work on another width than the model ({width} of {hidden_size} here)"] * (width != hidden_size)
    idle = [name for name, param in model.named_parameters() if param.requires_grad and name not in reference.grads]
    found += [f"parameters without gradient: {len(idle)}, e.g. `{idle[0]}`"] if idle else []
    note = NOTES.get(family)
    return (*found, *([note] if note else []))
