"""Several datasets in given proportions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data import MixedDataset, Sample
from moesaic.data.mixing import choose_next, count_samples

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)
WEIGHTS = st.floats(0.05, 20)


def build_set(name, size):
    return [Sample(input_ids=[name, index], labels=[index, -100]) for index in range(size)]


@given(st.data(), SIZES)
def test_an_epoch_reads_everything_at_the_given_proportions(data, sizes):
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    mixed = MixedDataset([build_set(name, size) for name, size in enumerate(sizes)], weights, seed=1)
    counts = Counter(tuple(mixed[index].input_ids) for index in range(len(mixed)))
    per_set = [sum(n for (name, _), n in counts.items() if name == number) for number in range(len(sizes))]
    assert per_set == list(mixed.counts)
    for name, size in enumerate(sizes):
        times = [counts[name, index] for index in range(size)]
        assert min(times) >= 1 and max(times) - min(times) <= 1
    total = len(mixed)
    for count, weight in zip(per_set, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= len(sizes)
    assert any(count == size for count, size in zip(per_set, sizes, strict=True))  # no longer than it must be


def test_example_of_the_module():
    assert count_samples([100, 150], [0.5, 0.5]) == [150, 150]
    assert count_samples([100, 150], [2, 1]) == [300, 150]


def test_without_weights_one_after_another():
    mixed = MixedDataset([build_set(0, 2), build_set(1, 3)], None, seed=1)
    assert [tuple(mixed[index].input_ids) for index in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_seed_chooses_what_comes_twice():
    def twice(seed):
        mixed = MixedDataset([build_set(0, 100), build_set(1, 150)], [1, 1], seed)
        return [key for key, n in Counter(tuple(mixed[i].input_ids) for i in range(len(mixed))).items() if n == 2]

    assert len(twice(1)) == 50 and twice(1) == twice(1) != twice(2)


@pytest.mark.parametrize(("sizes", "weights"), [([0, 3], [1, 1]), ([3, 3], [1, 0]), ([3, 3], [1, -1])])
def test_nothing_to_mix_is_refused(sizes, weights):
    with pytest.raises(ValueError, match="remove"):
        count_samples(sizes, weights)


@given(st.lists(WEIGHTS, min_size=1, max_size=4), st.integers(1, 200))
def test_a_stream_is_never_far_off_its_shares(weights, num_rows):
    taken = [0] * len(weights)
    for _ in range(num_rows):
        taken[choose_next(taken, weights)] += 1
        for count, weight in zip(taken, weights, strict=True):
            assert abs(count - sum(taken) * weight / sum(weights)) < len(weights)
