"""What completions are worth: the weighted sum of reward functions, in verl's or TRL's signature.

A function is told by its parameters' names (it gets only those it has, or all where it has ``**kwargs``)::

    verl    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw) -> float | dict
            once per completion; of a dict ``score`` counts, and the rest is kept beside it
    TRL     def reward_func(prompts, completions, completion_ids, **columns) -> list[float | None]
            once for all completions of a rank, which are of whole groups; a None is left out of the sum. What else TRL
            gives (trainer_state, log_extra, log_metric) isn't there

Either may be ``async``; others are called in threads, where Python has no signals, so no ``signal.alarm`` either (of
math-verify: ``parsing_timeout=None``). Whatever a function does, the run goes on: a call that raises or takes too long,
or a score that isn't a finite number, is counted, the first message of its kind kept, and that component is 0.

Example: weights 1 and 0.5, of which the second function failed on the second completion::

    completion   math   style   total   num_failed
    0             1.0     0.4     1.2       0
    1             1.0     0.0     1.0       1
"""

from __future__ import annotations

import inspect
import logging
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy
from torch import Tensor

from moesaic.rl.calls import FailureKind, LoopCalls, Outcome, ThreadCalls
from moesaic.rl.environment import MAX_REWARD, finite
from moesaic.rl.reasoning_tasks import TaskScorer
from moesaic.rl.reward_functions import ANSWER_COLUMNS, BUILT_IN, MathVerifier, exact_match, ground_truth_of
from moesaic.rl.types import Prompt, Trajectory
from moesaic.rl.user_code import describe_error, load_callable

log = logging.getLogger(__name__)

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids")
# What tells verl's signature; any of its parameters tells TRL's.
VERL_MARK = "solution_str"
ENVIRONMENT = "environment"
"""Component of what the environment gave."""
RESERVED = (ENVIRONMENT, "reward_model", "overlong")
"""Components that aren't functions': a function of such a name is called ``<name>_2``."""

NUM_THREADS = 4
"""Calls of a user's synchronous function at a time: some wait for others' answers. Built-in ones only compute."""
START_S = 60.0
"""What a built-in function may take longer, for the process that it begins or the package that it imports."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Of one trajectory.

    Attributes:
        total: the components' weighted sum.
        components: by name, unweighted; one whose function gave None is missing.
        extra: what functions gave beside their scores, plain values: ``acc``, ``pred``, ... Where two functions give
            the same key, the later one's is ``<component>/<key>``.
        num_failed: components that are 0 because their function failed.
    """

    total: float
    components: Mapping[str, float]
    extra: Mapping[str, Any] = field(default_factory=dict)
    num_failed: int = 0

    def with_component(self, name: str, value: float, weight: float = 1.0) -> Reward:
        """With a further component: a reward model's score, the penalty of overlong completions."""
        assert name not in self.components, name
        total = self.total + weight * value
        return replace(self, total=total, components={**self.components, name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Scores that a function failed to give, ``count`` of them, of one kind; ``message`` is the first's."""

    function: str
    kind: FailureKind
    count: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A reward function, and how it is called. ``takes``: parameters that it has; None: it takes any. ``preset``: those
    that a ``partial`` gives it."""

    name: str
    weight: float
    call: Function
    signature: Literal["verl", "trl"]
    takes: frozenset[str] | None
    preset: frozenset[str]
    columns: tuple[str, ...]  # that TRL's must be given
    is_async: bool
    threads: ThreadCalls

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in values.items()
            if name not in self.preset and (self.takes is None or name in self.takes)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """Of one function for one trajectory. ``value`` None: it gave none."""

    value: float | None = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: FailureKind | None = None
    message: str = ""


class RewardFunctions:
    """Scores trajectories; not collective: each rank scores those it is given.

    Args:
        functions: names (``file.py:name``, or of ``reward_functions.BUILT_IN``), or functions themselves.
        weights: one each; empty: 1 each.
        timeout_s: for one call: of one completion in verl's signature, of all in TRL's.

    Raises:
        ValueError: a name that can't be loaded, a signature of neither kind, weights that don't fit.
    """

    def __init__(
        self, functions: Sequence[str | Function], *, weights: Sequence[float] = (), timeout_s: float = 10.0
    ) -> None:
        if weights and len(weights) != len(functions):
            raise ValueError(
                f"reward.weights={list(weights)}: {len(weights)} for {len(functions)} functions; one each, or none."
            )
        if timeout_s <= 0:
            raise ValueError(f"reward.timeout_s={timeout_s}: seconds, more than 0.")
        self._functions: list[_Function] = []
        for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
            base = _name_of(function)
            names = (base if number == 1 else f"{base}_{number}" for number in count(1))
            name = next(name for name in names if name not in (*RESERVED, *self.names))
            self._functions.append(_build(function, name, weight, timeout_s))
        self._loop = LoopCalls(timeout_s=timeout_s)
        self._counts: Counter[tuple[str, FailureKind]] = Counter()
        self._messages: dict[tuple[str, FailureKind], str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the components, in order."""
        return tuple(function.name for function in self._functions)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Before a run: refuse functions that need what no row has.

        Raises:
            ValueError: with the function, and what is missing.
        """
        rows = [prompt.row for prompt in prompts]
        columns = {name for row in rows for name in row} - {"prompt"}  # they are given all prompts
        for function in self._functions:
            missing = [name for name in function.columns if name not in columns]
            if missing:
                raise ValueError(
                    f"reward.functions: {function.name} needs {', '.join(missing)}, and the data's columns are "
                    f"{', '.join(sorted(columns))}; rename them there, or give the parameter a default."
                )
            needs_truth = function.call is exact_match or isinstance(function.call, MathVerifier)
            if needs_truth and all(ground_truth_of(row) is None for row in rows):
                raise ValueError(f"reward.functions: {function.name} needs a column {ANSWER_COLUMNS}; no row has one.")
            if isinstance(function.call, TaskScorer) and not all({"metadata", "options"} <= row.keys() for row in rows):
                raise ValueError(
                    f"reward.functions: {function.name} scores rows of format: reasoning_gym, and there are others."
                )

    def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Reward]:
        """The reward of each, in order. Raises nothing that a function raises.

        Args:
            texts: of the trajectories' tokens after the prompt.
        """
        assert len(trajectories) == len(texts), (len(trajectories), len(texts))
        rewards = [Reward(total=0.0, components={}) for _ in trajectories]
        if not trajectories:
            return rewards
        for function in self._functions:
            scores = self._score(function, trajectories, texts)
            self._count(function.name, scores)
            rewards = [_add(*pair, function) for pair in zip(rewards, scores, strict=True)]
        return [
            reward
            if trajectory.environment_reward is None
            else reward.with_component(ENVIRONMENT, trajectory.environment_reward)
            for reward, trajectory in zip(rewards, trajectories, strict=True)
        ]

    def take_failures(self) -> list[Failure]:
        """What failed since this was last called."""
        failures = [
            Failure(function=name, kind=kind, count=count, message=self._messages[name, kind])
            for (name, kind), count in self._counts.items()
        ]
        self._counts.clear()
        return failures

    def close(self) -> None:
        """End what functions of this object run in: the event loop, the process of ``math``."""
        self._loop.close()
        for function in self._functions:
            if isinstance(function.call, MathVerifier):
                function.call.close()

    def _score(self, function: _Function, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> Sequence[_Score]:
        if function.signature == "trl":
            (outcome,) = self._run(function, [_trl_arguments(trajectories, texts)])
            return _read(outcome, len(trajectories), _split_scores)
        arguments = [_verl_arguments(*pair) for pair in zip(trajectories, texts, strict=True)]
        return [_read(outcome, 1, _verl_score)[0] for outcome in self._run(function, arguments)]

    def _run(self, function: _Function, arguments: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        calls = [partial(function.call, **function.arguments(each)) for each in arguments]
        return self._loop.run(calls) if function.is_async else function.threads.run(calls)

    def _count(self, name: str, scores: Sequence[_Score]) -> None:
        for score in scores:
            if score.failure is None:
                continue
            key = (name, score.failure)
            self._counts[key] += 1
            if key not in self._messages:
                self._messages[key] = score.message
                log.warning("reward function %s failed (%s), and counts 0: %s", name, score.failure, score.message)


# --- which functions, and what they take -----------------------------------------------------------------------------


def _name_of(function: str | Function) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2]
    if isinstance(function, partial):
        return _name_of(function.func)
    return function.__name__ if inspect.isroutine(function) else type(function).__name__


def _build(function: str | Function, name: str, weight: float, timeout_s: float) -> _Function:
    is_built_in = isinstance(function, str) and function in BUILT_IN
    if not isinstance(function, str):
        call = function
    elif is_built_in:
        call = BUILT_IN[function](timeout_s)
    elif ":" not in function:
        raise ValueError(f"reward.functions={function!r}: file.py:name, or one of {', '.join(BUILT_IN)}.")
    else:
        call = load_callable(function, "reward.functions")
    signature, takes, columns = _read_signature(call, name)
    seconds = timeout_s + START_S if is_built_in else timeout_s
    return _Function(
        name=name,
        weight=weight,
        call=call,
        signature=signature,
        takes=takes,
        preset=frozenset(call.keywords if isinstance(call, partial) else ()),
        columns=columns,
        is_async=_is_async(call),
        threads=ThreadCalls(num_threads=1 if is_built_in else NUM_THREADS, timeout_s=seconds),
    )


def _is_async(call: Function) -> bool:
    is_plain = inspect.isroutine(call) or isinstance(call, partial)
    return inspect.iscoroutinefunction(call if is_plain else type(call).__call__)


def _read_signature(call: Function, name: str) -> tuple[Literal["verl", "trl"], frozenset[str] | None, tuple[str, ...]]:
    """Whose signature it is, the parameters that it takes (None: any), and the columns that it must be given."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward.functions: {name} has no signature that can be read: {error}.") from error
    parameters = signature.parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    needed = {each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    needed -= {each.name for each in parameters if each.kind is each.VAR_POSITIONAL}
    takes = None if any(each.kind is each.VAR_KEYWORD for each in parameters) else frozenset(named)
    is_verl, is_trl = VERL_MARK in named, not named.isdisjoint(TRL_PARAMETERS)
    rest = needed - set(VERL_PARAMETERS if is_verl else TRL_PARAMETERS)
    problem = None
    if is_verl == is_trl:
        problem = f"has parameters of {'both' if is_verl else 'neither'} of verl's signature and TRL's"
    elif needed - named:
        problem = f"{', '.join(sorted(needed - named))} can't be given by name"
    elif is_verl and rest:
        problem = f"{', '.join(sorted(rest))} is nothing that verl's functions are given"
    if problem is not None:
        raise ValueError(
            f"reward.functions: {name}{signature}: {problem}; write "
            f"({', '.join(VERL_PARAMETERS)}) -> float, or ({', '.join(TRL_PARAMETERS)}, **columns) -> list of floats."
        )
    return ("verl", takes, ()) if is_verl else ("trl", takes, tuple(sorted(rest)))


def _verl_arguments(trajectory: Trajectory, text: str) -> dict[str, Any]:
    """Rows without an ``extra_info`` give all their columns as that; each call has a dict of its own. verl's
    ``num_turns`` is in it: the prompt counts as one, and so does each of the model's and of the environment's."""
    row = trajectory.prompt.row
    extra = row if row.get("extra_info") is None else row["extra_info"]
    return {
        "data_source": row.get("data_source"),
        "solution_str": text,
        "ground_truth": ground_truth_of(row),
        "extra_info": {**extra, "num_turns": 2 * trajectory.num_turns} if isinstance(extra, Mapping) else extra,
    }


def _trl_arguments(trajectories: Sequence[Trajectory], texts: Sequence[str]) -> dict[str, Any]:
    """A completion of a conversation is a list of one turn; columns that a row hasn't are None there."""
    rows = [trajectory.prompt.row for trajectory in trajectories]
    columns = {name: None for row in rows for name in row if name != "prompt" and name not in TRL_PARAMETERS}
    completions = [
        text if isinstance(row.get("prompt"), str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    return {
        **{name: [row.get(name) for row in rows] for name in columns},
        "prompts": [row.get("prompt") for row in rows],
        "completions": completions,
        "completion_ids": [list(trajectory.tokens) for trajectory in trajectories],
    }


# --- what they give --------------------------------------------------------------------------------------------------


def _add(reward: Reward, score: _Score, function: _Function) -> Reward:
    if score.value is not None:
        reward = reward.with_component(function.name, score.value, function.weight)
    extra = {key if key not in reward.extra else f"{function.name}/{key}": value for key, value in score.extra.items()}
    num_failed = reward.num_failed + (score.failure is not None)
    return replace(reward, extra={**reward.extra, **extra}, num_failed=num_failed)


def _read(outcome: Outcome, num: int, read: Callable[[Any, int], list[_Score]]) -> list[_Score]:
    """The scores of one call for ``num`` completions; what failed it failed each."""
    if outcome.failure is None:
        try:
            return read(outcome.value, num)
        except Exception as error:  # of the objects that it gave
            outcome = Outcome(failure="exception", message=describe_error(error))
    return [_Score(failure=outcome.failure, message=outcome.message)] * num


def _verl_score(value: Any, num: int) -> list[_Score]:
    extra = {}
    if isinstance(value, Mapping):
        extra = {str(key): _plain(each) for key, each in value.items() if key != "score"}
        if "score" not in value:
            return [_Score(extra=extra, failure="not_a_number", message=f"a dict without score: {_short(value)}")]
        value = value["score"]
    return [replace(_number_score(value), extra=extra)]


def _split_scores(values: Any, num: int) -> list[_Score]:
    if isinstance(values, Tensor | numpy.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [_Score(failure="not_a_number", message=f"a list of scores, not {_short(values)}")] * num
    if len(values) != num:
        return [_Score(failure="wrong_length", message=f"{len(values)} scores for {num} completions")] * num
    return [_Score(value=None) if value is None else _number_score(value) for value in values]


def _number_score(value: Any) -> _Score:
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, numpy.ndarray) and value.size == 1):
        value = value.item()
    if not isinstance(value, numbers.Real | numpy.bool_):
        return _Score(failure="not_a_number", message=f"a score is a number, not {_short(value)}")
    number = finite(value)
    if number is None:
        return _Score(failure="not_finite", message=f"a score is a finite number in fp32, not {_short(value)}")
    return _Score(value=number)


def _plain(value: Any) -> Any:
    """What can be sent to other ranks, and is a float where it is a number: what can't is there as text."""
    if isinstance(value, numpy.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if value is None or type(value) in (str, bool, float) or (type(value) is int and abs(value) <= MAX_REWARD):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _short(value)


def _short(value: Any) -> str:
    try:
        text = str(value)
    except Exception:  # the user's own
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
