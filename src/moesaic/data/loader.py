"""Which rank trains on which rows, and when.

The order of an epoch is a shuffle of all rows by (seed, epoch), the same on every rank and for every ``dp_size``.
Global batch g takes the next ``global_batch_size`` rows of it; each rank takes its micro-batches from there. Two dp
ranks, micro-batches of 2, global batch 8, an order that starts 5 9 2 7 0 3 8 1::

    rank 0:  [5 9] [0 3]        rank 1:  [2 7] [8 1]        one rank:  [5 9] [2 7] [0 3] [8 1]

The last global batch of an epoch is filled up with rows that carry no loss, so that nothing is dropped and every rank
runs the same number of micro-batches. The loss is a sum over the global count of tokens, so such rows don't weigh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from moesaic.data.batch import Batch
from moesaic.data.mixing import shuffle_indices
from moesaic.data.order import StepOrder, refuse_empty
from moesaic.data.packing import Row, RowOptions, SampleSource, build_rows, collate

T = TypeVar("T")

EMPTY_ROW: Row = ()


class BatchLoader:
    """Endless iterator over optimizer steps: each item is this dp rank's list of micro-batches of one step.

    All ranks with the same ``dp_rank`` (cp and tp peers) get equal batches. Nothing is communicated. With packing,
    documents are packed once and the rows are shuffled anew in each epoch, so every epoch has ``num_steps_per_epoch``
    steps.

    Args:
        dataset: sized, indexable, gives :class:`Sample`; equal on all ranks.
        micro_batch_size: rows per micro-batch and rank; packed, they lie end to end (``packing``).
        global_batch_size: rows per optimizer step over all dp ranks; a multiple of ``micro_batch_size * dp_size``.
        dp_rank, dp_size: this rank's place on the dp axis.
        cutoff_len, packing, pad_token_id, pad_to_multiple_of: see :class:`RowOptions`.
        seed: the shuffle's.

    Raises:
        ValueError: sizes that don't divide, an empty dataset, or a document longer than ``cutoff_len``.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        packing: bool,
        pad_token_id: int,
        seed: int,
        pad_to_multiple_of: int = 1,
    ) -> None:
        refuse_empty(dataset)
        check_sizes(micro_batch_size, dp_rank, dp_size, global_batch_size)
        self._dataset = dataset
        self._options = RowOptions(
            cutoff_len=cutoff_len, packing=packing, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        # Packing needs an order of its own: in file order, rows would be made of neighbours in the file.
        order = shuffle_indices(len(dataset), f"{seed}/pack") if packing else range(len(dataset))
        self._rows = build_rows(dataset, order, self._options)
        self._order = StepOrder(
            dataset,
            num_rows=len(self._rows),
            rows_per_step=global_batch_size,
            seed=seed,
            packing=packing,
            cutoff_len=cutoff_len,
        )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch: samples, or packed rows."""
        return len(self._rows)

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch: ceil(num_rows / global_batch_size)."""
        return self._order.num_steps_per_epoch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and rank: global_batch_size / (micro_batch_size * dp_size)."""
        return self._global_batch_size // (self._micro_batch_size * self._dp_size)

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._order.epoch

    def __iter__(self) -> Iterator[list[Batch]]:
        """Go on from the current position, without end.

        The position moves before a step is handed out: a state saved while the caller works on step k resumes at k + 1.
        """
        for numbers in self._order:
            rows = [self._rows[number] for number in numbers]
            rows += [EMPTY_ROW] * (self._global_batch_size - len(rows))
            yield [
                collate(self._dataset, own, self._options)
                for own in own_rows(rows, self._micro_batch_size, self._dp_rank, self._dp_size)
            ]

    def state_dict(self) -> dict[str, int]:
        """Position of the next step, equal on all ranks, and what fixes the order: it resumes on any dp size."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the step at which ``state`` was taken.

        ``dp_size``, ``micro_batch_size`` and ``global_batch_size`` may have changed: the position counts rows.

        Raises:
            ValueError: the state belongs to other data or another order (seed, samples, packing, cutoff_len).
        """
        self._order.load_state_dict(state)


class EvalLoader:
    """The whole set once per iteration, in its own order: this dp rank's micro-batches, equally many on every rank.

    Rows that fill up the last round carry no loss, so sum of losses / sum of tokens over the ranks is the held-out
    loss, whatever ``dp_size`` and ``micro_batch_size``. Arguments and errors as in :class:`BatchLoader`.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        packing: bool,
        pad_token_id: int,
        pad_to_multiple_of: int = 1,
    ) -> None:
        refuse_empty(dataset)
        check_sizes(micro_batch_size, dp_rank, dp_size)
        self._dataset = dataset
        self._options = RowOptions(
            cutoff_len=cutoff_len, packing=packing, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        rows = build_rows(dataset, range(len(dataset)), self._options)
        rows += [EMPTY_ROW] * (-len(rows) % (micro_batch_size * dp_size))
        self._own_rows = own_rows(rows, micro_batch_size, dp_rank, dp_size)

    def __len__(self) -> int:
        """Micro-batches per rank."""
        return len(self._own_rows)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._own_rows:
            yield collate(self._dataset, rows, self._options)


def own_rows(rows: Sequence[T], micro_batch_size: int, dp_rank: int, dp_size: int) -> list[Sequence[T]]:
    """Rank r's micro-batches: in each round of ``dp_size`` micro-batches, the r-th (the module's example)."""
    assert len(rows) % (micro_batch_size * dp_size) == 0, (len(rows), micro_batch_size, dp_size)
    starts = range(dp_rank * micro_batch_size, len(rows), micro_batch_size * dp_size)
    return [rows[start : start + micro_batch_size] for start in starts]


def check_sizes(micro_batch_size: int, dp_rank: int, dp_size: int, global_batch_size: int | None = None) -> None:
    """Refuse sizes that don't divide.

    Raises:
        ValueError: with the nearest that does.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size}: must be at least 1")
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    per_round = micro_batch_size * dp_size
    if global_batch_size is not None and (global_batch_size < 1 or global_batch_size % per_round):
        nearest = max(1, round(global_batch_size / per_round)) * per_round
        raise ValueError(
            f"global_batch_size={global_batch_size}: must be a multiple of micro_batch_size * dp_size = "
            f"{micro_batch_size} * {dp_size} = {per_round}; the nearest is {nearest}"
        )
