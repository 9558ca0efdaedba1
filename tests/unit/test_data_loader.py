"""The order of samples: the same for any number of ranks, nothing dropped, resumed exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from moesaic.data import Batch, BatchLoader, EvalLoader, MixedDataset, Sample
from moesaic.train.losses import count_loss_tokens

NUM_SAMPLES = 21
CUTOFF_LEN = 8


def build_dataset(num_samples: int = NUM_SAMPLES) -> list[Sample]:
    """Sample i is i + 1 repeated 1 + i % 4 times, all of it trained: a row says which samples it holds."""
    return [
        Sample(input_ids=[index + 1] * (2 + index % 4), labels=[index + 1] * (1 + index % 4) + [-100])
        for index in range(num_samples)
    ]


def build_loader(**changes: Any) -> BatchLoader:
    options: dict[str, Any] = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "cutoff_len": CUTOFF_LEN,
        "packing": False,
        "pad_token_id": 0,
        "seed": 7,
    }
    return BatchLoader(build_dataset(), **(options | changes))


def contents(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    """Sample ids of each row, padding aside. Packed rows lie end to end, ``CUTOFF_LEN`` tokens each."""
    rows = [
        row
        for batch in batches
        for row in (
            batch.input_ids.tolist()
            if batch.attention_mask is not None
            else batch.input_ids.view(-1, CUTOFF_LEN).tolist()
        )
    ]
    return [tuple(dict.fromkeys(token for token in row if token)) for row in rows]


def steps(loader: BatchLoader, num: int) -> list[list[tuple[int, ...]]]:
    return [contents(step) for step in islice(loader, num)]


@pytest.mark.parametrize("packing", [False, True])
def test_epoch_holds_every_sample_once(packing):
    loader = build_loader(packing=packing)
    epoch = steps(loader, loader.num_steps_per_epoch)
    assert loader.num_steps_per_epoch == -(-loader.num_rows // 8)
    assert Counter(index for step in epoch for row in step for index in row) == Counter(range(1, NUM_SAMPLES + 1))
    assert loader.epoch == 1
    again = steps(loader, loader.num_steps_per_epoch)
    assert sorted(sum(again, [])) == sorted(sum(epoch, []))
    assert again != epoch


def test_last_batch_is_filled_with_rows_without_loss():
    *_, last = islice(build_loader(), 3)
    assert len(last) == 4 and all(batch.input_ids.shape[0] == 2 for batch in last)
    assert sum(row == () for row in contents(last)) == 3 * 8 - NUM_SAMPLES
    assert int(count_loss_tokens(last[-1].labels)) == 0 and last[-1].document_lengths == ()


def test_packed_micro_batches_are_one_row():
    """In training and evaluation: flash attention finds packed documents in a batch of one row only."""
    sizes: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "cutoff_len": 8, "packing": True, "pad_token_id": 0}
    evaluation = EvalLoader(build_dataset(), micro_batch_size=4, **sizes)
    training = build_loader(packing=True, micro_batch_size=4)
    for batch in [*evaluation, *next(iter(training))]:
        assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (1, 4 * 8)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(2, 2), (4, 2), (2, 1), (8, 1)])
def test_global_batch_does_not_depend_on_ranks(packing, dp_size, micro_batch_size):
    one = steps(build_loader(packing=packing, micro_batch_size=8), 4)
    ranks = [
        build_loader(packing=packing, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    for number, per_rank in enumerate(zip(*(islice(rank, 4) for rank in ranks), strict=True)):
        assert {len(batches) for batches in per_rank} == {ranks[0].num_micro_batches}
        # round by round, rank by rank: exactly the order of the global batch
        in_order = [row for round_ in zip(*per_rank, strict=True) for row in contents(round_)]
        assert in_order == one[number]


def test_seed_fixes_the_order():
    assert steps(build_loader(), 5) == steps(build_loader(), 5)
    assert steps(build_loader(), 5) != steps(build_loader(seed=8), 5)
    # Pinned: a run resumed by a later version must see the order it left.
    assert steps(build_loader(), 1)[0] == [(3,), (5,), (12,), (13,), (15,), (6,), (8,), (19,)]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("num_done", [0, 1, 2, 3, 4])
def test_resume_equals_no_stop(packing, num_done):
    whole = steps(build_loader(packing=packing), 8)
    stopped = build_loader(packing=packing)
    steps(stopped, num_done)
    state = stopped.state_dict()
    resumed = build_loader(packing=packing)
    resumed.load_state_dict(state)
    assert steps(resumed, 8 - num_done) == whole[num_done:]
    # on two ranks, from the same state
    ranks = [build_loader(packing=packing, dp_rank=rank, dp_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    both = [contents(next(iter(rank))) for rank in ranks]
    assert sorted(sum(both, [])) == sorted(whole[num_done])


def test_state_inside_the_loop_is_the_next_step():
    loader = build_loader()
    whole = steps(build_loader(), 3)
    for number, step in enumerate(loader):
        assert contents(step) == whole[number]
        if number == 1:
            break
    resumed = build_loader()
    resumed.load_state_dict(loader.state_dict())
    assert steps(resumed, 1) == whole[2:]


def test_state_of_a_running_iterator_can_be_replaced():
    loader = build_loader()
    start = loader.state_dict()
    iterator = iter(loader)
    first = [contents(next(iterator)) for _ in range(4)]  # into the second epoch
    loader.load_state_dict(start)
    assert [contents(next(iterator)) for _ in range(4)] == first


def test_foreign_state_is_refused():
    loader = build_loader()
    with pytest.raises(ValueError, match="seed is 7 now and was 8"):
        loader.load_state_dict(build_loader(seed=8).state_dict())
    with pytest.raises(ValueError, match="packing is 0 now and was 1; num_rows is"):
        loader.load_state_dict(build_loader(packing=True).state_dict())


def test_the_state_of_datasets_in_another_order_is_refused():
    """Their samples, tokens and rows are as many, and even their lengths the same."""
    options: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 8, "dp_rank": 0, "dp_size": 1}
    options |= {"cutoff_len": CUTOFF_LEN, "packing": False, "pad_token_id": 0, "seed": 7}
    one, two = ([Sample(input_ids=[token] * 3, labels=[token] * 2 + [-100])] * 4 for token in (1, 2))
    state = BatchLoader(MixedDataset([one, two], None, seed=7), **options).state_dict()
    BatchLoader(MixedDataset([one, two], None, seed=7), **options).load_state_dict(state)
    with pytest.raises(
        ValueError, match="data position can't be resumed, the order of samples differs: samples_crc is"
    ):
        BatchLoader(MixedDataset([two, one], None, seed=7), **options).load_state_dict(state)


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"global_batch_size=9.* = 2 \* 2 = 4; the nearest is 8"):
        build_loader(global_batch_size=9, dp_size=2)
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        build_loader(micro_batch_size=0)
    with pytest.raises(ValueError, match="no sample"):
        EvalLoader([], micro_batch_size=1, dp_rank=0, dp_size=1, cutoff_len=8, packing=False, pad_token_id=0)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_eval_reads_everything_once(packing, dp_size):
    ranks = [
        EvalLoader(
            build_dataset(),
            micro_batch_size=2,
            dp_rank=rank,
            dp_size=dp_size,
            cutoff_len=CUTOFF_LEN,
            packing=packing,
            pad_token_id=0,
        )
        for rank in range(dp_size)
    ]
    for _ in range(2):  # the same at every evaluation
        per_rank = [list(rank) for rank in ranks]
        assert {len(batches) for batches in per_rank} == {len(ranks[0])}
        rows = [row for batches in per_rank for row in contents(batches)]
        assert Counter(index for row in rows for index in row) == Counter(range(1, NUM_SAMPLES + 1))
        assert sum(int(count_loss_tokens(batch.labels)) for batches in per_rank for batch in batches) == sum(
            sample.num_loss_tokens for sample in build_dataset()
        )
