"""Recipes to verify, their folders made once a session, and what each rank runs for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.config import Recipe
from moesaic.train.setup import start
from moesaic.verify.plan import Against, load_plan, save_plan
from moesaic.verify.reference import save_reference
from moesaic.verify.report import Report
from moesaic.verify.run import verify_on_rank
from moesaic.verify.small_model import save_small_model
from tests.oracle.reference import Case, build_config
from tests.pool import RunRanks

Fault = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A tiny model, a topology, and what a recipe says beside it."""

    name: str
    world_size: int
    fields: dict[str, Any] = field(default_factory=dict)
    case: Case = field(default_factory=Case)
    against: Against = "hf"


def prepare_folder(verification: Verification, root: Path, run_ranks: RunRanks) -> Path:
    """The verification's folder with plan, model and reference; made the first time."""
    folder = root / "verifications" / verification.name
    if not folder.exists():
        model = root / "verified" / verification.case.name
        if not model.exists():
            save_small_model(build_config(verification.case), model, seed=0)
        recipe = Recipe(model=str(model), train_dataset="none", output_dir=str(folder.parent), **verification.fields)
        scratch = folder.with_name(f"{folder.name}.tmp")
        save_plan(recipe, scratch, against=verification.against, world_size=verification.world_size)
        scratch.rename(folder)
        _follow(folder, scratch)
        run_ranks(save_reference_on_rank, 1, folder)
    return folder


def _follow(folder: Path, scratch: Path) -> None:
    """The recipe names the model's folder by its path."""
    path = folder / "recipe.yaml"
    path.write_text(path.read_text().replace(str(scratch), str(folder)))


def save_reference_on_rank(_rank: int, folder: Path) -> None:
    save_reference(folder)


def verify(_rank: int, folder: Path, fault: Fault = nullcontext) -> Report:
    _, recipe = load_plan(folder)
    with fault():
        report = verify_on_rank(folder, start(recipe))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return report
