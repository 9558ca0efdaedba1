"""The order in which an epoch's rows are trained on, and the place in it: the same on every rank.

An epoch is a shuffle of all rows by (seed, epoch); each optimizer step takes the next ``rows_per_step`` of it, the last
step of an epoch what is left. How a step's rows are given to ranks and micro-batches is the loaders' business, so a
place in the order is one on any number of ranks, and for any loader of the same rows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping

from moesaic.data.mixing import shuffle_indices
from moesaic.data.packing import SampleSource


class StepOrder:
    """Endless iterator over optimizer steps: each item is the numbers of a step's rows, ``rows_per_step`` or fewer.

    Args:
        dataset: not empty; equal on all ranks.
        num_rows: rows of an epoch, made of all samples.
        rows_per_step: of one optimizer step over all ranks.
        seed: the shuffle's.
        packing, cutoff_len: how the rows were made; a place among rows that were made in another way is refused.
    """

    def __init__(
        self, dataset: SampleSource, *, num_rows: int, rows_per_step: int, seed: int, packing: bool, cutoff_len: int
    ) -> None:
        assert num_rows >= 1 and rows_per_step >= 1, (num_rows, rows_per_step)
        self._num_rows = num_rows
        self._rows_per_step = rows_per_step
        self._identity = {
            "seed": seed,
            "packing": int(packing),
            "cutoff_len": cutoff_len,
            "num_samples": len(dataset),
            "num_tokens": sum(len(dataset[index]) for index in range(len(dataset))),
            "num_rows": num_rows,
            "samples_crc": _crc_of(dataset),
        }
        self._epoch = 0
        self._index = 0

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch: ceil(num_rows / rows_per_step)."""
        return -(-self._num_rows // self._rows_per_step)

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Go on from the current position, without end.

        The position moves before a step is handed out: a state saved while the caller works on step k resumes at k + 1.
        """
        while True:
            epoch = self._epoch
            order = shuffle_indices(self._num_rows, f"{self._identity['seed']}/{epoch}")
            # A load_state_dict between two steps may change the epoch; the order is then drawn again.
            while self._epoch == epoch:
                numbers = order[self._index : self._index + self._rows_per_step]
                self._index += self._rows_per_step
                if self._index >= len(order):
                    self._epoch, self._index = epoch + 1, 0
                yield numbers

    def state_dict(self) -> dict[str, int]:
        """Position of the next step, equal on all ranks, and what fixes the order: it resumes on any dp size."""
        return {"epoch": self._epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the step at which ``state`` was taken; the position counts rows.

        Raises:
            ValueError: the state belongs to other data or another order (seed, samples, packing, cutoff_len).
        """
        require_same_order(self._identity, state)
        self._epoch, self._index = state["epoch"], state["index"]


def require_same_order(identity: Mapping[str, int], state: Mapping[str, int]) -> None:
    """Refuse a saved position of samples in another order; ``identity`` is what fixes the order now.

    Raises:
        ValueError: with everything that differs.
    """
    changed = [
        f"{field} is {value} now and was {state.get(field)}"
        for field, value in identity.items()
        if state.get(field) != value
    ]
    if changed:
        raise ValueError(
            f"data position can't be resumed, the order of samples differs: {'; '.join(changed)}; "
            "use the saved run's data settings, or start from the saved weights without its data position"
        )


def refuse_empty(dataset: SampleSource) -> None:
    """Refuse a dataset of no samples.

    Raises:
        ValueError: it is empty.
    """
    if len(dataset) == 0:
        raise ValueError("the dataset has no sample: nothing to train or evaluate on")


def _crc_of(dataset: SampleSource) -> int:
    """Of all tokens in order: counts alone would take datasets in another order for the same."""
    crc = 0
    for index in range(len(dataset)):
        crc = zlib.crc32(array("i", dataset[index].input_ids), crc)
    return crc
