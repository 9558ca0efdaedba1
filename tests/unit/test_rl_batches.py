"""Trajectories become micro-batches: where each token's label and place are, and which rank forwards what."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.config.parallel import ParallelSizes
from moesaic.config.recipe import Recipe
from moesaic.data.batch import IGNORE_INDEX, Batch, find_loss_positions
from moesaic.data.shard import shard_batch
from moesaic.rl.aggregation import masked_sequence_mean
from moesaic.rl.batches import build_batch, cut_rows, mini_batches, num_tokens
from moesaic.rl.tokens import Tables, flat
from moesaic.rl.types import Experience, Prompt, Trajectory

PADDED = Recipe(model="any", train_dataset=(), micro_batch_size=2)
END_TO_END = Recipe(model="any", train_dataset=(), micro_batch_tokens=24)
ONE_RANK = ParallelSizes(world_size=1)


def trajectory(
    prompt: list[int], tokens: list[int], is_model: list[int] | None = None, group: int = 0, index: int = 0
) -> Trajectory:
    return Trajectory(
        prompt=Prompt(number=group, tokens=tuple(prompt), text="", row={}),
        group=group,
        index=index,
        tokens=tuple(tokens),
        is_model=tuple(map(bool, is_model or [1] * len(tokens))),
        logprobs=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        finish_reason="stop",
    )


# A prompt of 2, an answer of 2; a prompt of 1, and an environment's token (7) between the model's.
EXAMPLE = Experience.of(
    [
        trajectory([10, 11], [1, 2, 3, 4]),
        trajectory([20], [5, 7, 6], [1, 0, 1], index=1),
        trajectory([30], [8], index=2),
    ]
)


def draw_experience(num_groups: int = 5, num_each: int = 3, seed: int = 0) -> Experience:
    stream = random.Random(seed)
    return Experience.of(
        [
            trajectory(
                [1] * stream.randint(1, 6),
                (tokens := [stream.randint(1, 9) for _ in range(stream.randint(1, 12))]),
                [stream.randint(0, 1) for _ in tokens],
                group=group,
                index=index,
            )
            for group in range(num_groups)
            for index in range(num_each)
        ]
    )


def test_rows_with_padding() -> None:
    batch = build_batch(EXAMPLE, (0, 1), ONE_RANK, PADDED)
    assert batch.input_ids.tolist() == [[10, 11, 1, 2, 3, 4], [20, 5, 7, 6, 0, 0]]
    no = IGNORE_INDEX
    assert batch.labels.tolist() == [[no, 1, 2, 3, 4, no], [5, no, 6, no, no, no]]
    assert batch.places is not None
    assert batch.places.tolist() == [[-1, 0, 1, 2, 3, -1], [4, -1, 6, -1, -1, -1]]
    assert batch.attention_mask is not None and batch.attention_mask.tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert batch.loss_positions is not None and batch.loss_positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.kept_places.tolist() == [[-1, 0, 1, 2, 3], [4, -1, 6, -1, -1]]


def test_end_to_end() -> None:
    batch = build_batch(EXAMPLE, (1, 0), ONE_RANK, END_TO_END)
    assert batch.input_ids.tolist() == [[20, 5, 7, 6, 10, 11, 1, 2, 3, 4]] and batch.attention_mask is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert batch.places is not None and batch.places.tolist() == [[4, -1, 6, -1, -1, 0, 1, 2, 3, -1]]
    assert batch.kept_places.tolist() == [[4, 6, 0, 1, 2, 3]]
    assert batch.kept_labels.tolist() == [[5, 6, 1, 2, 3, 4]]


@pytest.mark.parametrize("recipe", [PADDED, END_TO_END], ids=["padded", "end-to-end"])
def test_a_batch_without_rows_has_a_token_and_no_loss(recipe: Recipe) -> None:
    batch = build_batch(EXAMPLE, (), ParallelSizes(world_size=2, cp_size=2), recipe)
    assert batch.input_ids.tolist() == [[0, 0]] and batch.kept_labels.tolist() == [[IGNORE_INDEX]]
    assert batch.kept_places.tolist() == [[-1]]


@pytest.mark.parametrize("recipe", [PADDED, END_TO_END], ids=["padded", "end-to-end"])
def test_the_last_token_alone(recipe: Recipe) -> None:
    batch = build_batch(EXAMPLE, (0, 1), ONE_RANK, recipe, "last")
    assert batch.places is not None
    kept = batch.places[batch.labels != IGNORE_INDEX]
    assert kept.tolist() == [3, 6]
    assert batch.input_ids[batch.places == 3].tolist() == [4] and batch.input_ids[batch.places == 6].tolist() == [6]


@pytest.mark.parametrize("recipe", [PADDED, END_TO_END], ids=["padded", "end-to-end"])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_token_of_the_model_has_one_place_and_its_label(recipe: Recipe, dp_size: int) -> None:
    experience, sizes = draw_experience(), ParallelSizes(world_size=dp_size)
    numbers = range(len(experience.trajectories))
    found: dict[int, int] = {}
    for row in itertools.chain(*cut_rows(experience, numbers, sizes, recipe)):
        batch = build_batch(experience, row, sizes, recipe)
        has_place = batch.kept_places >= 0
        assert torch.equal(has_place, batch.kept_labels != IGNORE_INDEX)
        new = dict(zip(batch.kept_places[has_place].tolist(), batch.kept_labels[has_place].tolist(), strict=True))
        assert not found.keys() & new
        found |= new
    width = experience.num_tokens
    expected = {
        b * width + t: token
        for b, each in enumerate(experience.trajectories)
        for t, token in enumerate(each.tokens)
        if each.is_model[t]
    }
    assert found == expected


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 15])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_padded_rows_are_shared_evenly(dp_size: int, num_rows: int, micro_batch_size: int) -> None:
    experience = draw_experience()
    recipe = Recipe(model="any", train_dataset=(), micro_batch_size=micro_batch_size)
    rounds = cut_rows(experience, range(num_rows), ParallelSizes(world_size=dp_size), recipe)
    assert [len(each) for each in rounds] == [dp_size] * -(-num_rows // (dp_size * micro_batch_size))
    flat = [row for each in rounds for row in each]
    assert sorted(itertools.chain(*flat)) == list(range(num_rows))
    assert max(map(len, flat)) - min(map(len, flat)) <= 1 and max(map(len, flat)) <= micro_batch_size
    # Neighbours in length share a round: no trajectory of a later one is longer than any before.
    lengths = [[num_tokens(experience.trajectories[n]) for row in each for n in row] for each in rounds]
    assert all(max(later) <= min(earlier) for earlier, later in itertools.pairwise(lengths))


def test_the_cut_is_the_same_in_any_order_of_distinct_lengths() -> None:
    experience = Experience.of([trajectory([1], [1] * length, index=length) for length in range(1, 12)])
    shuffled = random.Random(0).sample(range(11), 11)
    for recipe in (PADDED, END_TO_END):
        sizes = ParallelSizes(world_size=2)
        assert cut_rows(experience, shuffled, sizes, recipe) == cut_rows(experience, range(11), sizes, recipe)


def test_a_trajectory_beyond_the_budget() -> None:
    experience = Experience.of([trajectory([1], [1] * 24)])
    with pytest.raises(ValueError, match=r"micro_batch_tokens=24 in multiples of 1: a trajectory has 25 tokens"):
        cut_rows(experience, [0], ONE_RANK, END_TO_END)
    experience = Experience.of([trajectory([1], [1] * 22)])
    assert cut_rows(experience, [0], ONE_RANK, END_TO_END) == [[(0,)]]
    with pytest.raises(ValueError, match=r"in multiples of 5: a trajectory has 23 tokens"):
        cut_rows(experience, [0], ParallelSizes(world_size=5, cp_size=5), END_TO_END)


def test_mini_batches_are_of_whole_groups_in_order() -> None:
    experience = draw_experience(num_groups=7)
    batches = mini_batches(experience, 3)
    assert [len(each) for each in batches] == [9, 9, 3]
    assert list(itertools.chain(*batches)) == list(range(21))
    groups = [[experience.trajectories[number].group for number in each] for each in batches]
    assert all(each[i] == each[i + 1] == each[i + 2] for each in groups for i in range(0, len(each), 3))
    assert mini_batches(experience, None) == [tuple(range(21))]


def fake_meshes(cp_size: int, cp_rank: int, tp_size: int = 1) -> Any:
    """One rank's view, of a group that nothing is sent over."""
    sizes = ParallelSizes(world_size=cp_size * tp_size, cp_size=cp_size, tp_size=tp_size)
    return SimpleNamespace(
        sizes=sizes,
        data=SimpleNamespace(get_local_rank=lambda axis: cp_rank),
        sequence=SimpleNamespace(get_local_rank=lambda: cp_rank * tp_size),
    )


@pytest.mark.parametrize("recipe", [PADDED, END_TO_END], ids=["padded", "end-to-end"])
def test_places_are_cut_as_labels_are(recipe: Recipe) -> None:
    """Of rows of 10 or 6, which 4 doesn't divide: they are padded before they are cut."""
    whole = build_batch(EXAMPLE, (0, 1), ONE_RANK, recipe)
    parts = [shard_batch(whole, fake_meshes(4, rank)) for rank in range(4)]
    assert whole.places is not None
    places = torch.cat([part.places for part in parts if part.places is not None], dim=1)
    labels = torch.cat([part.labels for part in parts], dim=1)
    width = whole.labels.size(1)
    assert torch.equal(places[:, :width], whole.places) and torch.equal(labels[:, :width], whole.labels)
    assert bool((places[:, width:] == -1).all()) and bool((labels[:, width:] == IGNORE_INDEX).all())
    for part in parts:
        assert part.kept_places.shape == part.kept_labels.shape
        assert torch.equal(part.kept_places >= 0, part.kept_labels != IGNORE_INDEX)


def test_means_over_trajectories_have_the_same_bits_however_rows_are_cut() -> None:
    """And so on a device that adds in no set order."""
    stream = random.Random(0)
    experience = Experience.of([trajectory([1], [1] * stream.randint(20, 90), index=index) for index in range(9)])
    generator = torch.Generator().manual_seed(0)
    mask_BT = experience.mask_BT & (torch.rand(experience.mask_BT.shape, generator=generator) < 0.8)
    values_BT = torch.randn(mask_BT.shape, generator=generator)
    expected = flat(masked_sequence_mean(mask_BT)(values_BT))
    tables = Tables(
        columns={"values": flat(values_BT)},
        mask=flat(mask_BT),
        counts=flat(mask_BT.sum(dim=1)),
        num_tokens=experience.num_tokens,
        cp_group=None,
        topk=None,
    )
    for recipe in (PADDED, Recipe(model="any", train_dataset=(), micro_batch_tokens=256)):
        for row in itertools.chain(*cut_rows(experience, range(9), ONE_RANK, recipe)):
            batch = build_batch(experience, row, ONE_RANK, recipe)
            tokens, places = tables.at(torch.zeros(()), batch)
            found = tokens.sequence_mean(tokens.columns["values"])
            assert torch.equal(found[tokens.mask], expected[places][tokens.mask])


def test_batches_without_places() -> None:
    plain = Batch(
        input_ids=torch.ones(1, 4, dtype=torch.int64),
        labels=torch.ones(1, 4, dtype=torch.int64),
        position_ids=torch.arange(4)[None],
    )
    assert plain.to("meta").places is None and shard_batch(plain, fake_meshes(2, 1)).places is None
    with pytest.raises(AssertionError, match="no places"):
        _ = plain.kept_places
    placed = build_batch(EXAMPLE, (0,), ONE_RANK, PADDED)
    moved = placed.to("meta").places
    assert moved is not None and moved.device.type == "meta"
    assert torch.equal(find_loss_positions(placed.labels), torch.tensor([1, 2, 3, 4]))
