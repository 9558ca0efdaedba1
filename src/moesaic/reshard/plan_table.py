"""A reshard plan to read: as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

MAX_GROUPS = 16  # rows and columns of the table of who sends to whom
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes from groups of neighbouring trainer ranks to groups of neighbouring engine ranks.

    Attributes:
        ranks_per_row, targets_per_column: ranks in a group; the last group may have fewer.
        num_bytes: a row per group of trainer ranks, a column per group of engine ranks.
    """

    ranks_per_row: int
    targets_per_column: int
    num_bytes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_array(cls, array: npt.NDArray[np.int64], max_groups: int = MAX_GROUPS) -> Traffic:
        """``array``: [trainer ranks, engine ranks]. Ranks one by one where there are few, otherwise by powers of 2."""
        rows, columns = (_group_size(size, max_groups) for size in array.shape)
        starts = [np.arange(0, size, step) for size, step in zip(array.shape, (rows, columns), strict=True)]
        if array.size:
            array = np.add.reduceat(np.add.reduceat(array, starts[0], axis=0), starts[1], axis=1)
        return cls(
            ranks_per_row=rows, targets_per_column=columns, num_bytes=tuple(tuple(row) for row in array.tolist())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """Sums of a plan, in bytes on the wire.

    Attributes:
        num_layouts: different ones among the engine ranks.
        sent: by each trainer rank; received, local (copied within its process), lower_bounds: of each engine rank.
        imbalance: most sent over mean sent.
        peak_buffer_bytes: no message is larger.
        kinds: (name with ``*`` for numbers, dtype on the wire, bytes).
    """

    fingerprint: str
    num_layouts: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    local: tuple[int, ...]
    lower_bounds: tuple[int, ...]
    imbalance: float
    peak_buffer_bytes: int
    kinds: tuple[tuple[str, str, int], ...]
    traffic: Traffic

    def to_json(self) -> str:
        """All of it, with sums."""
        content = asdict(self)
        content["kinds"] = [{"name": name, "dtype": dtype, "bytes": size} for name, dtype, size in self.kinds]
        content["total"] = {
            "sent": sum(self.sent),
            "received": sum(self.received),
            "local": sum(self.local),
            "lower_bound": sum(self.lower_bounds),
        }
        return json.dumps(content, indent=2)

    def to_text(self) -> str:
        """Sums, then what is sent, then who sends to whom; sizes in MiB."""
        received, bound = sum(self.received), sum(self.lower_bounds)
        lines = [
            f"{len(self.sent)} trainer ranks -> {len(self.received)} engine ranks ({self.num_layouts} layouts)",
            f"received  {_mib(received)} MiB, {_over(received, bound)} the lower bound; copied within a process "
            f"{_mib(sum(self.local))} MiB",
            f"an engine rank receives  {_range(self.received)} MiB; lower bound {_range(self.lower_bounds)} MiB",
            f"a trainer rank sends  {_range(self.sent)} MiB; most / mean {self.imbalance:.3f}",
            f"largest message  {_mib(self.peak_buffer_bytes)} MiB",
            "",
        ]
        by_size = sorted(self.kinds, key=lambda kind: -kind[2])
        what = [("what", "dtype", "MiB"), *((name, dtype, _mib(size)) for name, dtype, size in by_size)]
        lines += [*_columns(what, left=2), ""]
        rows, columns = self.traffic.ranks_per_row, self.traffic.targets_per_column
        num_columns = len(self.traffic.num_bytes[0]) if self.traffic.num_bytes else 0
        head = ["MiB: from \\ to", *(_label(index, columns, len(self.received)) for index in range(num_columns))]
        table = [head]
        for index, row in enumerate(self.traffic.num_bytes):
            table.append([_label(index, rows, len(self.sent)), *map(_mib, row)])
        return "\n".join([*lines, *_columns(table, left=1)])


def _group_size(count: int, max_groups: int) -> int:
    size = 1
    while -(-count // size) > max_groups:
        size *= 2
    return size


def _label(index: int, step: int, count: int) -> str:
    first, last = index * step, min(count, (index + 1) * step) - 1
    return str(first) if first == last else f"{first}..{last}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}" if num_bytes < 100 * MIB else f"{num_bytes / MIB:,.0f}"


def _range(values: Sequence[int]) -> str:
    if not values:
        return "0"
    low, high = _mib(min(values)), _mib(max(values))
    return low if low == high else f"{low} to {high}"


def _over(value: int, bound: int) -> str:
    return f"{value / bound:.4f} of" if bound else "which is"


def _columns(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines with aligned columns, the first ``left`` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
