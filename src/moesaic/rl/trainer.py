"""Reinforcement learning from Python: a recipe, a reward function, prompts, ``train()``.

    from moesaic.rl.trainer import RlTrainer

    def reward(prompts, completions, answer, **columns):
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]
    trainer = RlTrainer("recipes/rl/grpo_tiny.yaml", reward_fn=reward, dataset=rows, learning_rate=1e-5)
    trainer.train()

The script runs as it is in one process, and under ``torchrun --nproc-per-node 4`` on four.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic import runtime
from moesaic.config import Recipe
from moesaic.config.load import build_recipe, read_mapping
from moesaic.config.problem import RecipeError
from moesaic.config.rl_check import reward_weight_problems


class RlTrainer:
    """One run.

    Args:
        recipe: a YAML file, fields as YAML gives them, or a ``Recipe``; ``stage`` is ``rl`` where it doesn't say.
        reward_fn: one function or several, in verl's or TRL's signature (``rl/rewards.py``), beside the recipe's; each
            has the weight 1.
        dataset: rows to ask instead of the recipe's ``train_dataset``; JSON values. They are written to
            ``prompts-<checksum>.jsonl`` in the run's folder, and belong to the run: it goes on only with the same.
        fields: of the recipe, in place of its own.

    Raises:
        RecipeError: all problems of the recipe, for as many ranks as there are.
    """

    def __init__(
        self,
        recipe: Path | str | Mapping[str, Any] | Recipe,
        *,
        reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        dataset: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> None:
        self._reward_fns = (reward_fn,) if callable(reward_fn) else tuple(reward_fn)
        source = str(recipe) if isinstance(recipe, Path | str) else "recipe"
        data, problems = _fields_of(recipe)
        data = {"stage": "rl", **data, **fields}
        if dataset is not None:
            folder = Path(data.get("output_dir", Recipe.model_fields["output_dir"].default))
            data["train_dataset"] = {"path": str(_save_rows(dataset, folder)), "format": "prompt"}
        # What is given here rewards; the recipe need not.
        ignored = frozenset({"reward.functions"}) if self._reward_fns else frozenset()
        world_size = runtime.world_size_from_launcher()
        self.recipe = build_recipe(data, problems, source, world_size=world_size, ignored=ignored)
        if wrong := list(reward_weight_problems(self.recipe)):  # ignored with the functions, and read all the same
            raise RecipeError(wrong, source=source)

    def train(self) -> None:
        """Run it to its end, as this process's rank (``rl/loop.py::train_rl``)."""
        from moesaic.rl.loop import train_rl

        runtime.run_rank(train_rl, self.recipe, self._reward_fns)


def _fields_of(recipe: Path | str | Mapping[str, Any] | Recipe) -> tuple[dict[str, Any], list[Any]]:
    if isinstance(recipe, Recipe):
        return recipe.model_dump(mode="json", exclude_unset=True), []
    if isinstance(recipe, Mapping):
        return dict(recipe), []
    data, problems = read_mapping(Path(recipe))
    if problems and not data:
        raise RecipeError(problems, source=str(recipe))
    return data, problems


def _save_rows(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """By every rank, each the same: a name of its own first, so that none reads another's half.

    Other rows have another name: those of an earlier run in ``folder`` stay, whatever it is now given.
    """
    text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    path = folder / f"prompts-{zlib.crc32(text.encode()):08x}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{runtime.rank_from_launcher()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
    return path
