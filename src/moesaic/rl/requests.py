"""What a rollout asks engines for, and how trajectories grow by what comes back. Pure: no engine, no communication.

A trajectory that isn't finished (``finish_reason`` is ``aborted``) is a request: the engine goes on after its tokens.
The requests of a step are shared over the engine's replicas in runs. Example, 3 prompts of 2 completions, 4 replicas::

    requests    a0 a1 b0 b1 c0 c1
    replicas     0  0  1  1  2  3          sizes 2 2 1 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from moesaic.engines.base import Completion, FinishReason
from moesaic.rl.types import NO_VERSION, Prompt, Trajectory

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

Group = tuple[Trajectory, ...]
"""All completions of one prompt, finished or not."""


def start_groups(prompts: Sequence[Prompt], n: int) -> list[Group]:
    """``n`` trajectories without a token for each prompt."""
    return [tuple(_empty(prompt, index) for index in range(n)) for prompt in prompts]


def _empty(prompt: Prompt, index: int) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        group=0,
        index=index,
        tokens=(),
        is_model=(),
        logprobs=(),
        versions=(),
        finish_reason="aborted",
        num_turns=0,
    )


def restart(trajectory: Trajectory) -> Trajectory:
    """The same request, without a token."""
    return _empty(trajectory.prompt, trajectory.index)


def is_finished(trajectory: Trajectory) -> bool:
    """Whether nothing is to be added."""
    return trajectory.finish_reason != "aborted"


def number_groups(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories, each with its group's place as its number."""
    return [replace(each, group=number) for number, group in enumerate(groups) for each in group]


def split_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Of ``number_groups``."""
    return [tuple(group) for _, group in groupby(trajectories, key=lambda each: each.group)]


def share_of(num_requests: int, num_replicas: int, replica: int) -> range:
    """The module's example: the requests of one replica. Sizes differ by one at most, larger ones first."""
    size, rest = divmod(num_requests, num_replicas)
    first = replica * size + min(replica, rest)
    return range(first, first + size + (replica < rest))


def add_completion(trajectory: Trajectory, completion: Completion, max_tokens: int) -> Trajectory:
    """With what the model wrote, up to ``max_tokens`` in all. Counts no turn: an aborted one goes on.

    The engine may have been allowed more than this trajectory has left.
    """
    room = max_tokens - len(trajectory.tokens)
    tokens, logprobs = completion.tokens[:room], completion.logprobs[:room]
    reason = completion.finish_reason
    if len(completion.tokens) > room or (len(tokens) == room and reason == "aborted"):
        reason = "length"
    return replace(
        trajectory,
        tokens=trajectory.tokens + tokens,
        is_model=trajectory.is_model + (True,) * len(tokens),
        logprobs=trajectory.logprobs + logprobs,
        versions=trajectory.versions + (completion.weight_version,) * len(tokens),
        finish_reason=reason,
    )


def add_observation(trajectory: Trajectory, tokens: Sequence[int], max_tokens: int) -> Trajectory:
    """With what the environment said, to be gone on with; where it leaves no room for a token, without it, ended by
    ``length``."""
    if len(trajectory.tokens) + len(tokens) >= max_tokens:
        return replace(trajectory, finish_reason="length")
    return replace(
        trajectory,
        tokens=trajectory.tokens + tuple(tokens),
        is_model=trajectory.is_model + (False,) * len(tokens),
        logprobs=trajectory.logprobs + (0.0,) * len(tokens),
        versions=trajectory.versions + (NO_VERSION,) * len(tokens),
        finish_reason="aborted",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Trajectories as arrays, without their prompts, which every rank has: 13 bytes a token.

    Attributes:
        places: of each among the step's trajectories.
        lengths: tokens of each; ``tokens``, ``is_model``, ``logprobs`` and ``versions`` are of all, end to end.
        reasons: numbers in ``REASONS``.
        rewards: of the environment; NaN: none.
    """

    places: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    is_model: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reasons: NDArray[np.int8]
    num_turns: NDArray[np.int32]
    rewards: NDArray[np.float64]


def pack(trajectories: Mapping[int, Trajectory]) -> Packed:
    """By place."""
    rows = list(trajectories.values())
    return Packed(
        places=np.array(list(trajectories), dtype=np.int32),
        lengths=np.array([len(each.tokens) for each in rows], dtype=np.int32),
        tokens=np.array([token for each in rows for token in each.tokens], dtype=np.int32),
        is_model=np.array([flag for each in rows for flag in each.is_model], dtype=np.bool_),
        logprobs=np.array([value for each in rows for value in each.logprobs], dtype=np.float32),
        versions=np.array([version for each in rows for version in each.versions], dtype=np.int32),
        reasons=np.array([REASONS.index(each.finish_reason) for each in rows], dtype=np.int8),
        num_turns=np.array([each.num_turns for each in rows], dtype=np.int32),
        rewards=np.array(
            [np.nan if each.environment_reward is None else each.environment_reward for each in rows], dtype=np.float64
        ),
    )


def unpack(packed: Packed, trajectories: list[Trajectory]) -> None:
    """Put what ``packed`` holds in the places of ``trajectories``."""
    ends = np.cumsum(packed.lengths).tolist()
    for row, (place, end) in enumerate(zip(packed.places.tolist(), ends, strict=True)):
        part = slice(end - int(packed.lengths[row]), end)
        reward = float(packed.rewards[row])
        trajectories[place] = replace(
            trajectories[place],
            tokens=tuple(packed.tokens[part].tolist()),
            is_model=tuple(packed.is_model[part].tolist()),
            logprobs=tuple(packed.logprobs[part].tolist()),
            versions=tuple(packed.versions[part].tolist()),
            finish_reason=REASONS[packed.reasons[row]],
            num_turns=int(packed.num_turns[row]),
            environment_reward=None if np.isnan(reward) else reward,
        )


def groups_to_plain(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For a checkpoint: numbers, text, lists and dicts alone, where the prompts' rows are that."""
    return [
        {
            "prompt": {
                "number": group[0].prompt.number,
                "tokens": list(group[0].prompt.tokens),
                "text": group[0].prompt.text,
                "row": dict(group[0].prompt.row),
            },
            "trajectories": [
                {
                    "index": each.index,
                    "tokens": list(each.tokens),
                    "is_model": list(each.is_model),
                    "logprobs": list(each.logprobs),
                    "versions": list(each.versions),
                    "finish_reason": each.finish_reason,
                    "num_turns": each.num_turns,
                    "environment_reward": each.environment_reward,
                }
                for each in group
            ],
        }
        for group in groups
    ]


def groups_from_plain(plain: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Of ``groups_to_plain``."""
    groups = []
    for group in plain:
        own = group["prompt"]
        prompt = Prompt(number=own["number"], tokens=tuple(own["tokens"]), text=own["text"], row=own["row"])
        groups.append(
            tuple(
                Trajectory(
                    prompt=prompt,
                    group=0,
                    index=each["index"],
                    tokens=tuple(each["tokens"]),
                    is_model=tuple(each["is_model"]),
                    logprobs=tuple(each["logprobs"]),
                    versions=tuple(each["versions"]),
                    finish_reason=each["finish_reason"],
                    num_turns=each["num_turns"],
                    environment_reward=each["environment_reward"],
                )
                for each in group["trajectories"]
            )
        )
    return groups
