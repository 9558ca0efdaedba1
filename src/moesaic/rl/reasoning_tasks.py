"""Tasks of ``reasoning-gym``: questions that a program makes and scores. The only file that imports it."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

ANSWER_TAG = "answer"
NONSENSE = "\u00a7"
"""An answer that is right nowhere."""


def build_task(name: str, *, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    """The task's data set of ``size`` rows; equal arguments make equal rows. A ``seed`` in ``options`` comes first.

    Raises:
        ValueError: the package isn't installed, no such task, or options that it doesn't know or takes no such value.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning_gym can't be imported ({error}): pip install 'moesaic[rl]'") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"dataset {name!r}: reasoning_gym has no such task; {hint}")
    known = sorted({field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"dataset {name!r}: options {', '.join(unknown)} aren't known to it; it has {', '.join(known)}"
        )
    try:
        return reasoning_gym.create_dataset(name, **{"seed": seed, **options, "size": size})
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"dataset {name!r}: options {dict(options)}: {type(error).__name__}: {error}") from error


def stream_rows(task: Any, name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each row with what scores it later: ``prompt``, ``question``, ``answer``, ``metadata``, ``data_source`` (the
    task's name) and the task's ``options``."""
    for number in range(len(task)):
        row = task[number]
        yield {"prompt": row["question"], **row, "data_source": name, "options": dict(options)}


def scorer_problem(task: Any, row: Mapping[str, Any]) -> str | None:
    """Why the task's own scorer can't be trained on in this row: its own answer is worth nothing, or nonsense as much.

    None where it can, and where the row has no answer: then the scorer judges whatever is proposed.
    """
    if row["answer"] is None:
        return None
    try:
        own = float(task.score_answer(row["answer"], row))
    except Exception as error:
        return f"the task's scorer fails on the row's own answer: {type(error).__name__}: {error}"
    if own <= 0:
        return "the task's scorer gives the row's own answer 0"
    try:
        nonsense = float(task.score_answer(NONSENSE, row))
    except Exception:
        return None  # it can't read it: counted as a failure, and 0, when a model writes such a thing
    return "the task's scorer gives nonsense as much as the row's own answer" if nonsense >= own else None


def find_answer(text: str) -> str:
    """What the last ``<answer>...</answer>`` of the text holds; without one, the text; blanks around it aside."""
    from reasoning_gym.utils import extract_answer

    found = extract_answer(text, tag_name=ANSWER_TAG)
    return text.strip() if found is None else str(found)


class TaskScorer:
    """Scores rows that tasks made, each by its own task with its own options. verl's signature."""

    def __init__(self) -> None:
        self._tasks: dict[str, Any] = {}

    def __call__(self, *, data_source: str, solution_str: str, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """``score`` is the task's, 0 to 1; ``acc`` whether that is all of it; ``pred`` the answer that was found."""
        options = extra_info["options"]
        key = json.dumps([data_source, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = build_task(data_source, size=1, seed=0, options=options)
        answer = find_answer(solution_str)
        score = float(self._tasks[key].score_answer(answer, dict(extra_info)))
        return {"score": score, "acc": float(score >= 1), "pred": answer}
