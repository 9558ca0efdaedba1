"""What a run's folder holds: its checkpoints, its export; and which of them a run goes on from. Torch-free.

A checkpoint is a folder ``step-000123`` with a ``.metadata`` in it. One that is being written, or taken away, has
another ending (``.tmp``, ``.old``) and doesn't count.
"""

from __future__ import annotations

import re
from pathlib import Path

from moesaic.config.problem import Problem
from moesaic.config.recipe import Recipe

EXPORT = "export"
_NAME = re.compile(r"step-(\d+)")


def find_checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, fewest steps first."""
    found = [path for path in output_dir.glob("step-*") if step_of(path) is not None and is_complete(path)]
    return sorted(found, key=lambda path: step_of(path) or 0)


def find_latest(output_dir: Path) -> Path | None:
    """The complete checkpoint with the most steps in ``output_dir``, or None. Reads the folder only."""
    return next(reversed(find_checkpoints(output_dir)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether all ranks finished writing it."""
    return (checkpoint / ".metadata").is_file()


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where a run's checkpoint after ``step`` optimizer steps is. Example: 150 -> ``output_dir/step-000150``."""
    return output_dir / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int | None:
    """Optimizer steps by the folder's name; None where it is no checkpoint's. Example: ``step-000150`` -> 150."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def choose_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from, or None for a run from the start; where ``run_folder_problems`` finds nothing."""
    if recipe.resume_from_checkpoint == "auto":
        return find_latest(Path(recipe.output_dir))
    return None if recipe.resume_from_checkpoint is None else Path(recipe.resume_from_checkpoint)


def run_folder_problems(recipe: Recipe) -> list[Problem]:
    """What is in the way in ``output_dir``, or wrong with the checkpoint: two runs never mix in one folder.

    A run from the start (``auto`` with nothing to go on from is one), or one that goes on from another folder's
    checkpoint, needs an ``output_dir`` without checkpoints and export. One that goes on from ``output_dir``'s own needs
    that no later one is there: it would be taken for the newest of the new run. Example: with step-000100, -000150 and
    -000200 there, resuming from step-000150 is refused for step-000200.
    """
    folder = Path(recipe.output_dir)
    if recipe.resume_from_checkpoint in (None, "auto"):
        has_checkpoint = find_latest(folder) is not None
        if has_checkpoint and recipe.resume_from_checkpoint == "auto":
            return []
        remedy = "go on from it with resume_from_checkpoint: auto, " if has_checkpoint else ""
        return _earlier_run(recipe, f"{remedy}remove it, or choose another output_dir")
    checkpoint = Path(recipe.resume_from_checkpoint)
    if not is_complete(checkpoint):
        missing = f"no such folder (seen from {Path.cwd()})"
        rule = "is no complete checkpoint: no .metadata in it" if checkpoint.is_dir() else missing
        remedy = "name a checkpoint's folder, or write auto"
        return [Problem(field="resume_from_checkpoint", value=str(checkpoint), rule=rule, remedy=remedy)]
    if checkpoint.resolve().parent != folder.resolve():
        return _earlier_run(recipe, "choose another output_dir, or remove what this one holds")
    step = step_of(checkpoint.resolve())
    later = [path.name for path in find_checkpoints(folder) if step is None or (step_of(path) or 0) > step]
    if not later:
        return []
    rule = f"holds {', '.join(later)} beyond {checkpoint.name}, which would pass for the newest of the resumed run"
    remedy = "remove or move these, choose another output_dir, or write resume_from_checkpoint: auto"
    return [Problem(field="output_dir", value=recipe.output_dir, rule=rule, remedy=remedy)]


def _earlier_run(recipe: Recipe, remedy: str) -> list[Problem]:
    folder = Path(recipe.output_dir)
    newest = find_latest(folder)
    if newest is None and not (folder / EXPORT).exists():
        return []
    rule = f"holds an earlier run ({EXPORT if newest is None else newest.name})"
    return [Problem(field="output_dir", value=recipe.output_dir, rule=rule, remedy=remedy)]
