"""Where what is measured goes: console with a progress bar, ``metrics.jsonl``, boards. On rank 0 only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.train.boards import Board, TensorBoard


class RunWriter:
    """A console with a progress bar, ``metrics.jsonl`` in ``folder``, and boards. A resumed run appends.

    Args:
        boards: where curves go, open; closed with the writer. None: TensorBoard files in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        boards: Sequence[Board] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._boards = (TensorBoard(folder),) if boards is None else tuple(boards)
        self._console = console or Console(highlight=False)
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("train", total=num_steps, completed=first_step)
        self._num_steps = num_steps
        self._progress.start()

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self._num_steps

    def advance(self, step: int) -> None:
        """Move the progress bar to ``step``."""
        self._progress.update(self._task, completed=step)

    def append(self, record: Mapping[str, object]) -> None:
        """One line of ``metrics.jsonl``."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def plot(self, scalars: Mapping[str, float], step: int) -> None:
        """A point on each curve."""
        for board in self._boards:
            board.write(scalars, step)

    def print(self, text: str) -> None:
        """A line on the console, above the progress bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Flush and close everything; the bar stays as it is."""
        self._progress.stop()
        for board in self._boards:
            board.close()
        self._file.close()
