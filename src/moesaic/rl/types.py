"""What a step of reinforcement learning is about: prompts, trajectories, and tables of numbers beside their tokens.

All of a step's trajectories are on every rank, on the host: what is computed from them (advantages, weights, how they
are cut into micro-batches) is then the same on every rank, whatever the topology.

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them.

Example, a trajectory of two turns: the model wrote ``5 6``, the environment answered ``7 8 9``, the model wrote ``4``::

    tokens        5    6    7    8    9    4
    is_model      x    x    .    .    .    x       what the model did not write is never trained on
    logprobs    -0.1 -0.3   0    0    0  -0.2
    versions      3    3   -1   -1   -1    3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moesaic.engines.base import FinishReason

NO_VERSION = -1
"""Weight version of a token that no model wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the prompts' data set.

    Attributes:
        number: of the row, over all data sets; the same in every run of the recipe.
        tokens: what the engine is asked to go on with.
        text: the same as text; of a conversation, as the chat template writes it.
        row: the row's columns, for reward functions and environments (``prompt`` as it was).
    """

    number: int
    tokens: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What came of one prompt, once (the module's example).

    Attributes:
        prompt: what was asked.
        group: number of the prompt within the step: completions of one prompt are one group.
        index: which of the group's.
        tokens: after the prompt: the model's, with the stop token, and the environment's.
        is_model: one per token: the model wrote it.
        logprobs: raw, of the engine; 0 where it isn't the model's.
        versions: of the weights that wrote each token; ``NO_VERSION`` where none did.
        finish_reason: of the last turn; ``aborted``: it is to be continued.
        num_turns: of the model.
        environment_reward: what the environment gave; None without one.
    """

    prompt: Prompt
    group: int
    index: int
    tokens: tuple[int, ...]
    is_model: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    num_turns: int = 1
    environment_reward: float | None = None

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.tokens, self.is_model, self.logprobs, self.versions)}
        assert len(lengths) == 1, lengths


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A step's trajectories, and tables beside them.

    Attributes:
        trajectories: ordered by group, then index.
        columns: fp32 [B, T] on the host, by name: ``rollout_logprobs``, ``old_logprobs``, ``advantages``, ...; 0 where
            a trajectory has no token.
    """

    trajectories: tuple[Trajectory, ...]
    columns: Mapping[str, Tensor]

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> Experience:
        """With the one column that the engine gives: ``rollout_logprobs``."""
        ordered = tuple(sorted(trajectories, key=lambda each: (each.group, each.index)))
        experience = Experience(trajectories=ordered, columns={})
        return experience.with_columns(rollout_logprobs=experience.table([each.logprobs for each in ordered]))

    def with_columns(self, **columns: Tensor) -> Experience:
        """These beside, or in place of, those there are."""
        shape = (len(self.trajectories), self.num_tokens)
        wrong = {name: tuple(column.shape) for name, column in columns.items() if tuple(column.shape) != shape}
        assert not wrong, f"{wrong}, not {shape}"
        return replace(self, columns={**self.columns, **columns})

    def table(self, rows: Sequence[Sequence[float]]) -> Tensor:
        """[B, T] fp32 of one sequence of numbers for each trajectory, 0 behind its end."""
        table = torch.zeros(len(self.trajectories), self.num_tokens)
        for number, row in enumerate(rows):
            table[number, : len(row)] = torch.tensor(row, dtype=torch.float32)
        return table

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return max(len(each.tokens) for each in self.trajectories)

    @cached_property
    def mask_BT(self) -> Tensor:
        """[B, T] bool: the model's tokens."""
        return self.table([each.is_model for each in self.trajectories]).bool()

    @cached_property
    def groups_B(self) -> Tensor:
        """[B] int64."""
        return torch.tensor([each.group for each in self.trajectories])
