"""Micro-batches by tokens: every sample once, within the budget, even over the ranks, the same steps on any ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data import Batch, BatchLoader, Sample, TokenBatchLoader, TokenEvalLoader
from moesaic.data.packing import Row, pack_rows
from moesaic.data.token_batches import cut_step
from moesaic.train.losses import count_loss_tokens

BUDGET = 16

steps_of_lengths = st.lists(st.integers(1, BUDGET), min_size=1, max_size=60)
dp_sizes = st.integers(1, 8)


def tokens(lengths: Sequence[int], row: Row) -> int:
    return sum(lengths[index] for index in row)


@settings(deadline=None)
@given(lengths=steps_of_lengths, dp_size=dp_sizes)
def test_every_sample_once_and_no_micro_batch_over_the_budget(lengths: list[int], dp_size: int) -> None:
    rounds = cut_step(lengths, range(len(lengths)), dp_size, BUDGET)
    assert {len(rows) for rows in rounds} == {dp_size}, "every rank runs every round"
    rows = list(chain(*rounds))
    assert Counter(chain(*rows)) == Counter(range(len(lengths)))
    assert max(tokens(lengths, row) for row in rows) <= BUDGET
    assert all(any(rows) for rows in rounds), "no round is without any sample"


@settings(deadline=None)
@given(lengths=steps_of_lengths, dp_size=dp_sizes)
def test_rounds_are_few_and_micro_batches_even(lengths: list[int], dp_size: int) -> None:
    """Never more rounds than best fit needs. Where longest-first meets the budget, no micro-batch could give its
    shortest sample to another and be the larger one still: that is the bound of longest-first."""
    rounds = cut_step(lengths, range(len(lengths)), dp_size, BUDGET)
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    tight = {tuple(row) for row in pack_rows(lengths, longest_first, BUDGET)}
    assert -(-sum(lengths) // (BUDGET * dp_size)) <= len(rounds) <= -(-len(tight) // dp_size)
    rows = list(chain(*rounds))
    if {row for row in rows if row} == tight:
        return
    fewest = min(tokens(lengths, row) for row in rows)
    for row in filter(None, rows):
        assert tokens(lengths, row) - min(lengths[index] for index in row) <= fewest, rounds


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, BUDGET // 4), min_size=32, max_size=60), dp_size=dp_sizes)
def test_short_samples_leave_every_micro_batch_about_equal(lengths: list[int], dp_size: int) -> None:
    rows = list(chain(*cut_step(lengths, range(len(lengths)), dp_size, BUDGET)))
    counts = [tokens(lengths, row) for row in rows]
    assert max(counts) - min(counts) <= BUDGET // 4


def test_best_fit_where_it_saves_a_round() -> None:
    """Longest first puts 3 2 | 3 2, and the last 2 finds no room in 6."""
    assert cut_step([3, 3, 2, 2, 2], range(5), 2, 6) == [[(0, 1), (2, 3, 4)]]


def test_best_fit_may_leave_a_rank_without_samples() -> None:
    """Eight micro-batches are too few for longest-first, seven enough for best fit."""
    lengths = [11, 11, 11, 10, 9, 9, 8, 8, 7, 7, 7, 6, 5, 5, 4, 4, 4]
    (rows,) = cut_step(lengths, range(len(lengths)), 8, 18)
    assert sum(row != () for row in rows) == 7 and len(rows) == 8
    assert Counter(chain(*rows)) == Counter(range(len(lengths)))


def test_longest_first_where_best_fit_has_lost_sight_of_its_open_rows() -> None:
    """Best fit keeps 64 rows in view, and of 200 half-full ones loses most."""
    assert len(cut_step([9] * 200 + [7] * 200, range(400), 1, 16)) == 200


def test_the_modules_example() -> None:
    assert cut_step([7, 5, 3, 3, 2, 2, 1], range(7), 2, 8) == [[(0,), (1, 6)], [(3, 5), (2, 4)]]


def test_micro_batches_of_a_round_have_similar_attention() -> None:
    """All have 16 tokens; longest first makes them in the order 106, 130, 88, 128 of their squares."""
    lengths = [10, 9, 9, 8, 8, 7] + [1] * 13
    rounds = cut_step(lengths, range(19), 2, 16)
    assert [[sum(lengths[index] ** 2 for index in row) for row in rows] for rows in rounds] == [[130, 128], [88, 106]]


# --- the loader ------------------------------------------------------------------------------------------------------


def build_samples(lengths: Sequence[int]) -> list[Sample]:
    """Sample i is i + 1 repeated."""
    return [
        Sample(input_ids=[index + 1] * length, labels=[index + 1] * (length - 1) + [-100])
        for index, length in enumerate(lengths)
    ]


LENGTHS = [1 + (7 * index) % 13 for index in range(37)]


def build_loader(lengths: Sequence[int] = LENGTHS, **changes: Any) -> TokenBatchLoader:
    options: dict[str, Any] = {"micro_batch_tokens": BUDGET, "global_batch_size": 10, "dp_rank": 0, "dp_size": 1}
    options |= {"cutoff_len": BUDGET, "pad_token_id": 0, "seed": 7}
    return TokenBatchLoader(build_samples(lengths), **(options | changes))


def ids(batches: Sequence[Batch]) -> list[int]:
    """Samples of a rank's step; each must be there whole."""
    found: list[int] = []
    for batch in batches:
        counts = Counter(batch.input_ids.flatten().tolist())
        assert batch.document_lengths is not None and sum(batch.document_lengths) == counts.total() - counts[0]
        found += (token - 1 for token in counts if token)
    return found


def global_steps(num: int, dp_size: int, state: dict[str, int] | None = None, **changes: Any) -> list[list[int]]:
    """Samples of the next steps over all ranks, sorted; every rank must run equally many micro-batches."""
    ranks = [build_loader(dp_rank=rank, dp_size=dp_size, **changes) for rank in range(dp_size)]
    for rank in ranks if state is not None else ():
        rank.load_state_dict(state or {})
    steps = []
    for per_rank in zip(*(islice(rank, num) for rank in ranks), strict=True):
        assert len({len(batches) for batches in per_rank}) == 1
        steps.append(sorted(chain.from_iterable(map(ids, per_rank))))
    return steps


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40),
    global_batch_size=st.integers(1, 12),
    sizes=st.tuples(dp_sizes, dp_sizes, dp_sizes),
    num_done=st.integers(0, 6),
)
def test_the_same_steps_on_any_ranks_and_resumed_on_others(
    lengths: list[int], global_batch_size: int, sizes: tuple[int, int, int], num_done: int
) -> None:
    options: dict[str, Any] = {"lengths": lengths, "global_batch_size": global_batch_size}
    whole = global_steps(8, sizes[0], **options)
    assert global_steps(8, sizes[1], **options) == whole
    num_steps = build_loader(**options).num_steps_per_epoch
    for epoch in (whole[first : first + num_steps] for first in range(0, 8 - num_steps + 1, num_steps)):
        assert sorted(chain(*epoch)) == list(range(len(lengths)))
    stopped = build_loader(dp_rank=sizes[0] - 1, dp_size=sizes[0], **options)
    list(islice(stopped, num_done))
    assert global_steps(8 - num_done, sizes[2], stopped.state_dict(), **options) == whole[num_done:]


def test_the_same_micro_batches_every_time_and_after_a_stop() -> None:
    whole = [[batch.input_ids.tolist() for batch in step] for step in islice(build_loader(dp_size=2), 8)]
    stopped = build_loader(dp_size=2)
    list(islice(stopped, 3))
    resumed = build_loader(dp_size=2)
    resumed.load_state_dict(stopped.state_dict())
    assert [[batch.input_ids.tolist() for batch in step] for step in islice(resumed, 5)] == whole[3:]
    assert resumed.epoch == 2 and whole[:4] != whole[4:]


def test_a_run_of_whole_rows_can_go_on_by_tokens() -> None:
    options: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "cutoff_len": BUDGET, "pad_token_id": 0, "seed": 7}
    rows = BatchLoader(build_samples(LENGTHS), micro_batch_size=2, global_batch_size=10, packing=False, **options)
    steps = [sorted(ids(step)) for step in islice(rows, 1)]
    state = rows.state_dict()
    steps += [sorted(ids(step)) for step in islice(rows, 4)]
    assert global_steps(4, 3, state) == steps[1:]
    with pytest.raises(ValueError, match="seed is 8 now and was 7"):
        build_loader(seed=8).load_state_dict(state)


def test_micro_batches_lie_end_to_end_in_one_row() -> None:
    """No padding but to the multiple, which the budget includes; positions restart with each document."""
    ranks = [build_loader(dp_rank=rank, dp_size=2, micro_batch_tokens=18, pad_to_multiple_of=4) for rank in (0, 1)]
    for batch in chain.from_iterable(chain.from_iterable(islice(rank, 4) for rank in ranks)):
        assert batch.document_lengths is not None and batch.attention_mask is None
        num_tokens = sum(batch.document_lengths)
        assert batch.input_ids.shape == (1, -(-num_tokens // 4) * 4) and batch.input_ids.shape[1] <= 16
        lengths = [*batch.document_lengths, batch.input_ids.shape[1] - num_tokens]
        assert batch.position_ids.tolist() == [list(chain.from_iterable(map(range, lengths)))]
        assert int(batch.real_tokens.sum()) == num_tokens


def test_a_rank_without_samples_has_an_empty_micro_batch() -> None:
    ranks = [build_loader([5], dp_rank=rank, dp_size=3, pad_to_multiple_of=2) for rank in range(3)]
    steps = [next(iter(rank)) for rank in ranks]
    assert [len(step) for step in steps] == [1, 1, 1] and [ids(step) for step in steps] == [[0], [], []]
    (empty,) = steps[2]
    assert empty.input_ids.shape == (1, 2) and empty.document_lengths == () and not empty.real_tokens.any()
    assert int(count_loss_tokens(empty.labels)) == 0 and torch.equal(empty.position_ids, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_evaluation_reads_everything_once(dp_size: int) -> None:
    options: dict[str, Any] = {"micro_batch_tokens": BUDGET, "cutoff_len": BUDGET, "pad_token_id": 0}
    ranks = [
        TokenEvalLoader(build_samples(LENGTHS), dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)
    ]
    for _ in range(2):
        per_rank = [list(rank) for rank in ranks]
        assert {len(batches) for batches in per_rank} == {len(rank) for rank in ranks}
        assert sorted(chain.from_iterable(map(ids, per_rank))) == list(range(len(LENGTHS)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 0 has 5 tokens: a micro-batch holds 1 to 4 .*micro_batch_tokens=4"):
        build_loader([5], micro_batch_tokens=4)
    with pytest.raises(ValueError, match=r"holds 1 to 4 .*micro_batch_tokens=7 in multiples of 4"):
        build_loader([5], micro_batch_tokens=7, pad_to_multiple_of=4)
    with pytest.raises(ValueError, match="sample 1 has 9 tokens: .*cutoff_len=8"):
        build_loader([8, 9], cutoff_len=8)
    with pytest.raises(ValueError, match="no sample"):
        build_loader([])
