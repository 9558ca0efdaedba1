"""The rollout with a made-up engine: shares, turns, what is broken off and gone on with, groups that are kept whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from moesaic.config.rl_sections import SamplingConfig
from moesaic.engines.base import Completion, FinishReason, Sampling, derive_seed
from moesaic.rl.environment import Step
from moesaic.rl.requests import (
    add_completion,
    add_observation,
    groups_from_plain,
    is_finished,
    number_groups,
    pack,
    share_of,
    start_groups,
    unpack,
)
from moesaic.rl.rollout import Rollout
from moesaic.rl.rollout_engines import Seat
from moesaic.rl.turns import MAX_TRIES
from moesaic.rl.types import Prompt, Trajectory
from tests.unit.fake_engine import FakeEngine

STOP = 9
Answer = tuple[Sequence[int], FinishReason]


def prompt(number: int, *tokens: int) -> Prompt:
    return Prompt(number=number, tokens=tokens or (number + 1,), text=f"p{number}", row={"answer": number})


@dataclass(frozen=True)
class Points:
    total: float


class ScriptedEngine(FakeEngine):
    """``answer`` maps a prompt's tokens and the sampling to tokens and a reason; log-probabilities are -0.5."""

    def __init__(self, answer: Callable[[tuple[int, ...], Sampling], Answer], *, version: int = 3) -> None:
        super().__init__(version=version)
        self.answer = answer
        self.asked: list[tuple[list[tuple[int, ...]], Sampling]] = []
        self.salvaged: list[list[Completion]] = []

    def salvage(self) -> list[list[Completion]]:
        return self.salvaged

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        self.asked.append(([tuple(each) for each in prompts], sampling))
        answers = [[self.complete(*self.answer(tuple(each), sampling))] for each in prompts]
        if "generate" in self.fails:
            self.salvaged = answers
        self._note("generate")
        return answers

    def complete(self, tokens: Sequence[int], reason: FinishReason) -> Completion:
        return Completion(
            tokens=tuple(tokens),
            logprobs=(-0.5,) * len(tokens),
            finish_reason=reason,
            weight_version=self.version,
        )


class Words:
    """A tokenizer of one character a token, without a chat template: ``a`` is 1, ``b`` 2, .."""

    chat_template = None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + token) for token in tokens if token != STOP)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - 96 for letter in text]}


def make(engine: FakeEngine, **options: Any) -> Rollout:
    return Rollout(engine, Seat(replica=0, num_replicas=1), seed=7, stop_token_ids=(STOP,), **options)


def drawer() -> Callable[[int], list[Prompt]]:
    numbers = iter(range(100))
    return lambda count: [prompt(next(numbers)) for _ in range(count)]


def no_points(trajectories: list[Trajectory]) -> list[Points]:
    return [Points(0.0) for _ in trajectories]


# ------------------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize("num_requests", [0, 1, 3, 6, 7, 8])
def test_shares_are_runs_and_cover_everything(num_requests: int) -> None:
    shares = [share_of(num_requests, 4, replica) for replica in range(4)]
    assert [place for share in shares for place in share] == list(range(num_requests))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_seeds_differ_by_every_number_and_repeat() -> None:
    keys = [(seed, step, purpose, batch, place, call)
            for seed in (0, 5) for step in (0, 1) for purpose in range(3)
            for batch in (0, 1) for place in (0, 1) for call in (0, 1)]  # fmt: skip
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and seeds == [derive_seed(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_trajectory_of_two_turns_as_the_types_say() -> None:
    ((start,),) = start_groups([prompt(0)], 1)
    engine = ScriptedEngine(lambda tokens, sampling: ((), "stop"))
    grown = add_completion(start, engine.complete((5, 6), "stop"), 6)
    grown = add_observation(grown, (7, 8, 9), 6)
    assert not is_finished(grown)
    grown = add_completion(grown, engine.complete((4, 4), "stop"), 6)
    assert grown.tokens == (5, 6, 7, 8, 9, 4)
    assert grown.is_model == (True, True, False, False, False, True)
    assert grown.logprobs == (-0.5, -0.5, 0.0, 0.0, 0.0, -0.5)
    assert grown.versions == (3, 3, -1, -1, -1, 3)
    assert grown.finish_reason == "length", "the engine gave more than there was room for"
    assert add_observation(start, (1, 2), 3).tokens == (1, 2)
    assert (add_observation(start, (1, 2), 2).tokens, add_observation(start, (1, 2), 2).finish_reason) == ((), "length")
    assert add_completion(start, engine.complete((1, 2), "aborted"), 2).finish_reason == "length"
    assert add_completion(start, engine.complete((1, 2), "stop"), 2).finish_reason == "stop"


def test_packing_is_exact() -> None:
    groups = start_groups([prompt(0), prompt(1)], 2)
    engine = ScriptedEngine(lambda tokens, sampling: ((), "stop"), version=70_000)
    trajectories = number_groups(groups)
    grown = {
        3: add_completion(trajectories[3], engine.complete((150_000, STOP), "stop"), 4),
        0: add_observation(add_completion(trajectories[0], engine.complete((1,), "stop"), 9), (2, 2), 9),
        1: trajectories[1],
    }
    unpack(pack(grown), trajectories)
    assert [trajectories[place] for place in (3, 0, 1)] == list(grown.values())
    unpack(pack({}), trajectories)
    assert trajectories[3].tokens == (150_000, STOP)


# --------------------------------------------------------------------------------------------------------- single turn


def test_n_per_prompt_in_order() -> None:
    engine = ScriptedEngine(lambda tokens, sampling: ((tokens[0], STOP), "stop"))
    rollout = make(engine)
    trajectories = rollout.generate([prompt(4), prompt(2)], SamplingConfig(n=2, max_tokens=5, top_k=3), 0)
    assert [(each.group, each.index, each.prompt.number) for each in trajectories] == [
        (0, 0, 4), (0, 1, 4), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    assert [each.tokens for each in trajectories] == [(5, STOP), (5, STOP), (3, STOP), (3, STOP)]
    assert all(each.num_turns == 1 and each.environment_reward is None for each in trajectories)
    ((asked, sampling),) = engine.asked
    assert asked == [(5,), (5,), (3,), (3,)]
    assert (sampling.n, sampling.max_tokens, sampling.top_k, sampling.stop_token_ids) == (1, 5, 3, (STOP,))
    rollout.generate_greedy([prompt(0)], SamplingConfig(n=4, temperature=0.7, top_k=3), 0)
    (asked, sampling) = engine.asked[1]
    assert len(asked) == 1 and (sampling.temperature, sampling.top_k) == (0.0, 0)


def test_the_same_step_asks_with_the_same_seeds_and_another_with_others() -> None:
    def seeds(step: int) -> list[Any]:
        engine = ScriptedEngine(lambda tokens, sampling: ((STOP,), "stop"))
        rollout = make(engine)
        rollout.collect(step, drawer(), no_points, SamplingConfig(n=2), 2, filters=True, max_batches=2)
        rollout.generate([prompt(0)], SamplingConfig(), step)
        rollout.generate_greedy([prompt(0)], SamplingConfig(), step)
        return [seed for asked, sampling in engine.asked for seed in cast(tuple[int, ...], sampling.seed)]

    assert seeds(1) == seeds(1)
    assert len(seeds(1)) == 10 and len({*seeds(1), *seeds(2)}) == 20, "no two completions share noise"


def test_what_is_broken_off_goes_on_with_what_is_left() -> None:
    """The engine breaks off after 2 tokens, each with newer weights; the second prompt is done at once."""
    engine = ScriptedEngine(lambda tokens, sampling: ((), "stop"))

    def answer(tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        if tokens[0] == 2:
            return (STOP,), "stop"
        engine._state = engine._state.__class__(version=engine.version + 1)
        return (7, 8)[: sampling.max_tokens], "aborted"

    engine.answer = answer
    first, second = make(engine).generate([prompt(0), prompt(1)], SamplingConfig(max_tokens=5), 0)
    assert first.tokens == (7, 8, 7, 8, 7) and first.versions == (4, 4, 5, 5, 6)
    assert (first.finish_reason, first.num_turns) == ("length", 1)
    assert second.tokens == (STOP,)
    assert [asked for asked, _ in engine.asked] == [[(1,), (2,)], [(1, 7, 8)], [(1, 7, 8, 7, 8)]]
    assert [sampling.max_tokens for _, sampling in engine.asked] == [5, 3, 1]


def test_an_engine_that_always_breaks_off_is_given_up() -> None:
    engine = ScriptedEngine(lambda tokens, sampling: ((), "aborted"))
    (trajectory,) = make(engine).generate([prompt(0)], SamplingConfig(), 0)
    assert (trajectory.finish_reason, trajectory.tokens, trajectory.num_turns) == ("aborted", (), 0)
    assert len(engine.asked) == MAX_TRIES


# -------------------------------------------------------------------------------------------------------- several turns


@dataclass
class Game:
    """Answers ``ab`` until the model has said ``c``; 1 a turn."""

    row: Mapping[str, Any]
    seen: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def step(self, text: str, tokens: Sequence[int]) -> Step:
        if self.row["answer"] == 5:
            raise RuntimeError("no game today")
        self.seen.append((text, tuple(tokens)))
        return Step(observation="ab", reward=1.0, is_done="c" in text)


def test_turns_advance_together_and_what_the_model_did_not_write_is_marked() -> None:
    games: list[Game] = []

    def make_environment(row: Mapping[str, Any]) -> Game:
        games.append(Game(row))
        return games[-1]

    def answer(tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        done = {(1,): (3, STOP), (2,): (4, STOP), (2, 4, STOP, 1, 2): (3, STOP), (6,): (1, STOP)}
        return done.get(tokens, (4, STOP)), "stop"

    engine = ScriptedEngine(answer)
    rollout = make(engine, max_turns=3, make_environment=make_environment, tokenizer=Words())
    prompts = [prompt(0), prompt(1), prompt(5), prompt(2)]
    done, twice, failed, long = rollout.generate(prompts, SamplingConfig(max_tokens=9), 0)
    assert (done.tokens, done.num_turns, done.environment_reward, done.finish_reason) == ((3, STOP), 1, 1.0, "stop")
    assert twice.tokens == (4, STOP, 1, 2, 3, STOP) and twice.is_model == (True, True, False, False, True, True)
    assert (twice.num_turns, twice.environment_reward, twice.finish_reason) == (2, 2.0, "stop")
    assert twice.versions == (3, 3, -1, -1, 3, 3) and twice.logprobs[2:4] == (0.0, 0.0)
    assert (failed.num_turns, failed.environment_reward, failed.tokens) == (1, 0.0, (1, STOP))
    assert (long.num_turns, long.tokens, long.finish_reason) == (
        3, (4, STOP, 1, 2, 4, STOP, 1, 2, 4), "length",
    )  # fmt: skip
    assert [len(asked) for asked, _ in engine.asked] == [4, 2, 1]
    assert [sampling.max_tokens for _, sampling in engine.asked] == [9, 5, 1]
    assert games[1].seen == [("d", (4, STOP)), ("c", (3, STOP))], "each turn by itself"


def test_an_observation_without_room_ends_the_trajectory() -> None:
    engine = ScriptedEngine(lambda tokens, sampling: ((4, STOP), "stop"))
    rollout = make(engine, max_turns=3, make_environment=Game, tokenizer=Words())
    (trajectory,) = rollout.generate([prompt(0)], SamplingConfig(max_tokens=4), 0)
    assert (trajectory.tokens, trajectory.finish_reason, trajectory.num_turns) == ((4, STOP), "length", 1)
    (trajectory,) = make(engine, max_turns=1, make_environment=Game, tokenizer=Words()).generate(
        [prompt(0)], SamplingConfig(max_tokens=9), 0
    )
    assert (trajectory.tokens, trajectory.finish_reason) == ((4, STOP), "stop"), "no turn is left"


def test_a_turn_that_is_broken_off_reaches_the_environment_whole() -> None:
    games: list[Game] = []

    def make_environment(row: Mapping[str, Any]) -> Game:
        games.append(Game(row))
        return games[-1]

    answers = {(1,): ((4,), "aborted"), (1, 4): ((3, STOP), "stop")}
    engine = ScriptedEngine(lambda tokens, sampling: answers[tokens])  # type: ignore[arg-type, return-value]
    rollout = make(engine, max_turns=2, make_environment=make_environment, tokenizer=Words())
    (trajectory,) = rollout.generate([prompt(0)], SamplingConfig(max_tokens=9), 0)
    assert (trajectory.tokens, trajectory.num_turns) == ((4, 3, STOP), 1)
    assert [game.seen for game in games] == [[("dc", (4, 3, STOP))]]


# ------------------------------------------------------------------------------------------------------------- groups


def by_number(values: Mapping[int, Sequence[float]]) -> Callable[[list[Trajectory]], list[Points]]:
    """Points of each completion, by prompt; two different ones where none are told."""
    return lambda trajectories: [
        Points(float(values.get(each.prompt.number, (0, 1))[each.index])) for each in trajectories
    ]


def stopping(version: int = 3) -> ScriptedEngine:
    return ScriptedEngine(lambda tokens, sampling: ((STOP,), "stop"), version=version)


def numbers_of(trajectories: Sequence[Trajectory]) -> list[int]:
    return [each.prompt.number for each in trajectories if each.index == 0]


def test_groups_of_equal_rewards_are_replaced_up_to_the_batch_size() -> None:
    """Batches of 3: of prompts 0 to 2 one differs, of 3 to 5 all: 4 groups, of which the last is too much."""
    score = by_number({0: (1, 1), 2: (0.5, 0.5 + 1e-9)})
    collected = make(stopping()).collect(0, drawer(), score, SamplingConfig(n=2), 3, filters=True, max_batches=5)
    assert numbers_of(collected.trajectories) == [1, 3, 4]
    assert [each.group for each in collected.trajectories] == [0, 0, 1, 1, 2, 2]
    assert [each.total for each in collected.rewards] == [0, 1] * 3
    metrics = collected.metrics
    assert (metrics["rollout/filtered_groups"], metrics["rollout/dropped_groups"]) == (2, 1)
    assert (metrics["rollout/gen_batches"], metrics["rollout/missing_groups"], metrics["rollout/groups"]) == (2, 0, 3)
    assert metrics["rollout/generated_tokens"] == 12 and metrics["rollout/tokens_per_s"] > 0


@pytest.mark.parametrize(("num_good", "batches"), [(1, 2), (0, 2)])
def test_too_few_groups_are_what_there_is(num_good: int, batches: int) -> None:
    score = by_number({number: (1, 1) for number in range(num_good, 10)})
    collected = make(stopping()).collect(0, drawer(), score, SamplingConfig(n=2), 3, filters=True, max_batches=batches)
    assert numbers_of(collected.trajectories) == list(range(num_good))
    assert len(collected.rewards) == 2 * num_good
    assert collected.metrics["rollout/missing_groups"] == 3 - num_good
    assert collected.metrics["rollout/gen_batches"] == batches


def test_without_a_filter_equal_rewards_stay() -> None:
    collected = make(stopping()).collect(0, drawer(), no_points, SamplingConfig(n=2), 2)
    assert numbers_of(collected.trajectories) == [0, 1] and collected.metrics["rollout/gen_batches"] == 1


def test_unfinished_groups_wait_whole_and_come_first() -> None:
    """In step 0 the second completion of prompt 0 never ends; in step 1 it does, with newer weights."""
    calls = {"first": True}

    def answer(tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        if tokens == (1,) and not calls["first"]:
            return (8,), "aborted"
        if tokens[0] == 1 and len(tokens) > 1:
            return (), "aborted"
        calls["first"] = False
        return (STOP,), "stop"

    engine = ScriptedEngine(answer)
    rollout = make(engine)
    draw = drawer()
    collected = rollout.collect(0, draw, no_points, SamplingConfig(n=2), 2)
    assert numbers_of(collected.trajectories) == [1]
    assert [(m := collected.metrics)["rollout/missing_groups"], m["rollout/partial_groups"]] == [1, 1]
    assert m["rollout/aborted"] == MAX_TRIES
    (partial,) = rollout.partials
    assert [each.tokens for each in partial] == [(STOP,), (8,)] and partial[1].versions == (3,)

    state = json.loads(json.dumps(rollout.state_dict()))
    engine = stopping(version=4)
    resumed = make(engine)
    resumed.load_state_dict(state)
    assert resumed.partials == rollout.partials == groups_from_plain(state["partials"])
    collected = resumed.collect(1, draw, no_points, SamplingConfig(n=2), 2)
    assert numbers_of(collected.trajectories) == [0, 2] and collected.metrics["rollout/continued"] == 1
    assert collected.trajectories[1].tokens == (8, STOP) and collected.trajectories[1].versions == (3, 4)
    assert engine.asked[0][0] == [(1, 8), (3,), (3,)], "what is finished isn't asked again"
    assert resumed.partials == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_an_interrupted_step_had_is_kept(error: type[BaseException]) -> None:
    """The engine fails in its second batch, with one completion done and one begun."""
    engine = ScriptedEngine(lambda tokens, sampling: ((STOP,), "stop"))

    def answer(tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        if tokens == (3,):
            engine.fails = {"generate"}
            return (8, 8), "aborted"
        return (STOP,), "stop"

    def note(call: str) -> None:
        if call in engine.fails:
            raise error("no generate today")

    engine.answer, engine._note = answer, note  # type: ignore[method-assign]
    rollout, draw = make(engine), drawer()
    score = by_number({0: (1, 1)})
    with pytest.raises(error, match="no generate today"):
        rollout.collect(0, draw, score, SamplingConfig(n=2), 2, filters=True, max_batches=3)
    assert [[each.tokens for each in group] for group in rollout.partials] == [
        [(STOP,), (STOP,)], [(8, 8), (8, 8)], [(STOP,), (STOP,)],
    ]  # fmt: skip
    assert [group[0].prompt.number for group in rollout.partials] == [1, 2, 3]
    engine.fails, engine.answer = set(), lambda tokens, sampling: ((STOP,), "stop")
    collected = rollout.collect(0, draw, score, SamplingConfig(n=2), 2, filters=True, max_batches=3)
    assert numbers_of(collected.trajectories) == [1, 2]
    assert [each.tokens for each in collected.trajectories[2:]] == [(8, 8, STOP)] * 2
    assert [group[0].prompt.number for group in rollout.partials] == [3], "for the next step"


def test_rewards_that_fail_lose_no_group() -> None:
    def score(trajectories: list[Trajectory]) -> list[Points]:
        raise KeyboardInterrupt

    rollout = make(stopping())
    with pytest.raises(KeyboardInterrupt):
        rollout.collect(0, drawer(), score, SamplingConfig(n=2), 2)
    assert [group[0].prompt.number for group in rollout.partials] == [0, 1]
    assert all(is_finished(each) for group in rollout.partials for each in group)


def test_with_an_environment_the_unfinished_begin_anew() -> None:
    """An environment can't be kept: its siblings are."""

    def answer(tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        if tokens == (1,):
            return (4, STOP), "stop"
        return ((3, STOP), "stop") if tokens == (2,) else ((7,), "aborted")

    rollout = make(ScriptedEngine(answer), max_turns=2, make_environment=Game, tokenizer=Words())
    collected = rollout.collect(0, drawer(), no_points, SamplingConfig(n=1), 2)
    assert numbers_of(collected.trajectories) == [1]
    ((partial,),) = rollout.partials
    assert (partial.tokens, partial.num_turns, partial.environment_reward) == ((), 0, None)
