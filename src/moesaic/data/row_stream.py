"""Rows of a source one after another, from any position, in bounded memory: what streaming reads from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from moesaic.data.formats import is_stored, load_stored, parse_line

STREAM_SUFFIXES = (".jsonl", ".parquet")
NUM_READ_AHEAD = 1024
"""Rows of a parquet file that are decoded at once."""


class RowStream(Protocol):
    """A source that can be read from any row. Reading it twice gives the same rows in the same order."""

    def read_from(self, start: int) -> Iterator[Any]:
        """Rows ``start``, ``start + 1``, ... to the end; nothing where there are no more."""
        ...


class JsonLines:
    """A ``.jsonl`` file: blank lines don't count, a line that isn't JSON is an ``UnreadableRow``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_from(self, start: int) -> Iterator[Any]:
        """See :class:`RowStream`. Skipped lines are read, but not parsed."""
        with self._path.open(encoding="utf-8", newline="\n") as file:
            lines = (line for line in file if line.strip())
            yield from map(parse_line, itertools.islice(lines, start, None))


class Parquet:
    """A ``.parquet`` file. Whole row groups are skipped without being read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_from(self, start: int) -> Iterator[Any]:
        """See :class:`RowStream`."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            groups: list[int] = []
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if not groups and start >= num_rows:
                    start -= num_rows
                else:
                    groups.append(group)
            if groups:
                batches = file.iter_batches(batch_size=NUM_READ_AHEAD, row_groups=groups)
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                yield from itertools.islice(rows, start, None)


class NamedStream:
    """A folder or a name, as the ``datasets`` library streams it."""

    def __init__(self, source: str, split: str) -> None:
        import datasets

        path = Path(source)
        try:
            if is_stored(path):
                self._dataset = load_stored(path, split).to_iterable_dataset()
            else:
                self._dataset = datasets.load_dataset(source, split=split, streaming=True)
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"dataset {source!r} (split {split!r}) can't be streamed as a .jsonl or .parquet file, as a folder, or "
                f"by the datasets library: {type(error).__name__}: {error}"
            ) from error

    def read_from(self, start: int) -> Iterator[Any]:
        """See :class:`RowStream`."""
        yield from self._dataset.skip(start) if start else self._dataset


def open_stream(source: str, *, split: str = "train") -> RowStream:
    """The stream of a ``.jsonl`` or ``.parquet`` file, of a folder, or of a dataset that ``datasets`` knows by name.

    Raises:
        ValueError: no such source, or a file of another kind.
    """
    path = Path(source)
    if path.suffix in (".json", ".txt"):
        raise ValueError(
            f"dataset {source!r}: a {path.suffix} file is one value, which can't be streamed; write .jsonl, or set "
            "streaming: false"
        )
    if path.suffix in STREAM_SUFFIXES and not path.is_file():
        raise ValueError(f"dataset {source!r}: no such file")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    return Parquet(path) if path.suffix == ".parquet" else NamedStream(source, split)
