"""Rewards: verl's and TRL's signatures, sums, and that nothing a function does stops a run."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.config.rl_check import BUILT_IN_REWARDS
from moesaic.rl.reasoning_tasks import build_task, stream_rows
from moesaic.rl.reward_functions import BUILT_IN, MathVerifier, exact_match, ground_truth_of
from moesaic.rl.rewards import NUM_THREADS, Failure, Reward, RewardFunctions
from moesaic.rl.types import Prompt, Trajectory


def trajectory(row: Mapping[str, Any] | None = None, environment_reward: float | None = None) -> Trajectory:
    return Trajectory(
        prompt=Prompt(number=0, tokens=(1,), text="", row={"prompt": "ask", **(row or {})}),
        group=0,
        index=0,
        tokens=(5, 6),
        is_model=(True, True),
        logprobs=(0.0, 0.0),
        versions=(0, 0),
        finish_reason="stop",
        environment_reward=environment_reward,
    )


def score(function: Any, texts: Sequence[str] = ("a",), row: Mapping[str, Any] | None = None) -> list[Reward]:
    return RewardFunctions([function]).score([trajectory(row)] * len(texts), texts)


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Lets calls that hang go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


# ---- signatures


VERL_ROW = {
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
    "answer": "not this",
}


def test_verl_signature() -> None:
    seen: list[Any] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return {
            "score": 0.5,
            "acc": True,
            "pred": "4",
            "far": np.float32(0.25),
            "odd": {1, 2},
            "more": [torch.tensor(2)],
        }

    (reward,) = score(compute_score, ["it is 4"], VERL_ROW)
    assert seen == [("gsm8k", "it is 4", "4", {"index": 3, "num_turns": 2}, {})]
    assert (reward.total, reward.components, reward.num_failed) == (0.5, {"compute_score": 0.5}, 0)
    assert reward.extra == {"acc": True, "pred": "4", "far": 0.25, "odd": "{1, 2}", "more": [2]}
    assert pickle.loads(pickle.dumps(reward)) == reward
    # A row without extra_info is that itself; a function gets only what it has parameters for.
    assert score(lambda solution_str, extra_info: extra_info["level"], row={"level": 7})[0].total == 7
    assert [each.total for each in score(lambda solution_str: len(solution_str), ["a", "bb"])] == [1, 2]


def test_what_a_function_does_to_its_row_stays_with_it() -> None:
    """A prompt's row outlives the step, and several threads have it."""

    def takes_out(solution_str, extra_info):
        return extra_info.pop("index", 0) + extra_info.pop("answer", 0)

    for row, total in ((VERL_ROW, 3), ({"answer": 4}, 4)):
        assert [each.total for each in score(takes_out, "abc", row)] == [total] * 3
    assert VERL_ROW["extra_info"] == {"index": 3}


def test_right_answers_of_a_row() -> None:
    assert ground_truth_of(VERL_ROW) == "4"
    assert ground_truth_of({"ground_truth": 5, "answer": 6}) == 5
    assert ground_truth_of({"reward_model": {"style": "model", "ground_truth": None}, "answer": 6}) == 6
    assert ground_truth_of({"prompt": "x"}) is None


def test_trl_signature_is_called_once_for_all() -> None:
    seen: list[Any] = []

    def reward_func(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, columns))
        return [1.0, None, 3]

    turns = [{"role": "user", "content": "q"}]
    functions = RewardFunctions([reward_func], weights=[2.0])
    rewards = functions.score(
        [trajectory({"answer": 1}), trajectory({"answer": 2, "hint": "h"}), trajectory({"prompt": turns})], "abc"
    )
    assert seen == [
        (
            ["ask", "ask", turns],
            ["a", "b", [{"role": "assistant", "content": "c"}]],
            [[5, 6]] * 3,
            {"answer": [1, 2, None], "hint": [None, "h", None]},
        )
    ]
    assert [reward.total for reward in rewards] == [2.0, 0.0, 6.0]
    assert rewards[1].components == {} and rewards[1].num_failed == 0, "None is left out, and is no failure"
    assert functions.take_failures() == []
    # Only the columns that it names.
    assert score(lambda completions, answer: answer, row={"answer": 4, "hint": "h"})[0].total == 4
    assert score(lambda completion_ids, **columns: torch.tensor([len(completion_ids[0])]))[0].total == 2


class Judge:
    def __call__(self, solution_str: str) -> float:
        return 2.0


class AsyncJudge:
    async def __call__(self, solution_str: str) -> float:
        await asyncio.sleep(0)
        return 3.0


def test_functions_of_every_kind() -> None:
    async def later(completions, **columns):
        await asyncio.sleep(0)
        return [4.0] * len(completions)

    async def each_later(solution_str, ground_truth):
        await asyncio.sleep(0)
        return 5

    def unmarked(solution_str):
        return each_later("", "")

    known = partial(exact_match, ground_truth="a")
    functions = RewardFunctions([Judge(), AsyncJudge(), later, each_later, known, unmarked])
    assert functions.names == ("Judge", "AsyncJudge", "later", "each_later", "exact_match", "unmarked")
    rewards = functions.score([trajectory()] * 2, ["a", "b"])
    assert [list(reward.components.values()) for reward in rewards] == [[2, 3, 4, 5, 1, 5], [2, 3, 4, 5, 0, 5]]
    assert functions.score([], []) == []
    functions.close()


def test_signatures_that_fit_neither_are_refused() -> None:
    for function, message in (
        (lambda text: 1, "has parameters of neither of verl's signature and TRL's"),
        (lambda solution_str, completions: 1, "has parameters of both"),
        (lambda solution_str, level: 1, "level is nothing that verl's functions are given"),
        (lambda level, /, completions: 1, "level can't be given by name"),
        (dict.fromkeys, "neither"),
        ("rewards", "file.py:name, or one of exact_match, math, reasoning_gym"),
        ("none.py:score", "no such file"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardFunctions([function])
    with pytest.raises(ValueError, match="2 for 1 functions"):
        RewardFunctions([exact_match], weights=[1, 2])


def test_functions_that_miss_a_column_are_refused_before_the_run() -> None:
    prompts = [trajectory({"answers": 1}).prompt]
    for function, message in (
        (lambda completions, answer: [1], "needs answer, and the data's columns are answers;"),
        (lambda completions, prompt: [1], "needs prompt, and"),  # TRL gives no column of that name
        ("exact_match", "needs a column reward_model.ground_truth, ground_truth or answer; no row has one"),
        ("math", "no row has one"),
        ("reasoning_gym", "scores rows of format: reasoning_gym"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardFunctions([function]).check(prompts)
    fine = [lambda completions, answers: [1], lambda completions, answer=None: [1]]
    RewardFunctions(fine).check(prompts)
    RewardFunctions(["exact_match"]).check([trajectory(VERL_ROW).prompt])


def test_a_file_names_its_functions(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def exact_match(solution_str): return 7\n", encoding="utf-8")
    functions = RewardFunctions(["exact_match", f"{path}:exact_match"], weights=[1, 10])
    (reward,) = functions.score([trajectory({"answer": " 4 "})], ["4\n"])
    assert reward.components == {"exact_match": 1.0, "exact_match_2": 7.0} and reward.total == 71.0


def test_names_are_told_apart() -> None:
    def scores(solution_str: str) -> float:
        return 1.0

    def scores_2(solution_str: str) -> float:
        return 2.0

    functions = RewardFunctions([scores, scores, scores_2])
    assert functions.names == ("scores", "scores_2", "scores_2_2")
    assert functions.score([trajectory()], ["a"])[0].total == 4


def test_sums_of_components() -> None:
    functions = RewardFunctions(
        [lambda solution_str: {"score": 1, "pred": "x"}, lambda solution_str: {"score": 3, "pred": "y"}],
        weights=[1, -0.5],
    )
    (reward,) = functions.score([trajectory(environment_reward=10.0)], ["a"])
    assert reward.components == {"<lambda>": 1, "<lambda>_2": 3, "environment": 10} and reward.total == 9.5
    assert reward.extra == {"pred": "x", "<lambda>_2/pred": "y"}
    with_model = reward.with_component("reward_model", 2.0, weight=3.0)
    assert with_model.total == 15.5 and with_model.components["reward_model"] == 2.0


# ---- failures


def raises(solution_str: str) -> float:
    if solution_str == "bad":
        raise KeyError("no such key")
    return 1.0


def test_failures_are_counted_by_kind_and_never_fatal(caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = {
        "none": None, "text": "1.0", "nan": float("nan"), "inf": np.float16("inf"), "dict": {"acc": 1}, "list": [1.0],
        "huge": -(10**400), "large": 10**39, "fine": np.float32(2), "bool": True, "tensor": torch.tensor(3.0),
        "array": np.array([4.0]),
    }  # fmt: skip

    def gives(solution_str):
        return values[solution_str]

    functions = RewardFunctions([raises, gives])
    with caplog.at_level(logging.WARNING):
        rewards = functions.score([trajectory()] * 13, [*values, "bad"])
    assert [reward.num_failed for reward in rewards] == [1] * 8 + [0] * 4 + [2]
    assert [reward.total for reward in rewards] == [1] * 8 + [3, 2, 4, 5, 0]
    failures = {(failure.function, failure.kind): failure for failure in functions.take_failures()}
    assert {key: failure.count for key, failure in failures.items()} == {
        ("raises", "exception"): 1, ("gives", "exception"): 1, ("gives", "not_a_number"): 4, ("gives", "not_finite"): 4,
    }  # fmt: skip
    message = failures["raises", "exception"].message
    assert re.fullmatch(r"KeyError: 'no such key' \(test_rl_rewards.py:\d+\)", message), message
    assert failures["gives", "not_a_number"].message == "a score is a number, not None", "the first is kept"
    assert len(caplog.records) == 4, "each kind once"
    # A step's failures are those since the last were taken; messages and warnings stay the first ones'.
    assert functions.take_failures() == []
    functions.score([trajectory()], ["text"])
    assert functions.take_failures() == [
        Failure(function="gives", kind="not_a_number", count=1, message="a score is a number, not None")
    ]
    assert len(caplog.records) == 4


def test_what_cannot_be_read_is_a_failure_and_what_is_kept_is_plain() -> None:
    endless: list[Any] = []
    endless.append(endless)
    values: dict[str, Any] = {
        "meta": torch.empty((), device="meta"),
        "endless": {"score": 1, "x": endless},
        "odd": {"score": 1, "huge": -(10**400), "long": np.longdouble(1), "text": np.str_("t"), "kind": HTTPStatus.OK},
    }
    functions = RewardFunctions([lambda solution_str: values[solution_str]])
    rewards = functions.score([trajectory()] * 3, list(values))
    assert [(reward.total, reward.num_failed) for reward in rewards] == [(0, 1), (0, 1), (1, 0)]
    extra = rewards[2].extra
    assert [type(value) for value in extra.values()] == [str] * 4, "no number that a float can't hold"
    assert (extra["long"], extra["text"]) == ("1.0", "t")
    (failure,) = functions.take_failures()
    assert (failure.kind, failure.count) == ("exception", 2)


@pytest.mark.parametrize(
    ("result", "kind"),
    [([1.0], "wrong_length"), (1.0, "not_a_number"), ("ab", "not_a_number"), (ValueError("x"), "exception")],
)
def test_a_batched_call_that_fails_fails_all(result: Any, kind: str) -> None:
    def reward_func(completions, **columns):
        if isinstance(result, Exception):
            raise result
        return result

    functions = RewardFunctions([reward_func])
    rewards = functions.score([trajectory()] * 2, ["a", "b"])
    assert [(reward.total, reward.num_failed, reward.components) for reward in rewards] == [
        (0.0, 1, {"reward_func": 0.0})
    ] * 2
    assert [(failure.kind, failure.count) for failure in functions.take_failures()] == [(kind, 2)]


def test_in_a_batch_only_bad_scores_fail() -> None:
    rewards = score(lambda completions, **columns: [1, float("nan"), "x", None], "abcd")
    assert [reward.num_failed for reward in rewards] == [0, 1, 1, 0]


def test_a_call_that_hangs_is_given_up_and_others_are_made(free: threading.Event) -> None:
    def hangs(solution_str):
        if solution_str == "hang":
            free.wait()
        return 1.0

    def hangs_for_all(completions, **columns):
        free.wait()

    texts = ["hang"] * NUM_THREADS + ["a", "b"]  # no thread is left
    functions = RewardFunctions([hangs, hangs_for_all], timeout_s=0.3)
    rewards = functions.score([trajectory()] * 6, texts)
    assert [reward.total for reward in rewards] == [0, 0, 0, 0, 1, 1]
    counts = {(failure.function, failure.kind): failure.count for failure in functions.take_failures()}
    assert counts == {("hangs", "timeout"): 4, ("hangs_for_all", "timeout"): 6}


def test_coroutines_run_side_by_side_and_are_timed_out() -> None:
    together = asyncio.Barrier(30)

    async def waits(solution_str):
        if solution_str == "cancel":
            raise asyncio.CancelledError
        await (asyncio.sleep(60) if solution_str == "hang" else together.wait())
        return 1.0

    functions = RewardFunctions([waits], timeout_s=0.4)
    rewards = functions.score([trajectory()] * 32, ["hang", "cancel", *"a" * 30])
    assert [reward.total for reward in rewards] == [0, 0] + [1] * 30
    assert {failure.kind: failure.count for failure in functions.take_failures()} == {"timeout": 1, "exception": 1}
    functions.close()


def test_the_loop_stays_between_calls() -> None:
    loops = set()

    async def score_it(solution_str: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    functions = RewardFunctions([score_it])
    for _ in range(3):
        functions.score([trajectory()], ["a"])
    assert len(loops) == 1
    functions.close()


# ---- built in


def test_built_in_names_are_those_that_recipes_know() -> None:
    assert set(BUILT_IN) == set(BUILT_IN_REWARDS)


def test_exact_match() -> None:
    functions = RewardFunctions(["exact_match"])
    rewards = functions.score([trajectory({"answer": 4})] * 2 + [trajectory()], [" 4\n", "44", "4"])
    assert [(reward.total, reward.extra.get("pred"), reward.num_failed) for reward in rewards] == [
        (1.0, "4", 0), (0.0, "44", 0), (0.0, None, 1),
    ]  # fmt: skip
    assert "the row has no answer" in functions.take_failures()[0].message


MATH = [
    ("The answer is 72", "72", 1, "72"),
    ("so $\\boxed{\\frac12}$", "0.5", 1, "\\frac{1}{2}"),
    ("first 3, then \\boxed{x^2+2x+1}", "(x+1)^2", 1, "x^2+2x+1"),
    ("it's 1,234", "1234", 1, "1234"),
    ("no idea", "3", 0, None),
    ("4", "3", 0, "4"),
    ("it is 18", "16 eggs less ... #### 18", 1, "18"),
    ('\u221a2 \ud83d\ude00 "quoted"\n\\n 5', "5", 1, "5"),
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(1.0)
    verifier(solution_str="1", ground_truth="1")
    yield verifier
    verifier.close()


@pytest.mark.parametrize(("text", "gold", "value", "found"), MATH)
def test_math(verifier: MathVerifier, text: str, gold: str, value: float, found: str | None) -> None:
    assert verifier(solution_str=text, ground_truth=gold) == {"score": value, "acc": value, "pred": found}


def test_math_that_never_ends_is_ended_and_the_next_text_is_judged(verifier: MathVerifier) -> None:
    """The power of huge integers holds the interpreter's lock: no thread, and no handler, would get its turn."""
    functions = RewardFunctions([verifier], timeout_s=60)
    rewards = functions.score([trajectory({"answer": 3})] * 3, ["3", "9^9^9^9", "3"])
    assert [reward.total for reward in rewards] == [1, 0, 1]
    (failure,) = functions.take_failures()
    assert (failure.kind, failure.count) == ("timeout", 1) and "longer than 1 s" in failure.message


def test_math_faults(verifier: MathVerifier) -> None:
    with pytest.raises(ValueError, match="no answer"):
        verifier(solution_str="3", ground_truth=None)
    with pytest.raises(ValueError, match="isn't one that math-verify can read: ''"):
        verifier(solution_str="3", ground_truth="####")
    assert verifier._child is not None
    verifier._child.kill()
    verifier._child.wait()
    assert verifier(solution_str="3", ground_truth="3")["score"] == 1, "one that ended by itself is begun anew"


def test_tasks_score_by_their_own_options() -> None:
    rows = list(
        stream_rows(build_task("chain_sum", size=2, seed=1, options={"min_terms": 2}), "chain_sum", {"min_terms": 2})
    )
    bad = next(stream_rows(build_task("prime_factorization", size=1, seed=1, options={}), "prime_factorization", {}))
    functions = RewardFunctions(["reasoning_gym"])
    trajectories = [trajectory(row) for row in (rows[0], rows[1], rows[1], bad)]
    functions.check([each.prompt for each in trajectories])
    right = rows[1]["answer"]
    texts = [f" {rows[0]['answer']}\n", f"I think <answer>{right}</answer>", "none", "many"]
    rewards = functions.score(trajectories, texts)
    assert [reward.total for reward in rewards] == [1, 1, 0, 0]
    assert [reward.extra.get("acc") for reward in rewards] == [1, 1, 0, None]
    assert rewards[1].extra["pred"] == right
    (failure,) = functions.take_failures()
    assert failure.message.startswith("ValueError: invalid literal for int()"), "it can't read that; 0, and counted"
