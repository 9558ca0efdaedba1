"""Reward functions that a recipe names without a file: ``exact_match``, ``math``, ``reasoning_gym``.

They have verl's signature, and give ``score``, ``acc`` (1 where all is right) and ``pred`` (the answer found, for the
majority in validation). What is right comes from the row (``ground_truth_of``).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moesaic.rl import math_child
from moesaic.rl.reasoning_tasks import TaskScorer

ANSWER_COLUMNS = "reward_model.ground_truth, ground_truth or answer"


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The row's right answer: ``reward_model.ground_truth`` (verl's), else ``ground_truth``, else ``answer``; None
    where it has none."""
    model = row.get("reward_model")
    if isinstance(model, Mapping) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    return row["ground_truth"] if row.get("ground_truth") is not None else row.get("answer")


def exact_match(*, solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 where the text is the answer, blanks around both aside; else 0.

    Raises:
        ValueError: the row has no answer.
    """
    found = solution_str.strip()
    is_right = found == _text_of(ground_truth).strip()
    return {"score": float(is_right), "acc": float(is_right), "pred": found}


class MathVerifier:
    """1 where the last mathematical answer in the text equals the row's, as ``math-verify`` judges; else 0.

    Of an answer of GSM8K's form, what follows ``####`` counts. Texts are compared in a process of its own, which the
    kernel ends when it has computed for ``timeout_s``, and which begins anew for the next text: a model that writes
    ``9^9^9^9`` would otherwise stop the run for good, as no thread and no handler gets its turn in such a power.

    Args:
        timeout_s: of the processor, for one text.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._end: Callable[[], Any] | None = None

    def __call__(self, *, solution_str: str, ground_truth: Any) -> dict[str, Any]:
        """See the class.

        Raises:
            TimeoutError: it took too long.
            ValueError: the row has no answer, or one that isn't mathematical; math-verify isn't installed.
            RuntimeError: the process ended by itself.
        """
        gold = _text_of(ground_truth).rpartition("####")[2].strip()
        with self._lock:
            answer = self._ask({"text": solution_str, "gold": gold})
        if "error" in answer:
            raise ValueError(answer["error"])
        return {**answer, "acc": answer["score"]}

    def close(self) -> None:
        """End the process. The next call would begin another."""
        with self._lock:
            self._stop()

    def _ask(self, question: Mapping[str, str]) -> dict[str, Any]:
        if self._child is not None and self._child.poll() is not None:
            self._stop()  # it ended between two calls
        child = self._child or self._start()
        assert child.stdin is not None
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
        return self._read(child)

    def _start(self) -> subprocess.Popen[str]:
        # -P: this package's folder must not be searched, it has a types.py
        command = [sys.executable, "-P", str(Path(math_child.__file__)), repr(self._timeout_s)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )
        self._child, self._end = child, weakref.finalize(self, _end_child, child)
        ready = self._read(child)
        if "error" in ready:
            self._stop()
            raise ValueError(f"math-verify can't be imported ({ready['error']}): pip install 'moesaic[rl]'")
        return child

    def _read(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = child.wait()
        self._stop()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            raise TimeoutError(f"math-verify took longer than {self._timeout_s:g} s, and was ended")
        raise RuntimeError(f"the process of math-verify ended with {code}")

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


def _end_child(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # what was on its way to a process that is gone


BUILT_IN: Mapping[str, Callable[[float], Callable[..., Any]]] = MappingProxyType(
    {
        "exact_match": lambda timeout_s: exact_match,
        "math": MathVerifier,
        "reasoning_gym": lambda timeout_s: TaskScorer(),
    }
)
"""By name: what makes one, of the seconds that a call may take."""


def _text_of(ground_truth: Any) -> str:
    """As text: rows may hold numbers.

    Raises:
        ValueError: None.
    """
    if ground_truth is None:
        raise ValueError(f"the row has no answer: no column {ANSWER_COLUMNS}")
    return str(ground_truth)
