"""The rollout of a step: prompts to trajectories, over all replicas of an engine; the same result on every rank.

``collect`` makes what a step trains on: groups of completions, whole and exactly as many as asked for where that can
be; with ``filter_groups`` those whose rewards differ (DAPO's dynamic sampling). What the engine doesn't finish is kept,
group by group, and gone on with in the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from moesaic.config import Recipe
from moesaic.config.rl_sections import SamplingConfig
from moesaic.engines.base import Engine, RanksApart, Sampling
from moesaic.rl.environment import MakeEnvironment
from moesaic.rl.groups import filter_groups
from moesaic.rl.requests import (
    Group,
    Packed,
    groups_from_plain,
    groups_to_plain,
    is_finished,
    number_groups,
    pack,
    restart,
    share_of,
    split_groups,
    start_groups,
    unpack,
)
from moesaic.rl.rollout_engines import RolloutEngines, Seat
from moesaic.rl.turns import TurnOptions, Turns
from moesaic.rl.types import Prompt, Trajectory
from moesaic.runtime import PeerFailed

# What seeds are made of, beside the recipe's seed and the step: so that no two uses share noise.
TRAINING, VALIDATION, BASELINE = range(3)


class Scored(Protocol):
    """A reward: what ``filter_groups`` compares."""

    @property
    def total(self) -> float:
        """Of functions and environment; before a reward model, the penalty for length, and KL."""
        ...


R = TypeVar("R", bound=Scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(Generic[R]):
    """What a step trains on; the same on every rank.

    Attributes:
        trajectories: of whole groups, numbered from 0; empty where no group was left.
        rewards: of each.
        metrics: ``rollout/...``: see ``Rollout.collect``.
    """

    trajectories: list[Trajectory]
    rewards: list[R]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Counts:
    """Over all ranks, since a step began."""

    generated_tokens: int = 0
    generation_s: float = 0.0
    aborted: int = 0
    environment_failures: int = 0
    continued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a rank tells the others after its part of a rollout."""

    packed: Packed
    error: str | None
    aborted: int
    failures: int
    spent_s: float


@dataclass(slots=True, kw_only=True)
class _Kept(Generic[R]):
    """Groups that a step trains on, so far, with their rewards; and how many were left out."""

    groups: list[tuple[Group, list[R]]] = field(default_factory=list)
    filtered: int = 0


class Rollout:
    """Generates with this rank's engine and the other ranks'. Every rank makes one and calls its methods, in one order
    and with equal arguments.

    Args:
        seat: this rank's part.
        seed: of the run. With it, the step, a request's place in it and the number of its call, noise is drawn: a step
            that is repeated draws the same, and so does one on other ranks.
        stop_token_ids: tokens that end a turn.
        max_turns: of the model in one trajectory.
        make_environment: of a prompt's row, for trajectories of several turns; called on the rank that generates.
        tokenizer: for the environment's text; None without one.

    Attributes:
        partials: groups that aren't whole yet, in the order in which they are gone on with. In a group made with an
            environment, unfinished trajectories begin anew: an environment can't be kept.
    """

    def __init__(
        self,
        engine: Engine,
        seat: Seat,
        *,
        seed: int,
        stop_token_ids: tuple[int, ...] = (),
        max_turns: int = 1,
        make_environment: MakeEnvironment | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.partials: list[Group] = []
        self._engine, self._seat, self._seed = engine, seat, seed
        self._stops = stop_token_ids
        self._max_turns, self._make_environment, self._tokenizer = max_turns, make_environment, tokenizer
        self._counts = _Counts()

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        engines: RolloutEngines,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        make_environment: MakeEnvironment | None = None,
    ) -> Rollout:
        """As ``recipe.rollout`` says.

        Args:
            stop_token_ids: the model's own ends (``engines/prompts.py::own_stops``); the recipe's are added.
        """
        return cls(
            engines.engine,
            engines.seat,
            seed=recipe.seed,
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *recipe.rollout.stop_token_ids))),
            max_turns=recipe.rollout.max_turns,
            make_environment=make_environment,
            tokenizer=tokenizer,
        )

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int) -> list[Trajectory]:
        """``sampling.n`` trajectories for each prompt, ordered by prompt: for validation. Nothing is kept for later:
        what the engine broke off too often is returned as it is (``aborted``).

        Raises:
            what an engine raises, RuntimeError on the other ranks.
        """
        return self._generate(prompts, sampling, (step, VALIDATION))

    def generate_greedy(self, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int) -> list[Trajectory]:
        """The likeliest completion of each prompt (ReMax's baseline, 2310.10505), otherwise as ``generate``."""
        greedy = sampling.model_copy(update={"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0})
        return self._generate(prompts, greedy, (step, BASELINE))

    def collect(
        self,
        step: int,
        draw: Callable[[int], Sequence[Prompt]],
        score: Callable[[list[Trajectory]], Sequence[R]],
        sampling: SamplingConfig,
        num_groups: int,
        *,
        filters: bool = False,
        max_batches: int = 1,
    ) -> Collected[R]:
        """``num_groups`` groups of ``sampling.n`` trajectories to train on.

        Groups that an earlier step left unfinished come first. With ``filters`` whole batches are generated until there
        are enough groups whose rewards differ, ``max_batches`` of them at most; what is too much is dropped. There may
        be fewer groups, or none: ``rollout/missing_groups`` says how many.

        Metrics, each ``rollout/...``: ``groups`` and ``trajectories`` to train on; ``missing_groups``,
        ``filtered_groups``, ``dropped_groups``; ``partial_groups`` that wait for the next step; ``gen_batches``;
        ``generated_tokens``, ``tokens_per_s`` (of all ranks together); ``aborted`` completions; ``continued``
        trajectories, begun in an earlier step or batch; ``environment_failures``.

        Args:
            draw: the next so many prompts.
            score: rewards of trajectories, in their order; the same on every rank.

        Raises:
            what an engine or ``score`` raises, RuntimeError on other ranks. All groups of the step are then in
            ``partials``, with what they have.
        """
        self._counts = _Counts()
        kept: _Kept[R] = _Kept()
        num_batches = 0
        while num_batches < (max_batches if filters else 1) and len(kept.groups) < num_groups:
            num_fresh = num_groups - len(self.partials)
            fresh = start_groups(draw(num_fresh) if num_fresh > 0 else (), sampling.n)
            groups, self.partials = self.partials[:num_groups] + fresh, self.partials[num_groups:]
            try:
                self._collect_batch(groups, sampling, (step, TRAINING, num_batches), score, filters, kept)
            except BaseException:
                self.partials = [group for group, _ in kept.groups] + self.partials
                raise
            num_batches += 1
        chosen = kept.groups[:num_groups]
        trajectories = number_groups([group for group, _ in chosen])
        counts = self._counts
        metrics = {
            "groups": len(chosen),
            "trajectories": len(trajectories),
            "missing_groups": num_groups - len(chosen),
            "filtered_groups": kept.filtered,
            "dropped_groups": len(kept.groups) - len(chosen),
            "partial_groups": len(self.partials),
            "gen_batches": num_batches,
            "generated_tokens": counts.generated_tokens,
            "tokens_per_s": counts.generated_tokens / max(counts.generation_s, 1e-9),
            "aborted": counts.aborted,
            "continued": counts.continued,
            "environment_failures": counts.environment_failures,
        }
        return Collected(
            trajectories=trajectories,
            rewards=[reward for _, rewards in chosen for reward in rewards],
            metrics={f"rollout/{name}": float(value) for name, value in metrics.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """``partials``, as plain values: for a checkpoint. The same on every rank."""
        return {"partials": groups_to_plain(self.partials)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of ``state_dict``; also where the ranks, or the engine's sizes, were others."""
        self.partials = groups_from_plain(state["partials"])

    def _collect_batch(
        self,
        groups: list[Group],
        sampling: SamplingConfig,
        key: tuple[int, ...],
        score: Callable[[list[Trajectory]], Sequence[R]],
        filters: bool,
        kept: _Kept[R],
    ) -> None:
        """Finish ``groups``; put those to train on into ``kept``, and those that aren't whole into ``partials``."""
        self._counts.continued += sum(bool(each.tokens) and not is_finished(each) for g in groups for each in g)
        left = groups  # what is for later, at any moment
        try:
            left, error = self._complete(groups, sampling, key)
            if error is not None:
                raise error
            whole = [group for group in left if all(map(is_finished, group))]
            trajectories = number_groups(whole)
            rewards = list(score(trajectories)) if whole else []
            assert len(rewards) == len(trajectories), (len(rewards), len(trajectories))
            left = [group for group in left if not all(map(is_finished, group))]
        finally:
            self.partials = [self._for_later(group) for group in left] + self.partials
        is_kept = torch.ones(len(rewards), dtype=torch.bool)
        if filters and whole:
            totals = torch.tensor([each.total for each in rewards], dtype=torch.float64)
            is_kept = filter_groups(totals, torch.tensor([each.group for each in trajectories]))
        first = 0
        for group in whole:
            if is_kept[first]:
                kept.groups.append((group, rewards[first : first + len(group)]))
            kept.filtered += not is_kept[first]
            first += len(group)

    def _for_later(self, group: Group) -> Group:
        """With an environment, what isn't finished begins anew."""
        if self._make_environment is None:
            return group
        return tuple(each if is_finished(each) else restart(each) for each in group)

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, key: tuple[int, ...]) -> list[Trajectory]:
        groups, error = self._complete(start_groups(prompts, sampling.n), sampling, (*key, 0))
        if error is not None:
            raise error
        return number_groups(groups)

    def _complete(
        self, groups: Sequence[Group], sampling: SamplingConfig, key: tuple[int, ...]
    ) -> tuple[list[Group], BaseException | None]:
        """The groups with what all ranks' engines added; and what went wrong on this rank, or that it did elsewhere."""
        trajectories = number_groups(groups)
        requests = [place for place, each in enumerate(trajectories) if not is_finished(each)]
        if not requests:
            return list(groups), None
        mine = share_of(len(requests), self._seat.num_replicas, self._seat.replica)
        turns = Turns(
            self._engine,
            self._seat,
            {requests[number]: trajectories[requests[number]] for number in mine},
            filler=trajectories[requests[0]].prompt.tokens,
            sampling=self._sampling(sampling),
            key=(self._seed, *key),
            options=TurnOptions(
                max_tokens=sampling.max_tokens,
                max_turns=self._max_turns,
                make_environment=self._make_environment,
                tokenizer=self._tokenizer,
            ),
        )
        error: BaseException | None = None
        began = time.perf_counter()
        try:
            turns.run()
        except RanksApart:
            raise  # ranks of its replica are still in a forward, and come to no gather
        except BaseException as problem:  # returned, when all ranks have what there is
            error = problem
        is_first = self._seat.is_first
        told = _Told(
            packed=pack(turns.trajectories if is_first else {}),
            error=None if error is None else f"{type(error).__name__}: {error}",
            aborted=turns.num_aborted if is_first else 0,
            failures=turns.num_failures if is_first else 0,
            spent_s=time.perf_counter() - began,
        )
        num_before = _count_generated(trajectories)
        failed = self._merge(_gather(told), trajectories)
        self._counts.generated_tokens += _count_generated(trajectories) - num_before
        if error is None and failed:
            error = PeerFailed(f"the rollout failed on {'; '.join(failed)}")
        return split_groups(trajectories), error

    def _merge(self, told: Sequence[_Told], trajectories: list[Trajectory]) -> list[str]:
        """Take over what all ranks tell; returns what went wrong where."""
        for each in told:
            unpack(each.packed, trajectories)
            self._counts.aborted += each.aborted
            self._counts.environment_failures += each.failures
        self._counts.generation_s += max(each.spent_s for each in told)
        return [f"rank {rank}: {each.error}" for rank, each in enumerate(told) if each.error is not None]

    def _sampling(self, config: SamplingConfig) -> Sampling:
        return Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=self._stops,
        )


def _count_generated(trajectories: Sequence[Trajectory]) -> int:
    return sum(sum(each.is_model) for each in trajectories)


def _gather(told: _Told) -> list[_Told]:
    """Of all ranks."""
    if not dist.is_initialized():
        return [told]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, told)
    return gathered
