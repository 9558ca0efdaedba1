"""From a step's trajectories to micro-batches: which rank forwards which of them, and where its numbers belong.

A micro-batch's ``places`` say where in the step's [B, T] tables each label's numbers are. Two trajectories, prompts of
2 and 1 tokens, T = 4, the second with a token of its environment's (``e``)::

    input_ids   p0 p1 a0 a1          labels   .  a0  a1   .          places   .   0   1   .
                q0 b0  e b2                  b0   .  b2   .                   4   .   6   .

All of it follows from lengths and sizes, so every rank computes it for all ranks, and nothing is communicated. Ranks
wait for each other in every round of micro-batches; hence each round has sequences of about equal lengths, and every
rank equally many micro-batches, the last ones perhaps without a row (one token, no loss).

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moesaic.config import Recipe
from moesaic.config.parallel import ParallelSizes
from moesaic.data.batch import IGNORE_INDEX, NO_PLACE, Batch, Sample, shift_labels
from moesaic.data.packing import Row, RowOptions, collate
from moesaic.data.token_batches import cut_step
from moesaic.rl.types import Experience, Trajectory

PAD_TOKEN = 0
"""Any token of any vocabulary: padding is of no document, and carries no loss."""

Positions = Literal["tokens", "last"]


def cut_rows(experience: Experience, rows: Iterable[int], sizes: ParallelSizes, recipe: Recipe) -> list[list[Row]]:
    """Micro-batches of the trajectories ``rows``: ``[round][dp rank]`` numbers of trajectories.

    ``recipe.micro_batch_tokens`` at most, end to end; else ``recipe.micro_batch_size`` trajectories at most, a row
    each, padded to the longest of their micro-batch.

    Args:
        rows: numbers of trajectories, each once; at least one.
        sizes: of the role's meshes.
        recipe: of the role.

    Raises:
        ValueError: a trajectory has more tokens than ``micro_batch_tokens``.
    """
    lengths = [num_tokens(each) for each in experience.trajectories]
    if recipe.micro_batch_tokens is None:
        return _cut_padded(lengths, rows, sizes.dp_size, recipe.micro_batch_size)
    multiple = sizes.cp_size * sizes.tp_size
    most = recipe.micro_batch_tokens // multiple * multiple  # rows are rounded up to the multiple
    rows = tuple(rows)
    longest = max(lengths[row] for row in rows)
    if longest > most:
        raise ValueError(
            f"micro_batch_tokens={recipe.micro_batch_tokens} in multiples of {multiple}: a trajectory has {longest} "
            "tokens. Raise it to rollout.max_prompt_length + rollout.sampling.max_tokens, or lower those"
        )
    return cut_step(lengths, rows, sizes.dp_size, most)


def build_batch(
    experience: Experience, row: Row, sizes: ParallelSizes, recipe: Recipe, positions: Positions = "tokens"
) -> Batch:
    """One micro-batch of ``cut_rows``, whole, on the host: [rows, S], or [1, S] end to end.

    Args:
        row: numbers of trajectories; none makes a batch of one token without loss.
        positions: which positions have a label, a place and logits. ``tokens``: the one before each token that the
            model wrote, whose label it is. ``last``: each trajectory's last, with some label, at the place of its last
            token; what a reward model reads.
    """
    is_packed = recipe.micro_batch_tokens is not None
    trajectories = [experience.trajectories[number] for number in row]
    samples = [_sample(each, positions) for each in trajectories]
    options = RowOptions(
        cutoff_len=max(1, sum(map(len, samples))),
        packing=is_packed,
        pad_token_id=PAD_TOKEN,
        pad_to_multiple_of=sizes.cp_size * sizes.tp_size,
    )
    numbers = tuple(range(len(samples)))
    batch = collate(samples, [numbers] if is_packed or not numbers else [(each,) for each in numbers], options)
    places = torch.full_like(batch.labels, NO_PLACE)
    if row:  # labels in the order of positions are those of one trajectory after the other, in both layouts
        own = [_places(experience, number, positions) for number in row]
        places[batch.labels != IGNORE_INDEX] = torch.cat(own)
    return replace(batch, places=places)


def mini_batches(experience: Experience, size: int | None) -> list[tuple[int, ...]]:
    """The trajectories of each optimizer update: whole groups, ``size`` of them each, the last perhaps fewer.

    In the order of the step's prompts, which were drawn at random: as verl goes through them.

    Args:
        size: groups (``ppo_mini_batch_size``); None: all in one.
    """
    members: dict[int, list[int]] = {}
    for number, each in enumerate(experience.trajectories):
        members.setdefault(each.group, []).append(number)
    groups = list(members.values())
    size = len(groups) if size is None else size
    chunks = (groups[first : first + size] for first in range(0, len(groups), size))
    return [tuple(number for group in chunk for number in group) for chunk in chunks]


def num_tokens(trajectory: Trajectory) -> int:
    """Prompt and what came after it."""
    return len(trajectory.prompt.tokens) + len(trajectory.tokens)


def _cut_padded(lengths_tokens: Sequence[int], rows: Iterable[int], dp_size: int, most: int) -> list[list[Row]]:
    """Neighbours in length share a micro-batch, and a round: little is padding, and no rank waits for long."""
    longest_first = sorted(rows, key=lengths_tokens.__getitem__, reverse=True)
    assert longest_first, "an update has at least one trajectory"
    num_rounds = -(-len(longest_first) // (most * dp_size))
    num_batches = num_rounds * dp_size
    fewest, rest = divmod(len(longest_first), num_batches)
    # The last ones, of the shortest rows, take one more; where there is none for some, the last go without.
    is_larger = [number < rest if fewest == 0 else number >= num_batches - rest for number in range(num_batches)]
    batches, first = [], 0
    for each in is_larger:
        batches.append(tuple(longest_first[first : first + fewest + each]))
        first += fewest + each
    rounds = [batches[first : first + dp_size] for first in range(0, num_batches, dp_size)]
    # As in ``cut_step``: the heaviest of a round is rank 0's, then the last rank's.
    return [round_[::-1] if number % 2 else round_ for number, round_ in enumerate(rounds)]


def _sample(trajectory: Trajectory, positions: Positions) -> Sample:
    prompt = trajectory.prompt.tokens
    assert prompt, "a prompt has at least one token: the first of an answer is predicted from it"
    ids = [*prompt, *trajectory.tokens]
    if positions == "last":
        return Sample(input_ids=ids, labels=[IGNORE_INDEX] * (len(ids) - 1) + [ids[-1]])
    return Sample(input_ids=ids, labels=shift_labels(ids, [*[False] * len(prompt), *trajectory.is_model]))


def _places(experience: Experience, number: int, positions: Positions) -> Tensor:
    """Of one trajectory's labels, in their order."""
    trajectory, first = experience.trajectories[number], number * experience.num_tokens
    if positions == "last":
        return torch.tensor([first + max(0, len(trajectory.tokens) - 1)])
    return first + torch.tensor(trajectory.is_model, dtype=torch.bool).nonzero().flatten()
