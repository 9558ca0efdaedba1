"""Several datasets as one, in given proportions.

Without weights they are simply one after another. With weights an epoch is as long as it takes for every dataset to be
read at least once at those proportions, so that the smaller ones (for their weight) are read again: what
``datasets.interleave_datasets`` calls ``all_exhausted``, but in exact numbers instead of by draws. Example::

    samples        weights      an epoch
    A 100          0.5          150 of A: all once, and 50 of them twice
    B 150          0.5          150 of B: all once

Weights count samples, not tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from moesaic.data.batch import Sample
from moesaic.data.packing import SampleSource


class MixedDataset:
    """The samples of an epoch over several datasets; which ones come more often is fixed by ``seed``.

    Args:
        datasets: none empty.
        weights: relative, all above 0, one per dataset; None: each dataset once.
        seed: chooses the samples that are read once more than others.
    """

    def __init__(self, datasets: Sequence[SampleSource], weights: Sequence[float] | None, seed: int) -> None:
        self._datasets = tuple(datasets)
        sizes = [len(dataset) for dataset in datasets]
        self.counts = tuple(sizes if weights is None else count_samples(sizes, weights))
        self._places: list[tuple[int, int]] = []
        for number, (size, count) in enumerate(zip(sizes, self.counts, strict=True)):
            passes, rest = divmod(count, size)
            again = sorted(shuffle_indices(size, f"{seed}/mix/{number}")[:rest])
            self._places += [(number, index) for index in [*list(range(size)) * passes, *again]]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        number, inner = self._places[index]
        return self._datasets[number][inner]


def count_samples(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in an epoch: at least its size, in the proportions of ``weights``, rounded.

    Example: sizes 100, 150, weights 0.5, 0.5 make 150, 150; weights 2, 1 make 300, 150.

    Raises:
        ValueError: a dataset is empty, or a weight isn't above 0.
    """
    if min(sizes) < 1:
        raise ValueError(f"a mixture has an empty dataset: sizes {list(sizes)}; remove it")
    if min(weights) <= 0:
        raise ValueError(f"weights {list(weights)}: must all be above 0; remove a dataset that shouldn't be read")
    exact = [Fraction(weight) for weight in weights]
    per_weight = max(size / weight for size, weight in zip(sizes, exact, strict=True))
    return [round(per_weight * weight) for weight in exact]


def choose_next(taken: Sequence[int], weights: Sequence[float]) -> int:
    """Which dataset a stream reads next: the one that is furthest behind its share; the first of equals.

    After any number of rows, each dataset is less than about one row off its share.
    """
    total, whole = sum(taken) + 1, sum(weights)
    behind = [weight / whole * total - count for weight, count in zip(weights, taken, strict=True)]
    return behind.index(max(behind))


def shuffle_indices(num: int, key: str) -> list[int]:
    """0..num-1 shuffled by ``key``. Sorting by ``random()`` because that stream, unlike ``shuffle``'s use of it, is
    promised to stay the same in later Pythons: a resumed run must see the order it left."""
    stream = random.Random(key)
    draws = [stream.random() for _ in range(num)]
    return sorted(range(num), key=draws.__getitem__)
