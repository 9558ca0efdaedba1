"""Micro-batches by tokens: a step's samples spread evenly over the ranks, end to end, without padding.

A step is the next ``global_batch_size`` samples of the epoch's order, whatever the ranks. They are cut into micro-
batches of at most ``micro_batch_tokens`` tokens; round k of a step is every dp rank's k-th micro-batch. Ranks wait for
each other in each round, as parameters are gathered and tokens exchanged there, so a step takes the sum over rounds of
the slowest micro-batch's time. Hence, in this order:

- as few rounds as the budget allows;
- in all micro-batches about equally many tokens, which is what most of the work is proportional to, and memory: the
  longest samples first, each to the micro-batch that has fewest (LPT). Where that exceeds the budget and best fit
  doesn't, best fit: a round less is worth more than evenness;
- in each round micro-batches of about equal attention, whose work is a document's length squared: sorted by that. What
  a token costs in attention, relative to the rest, needn't be known for it.

Budget 8, two ranks, samples of 7 5 3 3 2 2 1 tokens: 23 in two rounds::

    round 0    rank 0  [7]        rank 1  [5 1]        squares 49 and 26
    round 1    rank 0  [3 2]      rank 1  [3 2]                13 and 13

Every rank computes this for all ranks from the lengths, which it knows; nothing is communicated. Where there are fewer
samples than micro-batches in a round, the last ranks get empty ones, a padding token without loss, so that all ranks
run equally many.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from moesaic.data.batch import Batch
from moesaic.data.order import StepOrder, refuse_empty
from moesaic.data.packing import Row, RowOptions, SampleSource, collate, pack_rows


def cut_step(lengths_tokens: Sequence[int], step: Iterable[int], dp_size: int, max_tokens: int) -> list[list[Row]]:
    """Micro-batches of one step: ``[round][dp rank]`` rows of samples, some of them perhaps empty.

    The same for any order of ``step`` but for which of two equally long samples goes where.

    Args:
        lengths_tokens: length of each sample.
        step: indices of the step's samples, each once; at least one.
        dp_size: micro-batches of a round.
        max_tokens: of one micro-batch; no sample may be longer.
    """
    longest_first = sorted(step, key=lengths_tokens.__getitem__, reverse=True)
    assert longest_first, "a step has at least one sample"
    rows = pack_rows(lengths_tokens, longest_first, max_tokens)
    num_tokens = sum(lengths_tokens[index] for index in longest_first)
    # Between what the tokens need (two samples above half the budget share no row) and what best fit takes, by halves:
    # with more rows an even spread fits more easily, so few numbers are tried however large the step.
    num_large = sum(2 * lengths_tokens[index] > max_tokens for index in longest_first)
    fewest = max(-(-num_tokens // (max_tokens * dp_size)), -(-num_large // dp_size))
    most = -(-len(rows) // dp_size)
    while fewest <= most:
        num_rounds = (fewest + most) // 2
        even = _spread(lengths_tokens, longest_first, num_rounds * dp_size)
        if max(sum(lengths_tokens[index] for index in row) for row in even) <= max_tokens:
            rows, most = even, num_rounds - 1
        else:
            fewest = num_rounds + 1
    num_squares = {row: sum(lengths_tokens[index] ** 2 for index in row) for row in rows}
    rows.sort(key=num_squares.__getitem__, reverse=True)
    rows += [()] * (-len(rows) % dp_size)
    rounds = [rows[first : first + dp_size] for first in range(0, len(rows), dp_size)]
    # The heaviest of a round is rank 0's, then the last rank's: their sums over the step are closer to each other.
    return [round_[::-1] if number % 2 else round_ for number, round_ in enumerate(rounds)]


def _spread(lengths_tokens: Sequence[int], longest_first: Sequence[int], num_rows: int) -> list[Row]:
    """Each sample to the row with the fewest tokens so far, the first of equals."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, number) for number in range(num_rows)]
    for index in longest_first:
        num_tokens, number = heap[0]
        rows[number].append(index)
        heapq.heapreplace(heap, (num_tokens + lengths_tokens[index], number))
    return [tuple(row) for row in rows]


class TokenBatchLoader:
    """Endless iterator over optimizer steps: each item is this dp rank's list of micro-batches of one step.

    As :class:`BatchLoader` without packing, from whose position it can go on: the samples of each step are the same,
    but for the last of an epoch, which is not filled up. How many micro-batches a step has differs from step to step,
    never between ranks. All ranks with the same ``dp_rank`` (cp and tp peers) get equal batches.

    Args:
        dataset: sized, indexable, gives :class:`Sample`; equal on all ranks.
        micro_batch_tokens: most tokens of one micro-batch, [1, S], padding to ``pad_to_multiple_of`` included.
        global_batch_size: samples per optimizer step over all dp ranks.
        dp_rank, dp_size: this rank's place on the dp axis.
        cutoff_len, pad_token_id, pad_to_multiple_of: see :class:`RowOptions`.
        seed: the shuffle's.

    Raises:
        ValueError: an empty dataset, or a sample longer than ``cutoff_len`` or ``micro_batch_tokens``.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_tokens: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        pad_token_id: int,
        seed: int,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self._cutter = _Cutter(
            dataset,
            micro_batch_tokens=micro_batch_tokens,
            dp_rank=dp_rank,
            dp_size=dp_size,
            cutoff_len=cutoff_len,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self._order = StepOrder(
            dataset,
            num_rows=len(dataset),
            rows_per_step=global_batch_size,
            seed=seed,
            packing=False,
            cutoff_len=cutoff_len,
        )

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch: ceil(samples / global_batch_size)."""
        return self._order.num_steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._order.epoch

    def __iter__(self) -> Iterator[list[Batch]]:
        """Go on from the current position, without end; see ``StepOrder``."""
        for step in self._order:
            yield [self._cutter.collate(row) for row in self._cutter.own_rows(step)]

    def state_dict(self) -> dict[str, int]:
        """Position of the next step, equal on all ranks, and what fixes the order: it resumes on any dp size."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the step at which ``state`` was taken.

        ``dp_size``, ``micro_batch_tokens`` and ``global_batch_size`` may have changed: the position counts samples.

        Raises:
            ValueError: the state belongs to other data or another order (seed, samples, packing, cutoff_len).
        """
        self._order.load_state_dict(state)


class TokenEvalLoader:
    """The whole set once per iteration, cut as one step: as :class:`EvalLoader`, in micro-batches by tokens.

    Arguments and errors as in :class:`TokenBatchLoader`.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_tokens: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        pad_token_id: int,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self._cutter = _Cutter(
            dataset,
            micro_batch_tokens=micro_batch_tokens,
            dp_rank=dp_rank,
            dp_size=dp_size,
            cutoff_len=cutoff_len,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self._own_rows = self._cutter.own_rows(range(len(dataset)))

    def __len__(self) -> int:
        """Micro-batches per rank."""
        return len(self._own_rows)

    def __iter__(self) -> Iterator[Batch]:
        for row in self._own_rows:
            yield self._cutter.collate(row)


class _Cutter:
    """A dp rank's share of any samples of a dataset; arguments and errors as in :class:`TokenBatchLoader`."""

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_tokens: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        pad_token_id: int,
        pad_to_multiple_of: int,
    ) -> None:
        refuse_empty(dataset)
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        # Rows are rounded up to the multiple, and must be within the budget even then.
        self._max_tokens = micro_batch_tokens // pad_to_multiple_of * pad_to_multiple_of
        self._dataset = dataset
        self._lengths = array("i", (len(dataset[index]) for index in range(len(dataset))))
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._pad_token_id, self._pad_to_multiple_of = pad_token_id, pad_to_multiple_of
        longest = min(cutoff_len, self._max_tokens)
        for index, length in enumerate(self._lengths):
            if not 0 < length <= longest:
                raise ValueError(
                    f"sample {index} has {length} tokens: a micro-batch holds 1 to {longest} of one sample "
                    f"(cutoff_len={cutoff_len}, micro_batch_tokens={micro_batch_tokens} in multiples of "
                    f"{pad_to_multiple_of}); build the dataset with the same cutoff_len, or raise micro_batch_tokens"
                )

    def own_rows(self, samples: Iterable[int]) -> list[Row]:
        """This rank's row of each round."""
        rounds = cut_step(self._lengths, samples, self._dp_size, self._max_tokens)
        return [rows[self._dp_rank] for rows in rounds]

    def collate(self, row: Row) -> Batch:
        """[1, S] of one row; S is its own length, rounded up, and at least one token."""
        num_tokens = sum(self._lengths[index] for index in row)
        options = RowOptions(
            cutoff_len=max(1, num_tokens),
            packing=True,
            pad_token_id=self._pad_token_id,
            pad_to_multiple_of=self._pad_to_multiple_of,
        )
        return collate(self._dataset, [row], options)
