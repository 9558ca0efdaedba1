"""From documents to rows, and from rows to a :class:`Batch`.

A *row* is a tuple of sample indices: one without packing, any number with it, none for a row that only fills up a
batch.

Packed, documents of 3, 2 and 7 tokens in two rows of 8: the rows of a micro-batch lie end to end, in one of 16::

    input_ids     a0 a1 a2 b0 b1  P  P  P | c0 c1 c2 c3 c4 c5 c6  P
    position_ids   0  1  2  0  1  0  1  2 |  0  1  2  3  4  5  6  0     each restart is a new document
    labels        a1 a2  .  b1  .  .  .  . | c1 c2 c3 c4 c5 c6  .  .    the last token of a never predicts b's first

No document attends to another. One row because with flash attention transformers looks for restarts in a batch of one
row only; in two rows, b would attend to a, without a word.

The padding of a row is one document of its own, with running positions. No padding could change what a real token sees
(it is another document); one document rather than one per pad token keeps the number of sequences small for kernels
that are given their boundaries.

Unpacked, a and b are two rows with a 2-D mask::

    input_ids     a0 a1 a2        attention_mask  1 1 1        position_ids  0 1 2
                  b0 b1  P                        1 1 0                      0 1 2

A row without any document attends to its first token: a mask of zeros only would leave softmax without an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.data.batch import IGNORE_INDEX, Batch, Sample, find_loss_positions

Row = tuple[int, ...]

NUM_OPEN_ROWS = 64
"""How many unfinished rows ``pack_rows`` keeps in view: enough that little is wasted, few enough to stay linear."""


class SampleSource(Protocol):
    """What the loaders read: a sized, indexable collection of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def pack_rows(lengths_tokens: Sequence[int], order: Sequence[int], row_len: int) -> list[Row]:
    """Group documents into rows of at most ``row_len`` tokens: best fit among the open rows, in the given order.

    A document goes to the fullest open row that has room, the oldest among equals; without one it opens a row, and when
    more than ``NUM_OPEN_ROWS`` are open, the oldest is closed. Rows come out in the order in which they were opened.

    Example: lengths 5, 6, 3, 2, order 0, 1, 2, 3, row_len 8: rows (0, 2) and (1, 3).

    Args:
        lengths_tokens: length of each document.
        order: indices of the documents to place, each once.
        row_len: tokens of a row; no document may be longer.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, int] = {}  # row -> tokens left, oldest first
    for index in order:
        length = lengths_tokens[index]
        assert 0 < length <= row_len, (index, length, row_len)
        fitting = [row for row, left in open_rows.items() if left >= length]
        if fitting:
            row = min(fitting, key=open_rows.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            open_rows[row] = row_len
            if len(open_rows) > NUM_OPEN_ROWS:
                del open_rows[next(iter(open_rows))]
        rows[row].append(index)
        open_rows[row] -= length
    return [tuple(row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How rows are made.

    Attributes:
        cutoff_len: longest document, and the length of a packed row, in tokens.
        packing: several documents per row.
        pad_token_id: any token of the vocabulary; it carries no loss.
        pad_to_multiple_of: row lengths are rounded up to this (context parallelism cuts rows in equal parts).
    """

    cutoff_len: int
    packing: bool
    pad_token_id: int
    pad_to_multiple_of: int = 1


def build_rows(samples: SampleSource, order: Sequence[int], options: RowOptions) -> list[Row]:
    """All documents as rows, in ``order``.

    Raises:
        ValueError: a document is empty or longer than ``cutoff_len``.
    """
    lengths = [len(samples[index]) for index in range(len(samples))]
    for index, length in enumerate(lengths):
        if not 0 < length <= options.cutoff_len:
            raise ValueError(
                f"sample {index} has {length} tokens: a row holds 1 to cutoff_len={options.cutoff_len}; "
                "build the dataset with the same cutoff_len as the loader"
            )
    return pack_rows(lengths, order, options.cutoff_len) if options.packing else [(index,) for index in order]


def collate(samples: SampleSource, rows: Sequence[Row], options: RowOptions) -> Batch:
    """One micro-batch of rows of S tokens: unpacked [len(rows), S], packed [1, len(rows) * S].

    S is the longest row's length, or ``cutoff_len`` where packed; rounded up to ``pad_to_multiple_of``.
    """
    longest = max((len(samples[index]) for row in rows for index in row), default=1)
    row_len = _round_up(options.cutoff_len if options.packing else longest, options.pad_to_multiple_of)
    input_ids, labels, positions, masks, is_real = [], [], [], [], []
    document_lengths: list[int] = []
    for row in rows:
        assert options.packing or len(row) <= 1, row
        documents = [samples[index] for index in row]
        lengths = [len(document) for document in documents]
        document_lengths += lengths
        num_real = sum(lengths)
        num_pad = row_len - num_real
        assert num_pad >= 0, (row, num_real, row_len)
        input_ids.append([token for document in documents for token in document.input_ids])
        input_ids[-1] += [options.pad_token_id] * num_pad
        labels.append([label for document in documents for label in document.labels] + [IGNORE_INDEX] * num_pad)
        is_real.append([True] * num_real + [False] * num_pad)
        if options.packing:
            positions.append([position for length in [*lengths, num_pad] for position in range(length)])
        else:
            positions.append(list(range(row_len)))
            num_seen = max(num_real, 1)
            masks.append([1] * num_seen + [0] * (row_len - num_seen))
    shape = (1, -1) if options.packing else (len(rows), row_len)
    all_labels = torch.tensor(labels, dtype=torch.int64).view(shape)
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64).view(shape),
        labels=all_labels,
        loss_positions=find_loss_positions(all_labels),
        position_ids=torch.tensor(positions, dtype=torch.int64).view(shape),
        attention_mask=None if options.packing else torch.tensor(masks, dtype=torch.int64),
        is_real=torch.tensor(is_real, dtype=torch.bool).view(shape),
        document_lengths=tuple(document_lengths),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
