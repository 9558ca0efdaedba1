"""Every family at transformers' experts seam on four ranks against one process; writes ``docs/families.md``.

    python -m tests.families.matrix [family ...]     # the named families alone are only printed

For each family: a tiny model, saved by transformers; one process, a document at a time; ep 2 x efsdp 2 on four ranks.
Loss, every gradient, the norms and the weights after two steps of SGD are compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from moesaic.model.build import find_auto_class
from moesaic.model.seam import find_experts
from moesaic.specs import refusal
from tests.families.configs import MODEL_TYPES
from tests.oracle.cells import TOLERANCES, Cell, run_cell, worst
from tests.oracle.reference import Case, Reference, backward_in_one_process, load_reference
from tests.pool import WorkerPool

DOC = Path("docs/families.md")
INTRODUCTION = """# Model families

Every family of transformers 5.23 whose experts are at its experts seam (`use_experts_implementation`), and what
`make matrix`, which writes this page, found. A family needs nothing registered here: where its experts are and how they
compute shows at the seam, and how its files name them is read from transformers.

A tiny model of each is trained for two steps (SGD with momentum, fp32, CPU) on four ranks, ep 2 x efsdp 2, and in one
process, a document at a time. Compared are the loss (1e-6), every gradient, the norms, and the weights after the steps.
An error is max|a-b| / max|b| of a tensor; the table has the largest of all gradients. Its bound is 1e-5. Where a
family's own rounding moves gradients further (embeddings times 1 + 1e-7 * noise, in one process), the bound is twice
that floor. The k-th and the next score of every `topk` are at least 1e-4 apart, so that rounding can't choose another
expert.

Layers of the same class elsewhere (a vision tower's) are experts too: a `ModelSpec` whose `experts` is a glob leaves
them out. Parameters that a family keeps in fp32 have the dtype of all others: FSDP2 wants one in a unit.
Under `bf16` they are gathered in bf16 like the rest (plain transformers would compute with them in fp32)."""
CELL = Cell(world_size=4, sizes={"ep_size": 2}, optimizers=("sgd",))
NUM_DOCUMENTS = 8
QUANTITIES = ("loss", "grads", "norms", "sgd")
# How far the embeddings are moved to see how far rounding alone moves a family's gradients.
NUDGE = 1e-7

# What the model itself doesn't show.
NOTES = {
    "phimoe": "trained with `router_jitter_noise` it draws experts at random; compared with 0, where it doesn't",
    "zaya": "top-1; tokens that skip the experts count as expert 0's, with weight 0",
    "ernie4_5_vl_moe": "train on text: only images call its vision experts, and then all EP ranks must have some",
    "inkling2_text": "its router wants weights in fp32: compute in fp32",
    "deepseek_v4": "its first layers route by token id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family's line. ``errors``: relative, by quantity; ``floor``: None where the tolerance is enough."""

    family: str
    lm_class: str = ""
    special: tuple[str, ...] = ()
    errors: dict[str, float]
    floor: float | None = None
    problem: str | None = None

    @property
    def bound(self) -> float:
        """What the gradients may differ by: the tolerance, or twice what rounding alone does."""
        return max(TOLERANCES["grads"], 2 * (self.floor or 0.0))

    @property
    def is_good(self) -> bool:
        """True where everything is within its bound. The floor widens that of what follows from gradients alone."""
        scale = self.bound / TOLERANCES["grads"]
        bounds = {key: TOLERANCES[key] * (1.0 if key == "loss" else scale) for key in self.errors}
        return self.problem is None and all(self.errors[key] <= bounds[key] for key in self.errors)


def measure(pool: WorkerPool, family: str, root: Path) -> Row:
    """Compare one family; a refusal or a failure becomes the row's ``problem``."""
    if (reason := refusal(family)) is not None:
        return Row(family=family, errors={}, problem=f"refused: {reason}")
    reference = load_reference(Case(family=family, is_listed=True, num_documents=NUM_DOCUMENTS), root)
    model = load_whole(reference)
    results = pool.run(run_cell, CELL.world_size, CELL, reference, timeout_s=200)
    errors = {key: max(result[key][0] for result in results) for key in QUANTITIES}
    where = max((result["grads"] for result in results), key=lambda error: error[0])[1]
    special = describe(family, model, reference)
    floor = None
    if errors["grads"] > TOLERANCES["grads"] or errors["sgd"] > TOLERANCES["sgd"]:
        print(f"  worst gradient of {family}: {where}", flush=True)
        floor = measure_floor(model, reference)
    return Row(family=family, lm_class=type(model).__name__, special=special, errors=errors, floor=floor)


def load_whole(reference: Reference) -> PreTrainedModel:
    """The model in one process, as transformers loads it."""
    config = AutoConfig.from_pretrained(reference.folder)
    return find_auto_class(config).from_pretrained(reference.folder, dtype=torch.float32).train()


def measure_floor(model: PreTrainedModel, reference: Reference) -> float:
    """How far the gradients of one process move where the embeddings do by one part in ten millions."""
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.mul_(1 + NUDGE * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)))
    backward_in_one_process(model, reference.documents)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return worst(grads, reference.grads)[0]


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


def render(rows: list[Row]) -> str:
    """The document."""
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        "| family | class | at the seam, and notes | worst gradient | bound |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        special = "; ".join(row.special) or "-"
        if row.problem is not None:
            lines.append(f"| `{row.family}` | - | {row.problem} | - | - |")
            continue
        floor = "" if row.floor is None else f" (floor {row.floor:.1e})"
        error = f"{row.errors['grads']:.1e}"
        lines.append(f"| `{row.family}` | {row.lm_class} | {special} | {error} | {row.bound:.1e}{floor} |")
    return "\n".join(lines) + "\n"


def main(families: list[str]) -> int:
    """Measure all families, or those named; 1 where one isn't within its bounds."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    pool, rows = WorkerPool(warning_filters=()), []
    with tempfile.TemporaryDirectory() as folder:
        for family in families or MODEL_TYPES:
            start = time.perf_counter()
            try:
                row = measure(pool, family, Path(folder))
            except Exception:  # the other families are measured all the same
                row = Row(family=family, errors={}, problem="failed: " + traceback.format_exc(limit=-3)[-1500:])
            rows.append(row)
            errors = " ".join(f"{key} {error:.1e}" for key, error in row.errors.items())
            verdict = "ok  " if row.is_good else "----" if refusal(family) else "FAIL"
            spent_s = time.perf_counter() - start
            print(f"{verdict} {family}: {errors} floor {row.floor} {row.problem or ''} ({spent_s:.1f} s)", flush=True)
    pool.close()
    bad = [row.family for row in rows if not row.is_good and refusal(row.family) is None]
    print(f"{len(rows)} families, {len(bad)} not within bounds: {bad}")
    if not families and not bad:
        DOC.write_text(render(rows), encoding="utf-8")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
