"""One rank's requests, brought to their end: turn by turn with an environment, and on after the engine broke off.

All open requests of a rank go to the engine in one call, again and again. Example, two requests of two turns, of which
the engine broke off the second in call 1 (``|`` is where the environment answered)::

    call 0        call 1            call 2
    a a a   |     a a     done      .
    b b     |     b (aborted)       b b b    done
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from moesaic.engines.base import Completion, Engine, RanksApart, Sampling, derive_seed
from moesaic.rl.environment import Environment, MakeEnvironment, Step, encode_observation
from moesaic.rl.requests import add_completion, add_observation, is_finished
from moesaic.rl.rollout_engines import Seat
from moesaic.rl.types import Trajectory
from moesaic.runtime import PeerFailed, current_device

logger = logging.getLogger(__name__)

MAX_TRIES = 8
"""Calls for one turn that the engine breaks off again and again; then the request stays unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """What all requests of a rollout have in common.

    Attributes:
        max_tokens: of one trajectory, after its prompt.
        max_turns: of the model in one trajectory.
        make_environment: of a prompt's row; None: one turn, and no environment.
        tokenizer: between the environment's text and tokens.
    """

    max_tokens: int
    max_turns: int = 1
    make_environment: MakeEnvironment | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


@dataclass(slots=True, kw_only=True)
class _Line:
    """A request on its way. ``turn_start``: where the turn's tokens begin; ``num_tries``: calls that broke it off."""

    place: int
    trajectory: Trajectory
    environment: Environment | None = None
    turn_start: int = 0
    num_tries: int = 0
    is_open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """Of an environment to one turn. ``has_failed``: it raised."""

    tokens: tuple[int, ...] = ()
    reward: float = 0.0
    is_done: bool = True
    has_failed: bool = False


class Turns:
    """Every rank of the seat's group makes one, and calls ``run``.

    Args:
        requests: of this rank, by place; unfinished trajectories.
        filler: tokens to ask for where this rank has no request left and others of its group have.
        sampling: how tokens are drawn; ``max_tokens``, ``n`` and ``seed`` are set for each call.
        key: what seeds are made of, beside a request's place and the number of its call: whichever replica answers a
            request, its noise is the same.

    Attributes:
        num_aborted: completions that the engine broke off.
        num_failures: of environments; each ended its trajectory.
    """

    def __init__(
        self,
        engine: Engine,
        seat: Seat,
        requests: Mapping[int, Trajectory],
        *,
        filler: tuple[int, ...],
        sampling: Sampling,
        key: tuple[int, ...],
        options: TurnOptions,
    ) -> None:
        self.num_aborted = 0
        self.num_failures = 0
        self._engine, self._seat, self._options = engine, seat, options
        self._filler, self._sampling, self._key = filler, sampling, key
        self._lines = {
            place: _Line(place=place, trajectory=each, turn_start=len(each.tokens)) for place, each in requests.items()
        }

    @property
    def trajectories(self) -> dict[int, Trajectory]:
        """As far as they have come, by place."""
        return {place: line.trajectory for place, line in self._lines.items()}

    def run(self) -> None:
        """Until every request is finished, or given up (``aborted``).

        Raises:
            whatever an engine raises; RuntimeError where it did so on another rank of the group. ``trajectories`` then
            has what there is. After RanksApart nothing is agreed any more.
        """
        error: BaseException | None = None
        for number in count():
            open_lines = [line for line in self._lines.values() if line.is_open]
            num_open, num_failed = self._largest(len(open_lines), int(error is not None))
            if num_failed:
                raise error or PeerFailed("the rollout failed on another rank; its own message says why.")
            if not num_open:
                return
            try:
                self._call(open_lines, number)
            except RanksApart:
                raise  # the others can't be told
            except BaseException as problem:  # raised above, when the other ranks of the group know of it
                error = problem

    def _largest(self, *numbers: int) -> tuple[int, ...]:
        """Of all ranks of the group, each number for itself."""
        if self._seat.group is None:
            return numbers
        values = torch.tensor(numbers, device=current_device())
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._seat.group)
        return tuple(values.tolist())

    def _call(self, lines: Sequence[_Line], number: int) -> None:
        """One call of the engine, and what follows from it."""
        if not lines:
            self._engine.generate([self._filler], replace(self._sampling, max_tokens=1, n=1, seed=0))
            return
        # A line is in every call from the first on until it is done, so ``number`` counts its own.
        seeds = tuple(derive_seed(*self._key, line.place, number) for line in lines)
        most = max(self._options.max_tokens - len(line.trajectory.tokens) for line in lines)
        prompts = [line.trajectory.prompt.tokens + line.trajectory.tokens for line in lines]
        try:
            answers = self._engine.generate(prompts, replace(self._sampling, max_tokens=most, n=1, seed=seeds))
        except BaseException:
            self._keep(lines, self._engine.salvage())
            raise
        self._add(lines, answers)
        ended = [line for line in lines if is_finished(line.trajectory)]
        for line, reply in zip(ended, self._ask(ended), strict=True):
            self._end_turn(line, reply)

    def _add(self, lines: Sequence[_Line], answers: Sequence[Sequence[Completion]]) -> None:
        for line, (completion,) in zip(lines, answers, strict=True):
            line.trajectory = add_completion(line.trajectory, completion, self._options.max_tokens)
            if not is_finished(line.trajectory):
                self.num_aborted += 1
                line.num_tries += 1
                line.is_open = line.num_tries < MAX_TRIES

    def _keep(self, lines: Sequence[_Line], answers: Sequence[Sequence[Completion]]) -> None:
        """What a call that failed had made. A turn that its environment hasn't seen isn't finished."""
        if not answers:
            return
        self._add(lines, answers)
        for line in lines:
            if is_finished(line.trajectory):
                if self._options.make_environment is None:
                    self._end_turn(line, _Reply())
                else:
                    line.trajectory = replace(line.trajectory, finish_reason="aborted")

    def _ask(self, lines: Sequence[_Line]) -> list[_Reply]:
        """The environment's answer to the turn of each; where ranks share requests, that of their first."""
        if self._options.make_environment is None:
            return [_Reply()] * len(lines)
        replies: list[list[_Reply]] = [[self._step(line) for line in lines] if self._seat.is_first else []]
        if self._seat.is_shared:
            dist.broadcast_object_list(replies, group_src=0, group=self._seat.group)
        return replies[0]

    def _step(self, line: _Line) -> _Reply:
        options, trajectory = self._options, line.trajectory
        assert options.make_environment is not None and options.tokenizer is not None
        tokens = trajectory.tokens[line.turn_start :]
        try:
            if line.environment is None:
                line.environment = options.make_environment(trajectory.prompt.row)
            step = line.environment.step(options.tokenizer.decode(tokens, skip_special_tokens=True), tokens)
            if not isinstance(step, Step):  # a look-alike's reward was never looked at
                raise TypeError(f"step() gave {type(step).__name__}, not a Step")
            said: tuple[int, ...] = ()
            if not step.is_done and self._has_turn_left(trajectory):
                assert step.observation is not None, "Step has said so"
                said = encode_observation(trajectory.prompt, tokens, step.observation, options.tokenizer)
        except (Exception, SystemExit):  # whatever it does: the other ranks of the replica wait for an answer
            logger.warning(
                "the environment of prompt %d failed in turn %d; its trajectory ends there",
                trajectory.prompt.number,
                trajectory.num_turns + 1,
                exc_info=True,
            )
            return _Reply(has_failed=True)
        return _Reply(tokens=said, reward=step.reward, is_done=step.is_done)

    def _has_turn_left(self, trajectory: Trajectory) -> bool:
        """After the one that has ended, which isn't counted yet."""
        return trajectory.finish_reason != "length" and trajectory.num_turns + 1 < self._options.max_turns

    def _end_turn(self, line: _Line, reply: _Reply) -> None:
        options, trajectory = self._options, line.trajectory
        goes_on = not reply.is_done and self._has_turn_left(trajectory)
        trajectory = replace(trajectory, num_turns=trajectory.num_turns + 1)
        self.num_failures += reply.has_failed
        if options.make_environment is not None:
            trajectory = replace(trajectory, environment_reward=(trajectory.environment_reward or 0.0) + reply.reward)
        if goes_on:
            trajectory = add_observation(trajectory, reply.tokens, options.max_tokens)
        line.trajectory = trajectory
        line.is_open = not is_finished(trajectory)
        line.turn_start, line.num_tries = len(trajectory.tokens), 0
