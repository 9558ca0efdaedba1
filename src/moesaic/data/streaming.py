"""Training on sources that are never read as a whole.

Rows of the sources come in one global order, the same on every rank and for every ``dp_size``: endless passes over each
source, mixed by ``mixing.choose_next``. ``buffer_size`` of them at a time make a block, which is shuffled by (seed,
block number); rows of batches are taken from block after block. A position is therefore a few numbers: where each
source stood when the block began, and how far the block has been used. Resuming reads that block again, and nothing
has to be saved of what was in a buffer.

What a rank tokenizes depends on how rows are made:

- one row of a batch per row of the source (``sft`` without packing): only this rank's share. A bad sample leaves its
  row of the batch without loss, as otherwise only the rank that tokenized it would know that everybody moves up.
- otherwise (packing, or documents that may be split) a block's rows follow from all lengths: every rank tokenizes the
  block. Bad samples are left out.

A source of which a rank meets only bad rows ends the run: it would train on nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from moesaic.data.batch import Batch, Sample
from moesaic.data.dataset import describe_masking
from moesaic.data.encode import RowEncoder, Stage, build_row_encoder, columns_of, unused_columns
from moesaic.data.formats import SampleError
from moesaic.data.loader import EMPTY_ROW, check_sizes, own_rows
from moesaic.data.mixing import choose_next, shuffle_indices
from moesaic.data.order import require_same_order
from moesaic.data.packing import Row, RowOptions, build_rows, collate
from moesaic.data.row_stream import RowStream, open_stream

NUM_REASONS = 3
"""Bad rows that an error names."""

NUM_PROBED = 100
"""Rows of a source that are looked at to tell its columns."""

MIN_BAD_RUN = 100
"""So many bad rows in a row, at least, end a run: with a small buffer a few may come together by chance."""


@dataclass(frozen=True, slots=True)
class StreamedBadSample:
    """A row that isn't trained on: its source, its index there, and why."""

    source: str
    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """One source of a stream.

    Attributes:
        name: in messages: its path.
        rows: its rows.
        encoder: how they become samples.
        weight: its share of the rows over the sum of all weights.
        split: which part of ``name`` it is.
        unused_columns: columns of its first rows that the format doesn't read.
    """

    name: str
    rows: RowStream
    encoder: RowEncoder
    weight: float = 1.0
    split: str = "train"
    unused_columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What a run logs: as of a ``DataReport``, but for what takes reading the source to its end."""
        lines = [
            f"{self.name}: streamed, so nothing is counted; format {self.encoder.format_name}",
            f"  {describe_masking(self.encoder.masking)}",
        ]
        if self.unused_columns:
            lines.append(f"  columns of its first rows not used: {', '.join(self.unused_columns)}")
        return "\n".join(lines)


def build_stream_source(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    stage: Stage = "sft",
    split: str = "train",
    format_name: str = "auto",
    weight: float = 1.0,
) -> StreamSource:
    """Open a source and tell its format from the columns of its first ``NUM_PROBED`` rows.

    Raises:
        ValueError: it can't be read, is empty, its format isn't known, or all of its first ``NUM_PROBED`` rows are bad.
    """
    rows = open_stream(source, split=split)
    first = list(islice(rows.read_from(0), NUM_PROBED))
    if not first:
        raise ValueError(f"dataset {source!r} is empty")
    columns = columns_of(first)
    encoder = build_row_encoder(stage, tokenizer, cutoff_len, columns=columns, format_name=format_name)
    _refuse_all_bad(source, first, encoder)
    unused = unused_columns(columns, encoder)
    return StreamSource(name=source, rows=rows, encoder=encoder, weight=weight, split=split, unused_columns=unused)


def _refuse_all_bad(source: str, first: Sequence[Any], encoder: RowEncoder) -> None:
    run = _BadRun()
    for index, row in enumerate(first):
        try:
            encoder.encode(row)
        except SampleError as error:
            run.add(index, str(error))
        else:
            return
    raise run.error(source, f"all of its first {len(first)} rows")


@dataclass(slots=True)
class _BadRun:
    """Rows of a source that were bad since the last good one: their indices, and what the first of them said."""

    indices: set[int] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def add(self, index: int, reason: str) -> None:
        if index not in self.indices and len(self.reasons) < NUM_REASONS:
            self.reasons.append(f"row {index}: {reason}")
        self.indices.add(index)

    def error(self, source: str, rows: str) -> ValueError:
        return ValueError(
            f"dataset {source!r}: {rows} are bad ({'; '.join(self.reasons)}), so nothing would be trained; correct the "
            "rows, set `format` or `cutoff_len` to what fits them, or remove the dataset"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a source stands: passes done, and the next row of this one."""

    num_passes: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class _Raw:
    """A row before it is tokenized."""

    source: int
    index: int
    row: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """What a resumed run needs.

    Attributes:
        block: number of the block.
        num_rows: rows of batches already taken from it.
        taken: rows that each source has given to earlier blocks; what mixing goes by.
        places: where each source stood when the block began.
    """

    block: int
    num_rows: int
    taken: tuple[int, ...]
    places: tuple[_Place, ...]


class StreamLoader:
    """Endless iterator over optimizer steps of a stream, as :class:`BatchLoader` is of a dataset in memory.

    Args:
        sources: at least one.
        buffer_size: rows of the sources in a block: what is shuffled together, and what is held in memory.
        on_bad_sample: told of each bad sample when it is met, by the ranks that tokenize it; a pass, or a resumed run,
            meets it again.
        micro_batch_size, global_batch_size, dp_rank, dp_size, packing, seed and the others: see :class:`BatchLoader`.

    Raises:
        ValueError: sizes that don't divide; from a step: a whole pass over a source, or as many of its rows one after
            another as this rank has in a block (and no fewer than ``MIN_BAD_RUN``), were bad.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        *,
        buffer_size: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        cutoff_len: int,
        packing: bool,
        pad_token_id: int,
        seed: int,
        stage: Stage = "sft",
        pad_to_multiple_of: int = 1,
        on_bad_sample: Callable[[StreamedBadSample], None] = lambda _: None,
    ) -> None:
        assert sources and buffer_size >= 1, (len(sources), buffer_size)
        check_sizes(micro_batch_size, dp_rank, dp_size, global_batch_size)
        self._sources = tuple(sources)
        self._buffer_size = buffer_size
        self._options = RowOptions(
            cutoff_len=cutoff_len, packing=packing, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._seed = seed
        self._stage = stage
        self._on_bad_sample = on_bad_sample
        self._bad_runs = [_BadRun() for _ in self._sources]
        self._sizes: dict[int, int] = {}  # rows of a source, by its number, once it has been read to its end
        self._position = self._start()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and rank: global_batch_size / (micro_batch_size * dp_size)."""
        return self._global_batch_size // (self._micro_batch_size * self._dp_size)

    @property
    def epoch(self) -> int:
        """Whole passes over every source done when the next step's block began, from 0."""
        return min(place.num_passes for place in self._position.places)

    def __iter__(self) -> Iterator[list[Batch]]:
        """Go on from the current position, without end. The position moves before a step is handed out."""
        while True:
            began = self._position
            for step, position in self._steps(began):
                self._position = position
                yield step
                if self._position is not position:  # a load_state_dict between two steps
                    break

    def state_dict(self) -> dict[str, int]:
        """Position of the next step, equal on all ranks: it resumes on any dp size."""
        position = self._position
        state = {"block": position.block, "num_rows": position.num_rows, **self._identity()}
        for number, (taken, place) in enumerate(zip(position.taken, position.places, strict=True)):
            state |= {f"taken_{number}": taken, f"passes_{number}": place.num_passes, f"index_{number}": place.index}
        return state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the step at which ``state`` was taken, on any sizes of ranks and batches.

        Raises:
            ValueError: the state belongs to other sources or another order.
        """
        require_same_order(self._identity(), state)
        numbers = range(len(self._sources))
        self._position = _Position(
            block=state["block"],
            num_rows=state["num_rows"],
            taken=tuple(state[f"taken_{number}"] for number in numbers),
            places=tuple(_Place(state[f"passes_{number}"], state[f"index_{number}"]) for number in numbers),
        )

    def _start(self) -> _Position:
        count = len(self._sources)
        return _Position(block=0, num_rows=0, taken=(0,) * count, places=(_Place(),) * count)

    def _identity(self) -> dict[str, int]:
        """What fixes the order. Sources go by file name, split, format and weight: a moved folder is the same."""
        names = [
            f"{Path(source.name).name} {source.split} {source.encoder.format_name} {source.weight}"
            for source in self._sources
        ]
        return {
            "seed": self._seed,
            "packing": int(self._options.packing),
            "cutoff_len": self._options.cutoff_len,
            "buffer_size": self._buffer_size,
            "num_sources": len(self._sources),
            "sources": zlib.crc32("\n".join(names).encode()),
        }

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _steps(self, position: _Position) -> Iterator[tuple[list[Batch], _Position]]:
        """Steps from ``position`` on, each with the position after it."""
        readers = [self._read(number, place) for number, place in enumerate(position.places)]
        waiting: list[tuple[_Block, Row]] = []
        while True:
            while len(waiting) < self._global_batch_size:
                block, position = self._next_block(readers, position)
                waiting += [(block, row) for row in block.rows[block.position.num_rows :]]
            taken, waiting = waiting[: self._global_batch_size], waiting[self._global_batch_size :]
            own = own_rows(taken, self._micro_batch_size, self._dp_rank, self._dp_size)
            yield [self._collate(rows) for rows in own], self._position_before(waiting, position)

    def _position_before(self, waiting: Sequence[tuple[_Block, Row]], after: _Position) -> _Position:
        """The position of the first waiting row; ``after`` the last block where none waits."""
        if not waiting:
            return after
        block = waiting[0][0]
        left = sum(other is block for other, _ in waiting)
        return replace(block.position, num_rows=len(block.rows) - left)

    def _next_block(
        self, readers: Sequence[Iterator[tuple[_Raw, _Place]]], began: _Position
    ) -> tuple[_Block, _Position]:
        """The block at ``began``, and the position after it."""
        taken, places, raw = list(began.taken), list(began.places), []
        weights = [source.weight for source in self._sources]
        for _ in range(self._buffer_size):
            number = choose_next(taken, weights)
            one, places[number] = next(readers[number])
            taken[number] += 1
            raw.append(one)
        order = shuffle_indices(len(raw), f"{self._seed}/block/{began.block}")
        block = self._build_block([raw[index] for index in order], began)
        return block, _Position(block=began.block + 1, num_rows=0, taken=tuple(taken), places=tuple(places))

    def _build_block(self, raw: list[_Raw], began: _Position) -> _Block:
        if self._stage == "sft" and not self._options.packing:
            return _Block(position=began, raw=raw, samples=[], rows=[(index,) for index in range(len(raw))])
        samples = [sample for one in raw for sample in self._encode(one)]
        rows = build_rows(samples, range(len(samples)), self._options)
        return _Block(position=began, raw=[], samples=samples, rows=rows)

    def _read(self, number: int, place: _Place) -> Iterator[tuple[_Raw, _Place]]:
        """Endless passes over one source, each row with the place after it."""
        num_passes, index = place.num_passes, place.index
        while True:
            for row in self._sources[number].rows.read_from(index):
                index += 1
                yield _Raw(number, index - 1, row), _Place(num_passes, index)
            if index == 0:
                raise ValueError(f"dataset {self._sources[number].name!r} is empty")
            self._sizes[number] = index
            num_passes, index = num_passes + 1, 0

    # --- rows to batches ---------------------------------------------------------------------------------------------

    def _collate(self, rows: Sequence[tuple[_Block, Row]]) -> Batch:
        """A micro-batch of this rank's own rows, tokenized here where their block wasn't."""
        samples: list[Sample] = []
        own: list[Row] = []
        for block, row in rows:
            documents = [block.samples[index] for index in row] if block.samples else self._encode(block.raw[row[0]])
            own.append(tuple(range(len(samples), len(samples) + len(documents))) or EMPTY_ROW)
            samples += documents
        return collate(samples, own, self._options)

    def _encode(self, raw: _Raw) -> list[Sample]:
        """Its samples; none, and a report, where it is bad."""
        source = self._sources[raw.source]
        try:
            samples = list(source.encoder.encode(raw.row).samples)
        except SampleError as error:
            self._on_bad_sample(StreamedBadSample(source.name, raw.index, str(error)))
            self._count_bad(raw, str(error))
            return []
        self._bad_runs[raw.source] = _BadRun()
        return samples

    def _count_bad(self, raw: _Raw, reason: str) -> None:
        run, limit = self._bad_runs[raw.source], max(MIN_BAD_RUN, self._buffer_size // self._dp_size)
        run.add(raw.index, reason)
        if len(run.indices) >= min(limit, self._sizes.get(raw.source, limit)):
            raise run.error(self._sources[raw.source].name, f"{len(run.indices)} rows one after another")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Rows that are shuffled together.

    Attributes:
        position: where it begins, and how many of its rows an earlier run has taken.
        raw: the sources' rows, where each is a row of a batch; else empty.
        samples: all samples, where rows are made of several; else empty.
        rows: indices into ``raw`` or ``samples``.
    """

    position: _Position
    raw: list[_Raw]
    samples: list[Sample]
    rows: list[Row]
