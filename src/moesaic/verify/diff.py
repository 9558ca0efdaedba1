"""Two sets of tensors on disk, compared one tensor at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from moesaic.verify.stores import CheckpointStore, Facts, Store, open_store

# What a checkpoint's names of the optimizer's state begin with.
MOMENTS = "optimizer."
# Values compared at once: what bounds the memory beside the two tensors themselves.
NUM_CHUNK_VALUES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that both sides have.

    Attributes:
        rel: max|a-b| / max|b|; 0 where all bits are equal, infinite where a difference isn't finite, b is zero, or the
            shapes differ.
        max_abs: max|a-b|, infinite in the same cases but for b zero.
        same_bits: shape, dtype and every bit are equal (so NaN equals NaN, and -0 isn't 0).
        mismatch: shapes or dtypes that differ, in words; empty where they don't.
    """

    name: str
    rel: float
    max_abs: float
    same_bits: bool
    mismatch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a comparison found. ``differences`` begins with the worst; ``only_a`` and ``only_b`` are sorted names."""

    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def worse_than(self, tolerance: float) -> tuple[Difference, ...]:
        """Those that aren't equal: with tolerance 0 every bit counts, above it ``rel`` and the dtypes."""
        return tuple(
            one for one in self.differences if not (one.same_bits or (not one.mismatch and 0 < tolerance >= one.rel))
        )

    def is_equal(self, tolerance: float) -> bool:
        """Whether both sides have the same names, and no tensor is worse than ``tolerance``."""
        return not (self.only_a or self.only_b or self.worse_than(tolerance))


def diff(a: Path, b: Path) -> Report:
    """Compare all tensors of two folders by name; at most one tensor of each side is in memory.

    Args:
        a: a dump, an export (safetensors) or a checkpoint (DCP).
        b: the reference that ``rel`` is relative to; of whatever topology.

    Raises:
        ValueError: a folder holds no tensors.
    """
    one, other = open_store(a), open_store(b)
    names_a, names_b = set(one.facts), set(other.facts)
    if isinstance(one, CheckpointStore) != isinstance(other, CheckpointStore):  # only checkpoints have moments
        names_a, names_b = ({name for name in names if not name.startswith(MOMENTS)} for names in (names_a, names_b))
    found = [_compare(name, one, other) for name in sorted(names_a & names_b)]
    return Report(
        differences=tuple(sorted(found, key=lambda found: (-found.rel, -found.max_abs, found.same_bits, found.name))),
        only_a=tuple(sorted(names_a - names_b)),
        only_b=tuple(sorted(names_b - names_a)),
    )


def build_table(report: Report, num_rows: int) -> Table:
    """The ``num_rows`` worst tensors."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("rel", "max abs"):
        table.add_column(title, justify="right")
    table.add_column("bits")
    table.add_column("shape, dtype")
    for one in report.differences[:num_rows]:
        bits = "equal" if one.same_bits else "differ"
        table.add_row(one.name, f"{one.rel:.2e}", f"{one.max_abs:.2e}", bits, one.mismatch)
    return table


def _compare(name: str, a: Store, b: Store) -> Difference:
    facts_a, facts_b = a.facts[name], b.facts[name]
    mismatch = "" if facts_a == facts_b else f"{_in_words(facts_a)} / {_in_words(facts_b)}"
    if facts_a.shape != facts_b.shape:
        return Difference(name=name, rel=math.inf, max_abs=math.inf, same_bits=False, mismatch=mismatch)
    tensor_a, tensor_b = a.read(name).reshape(-1), b.read(name).reshape(-1)
    if not mismatch and torch.equal(tensor_a.view(torch.uint8), tensor_b.view(torch.uint8)):
        return Difference(name=name, rel=0.0, max_abs=0.0, same_bits=True)
    max_abs, largest = 0.0, 0.0
    for part_a, part_b in zip(tensor_a.split(NUM_CHUNK_VALUES), tensor_b.split(NUM_CHUNK_VALUES), strict=True):
        if not part_b.numel():
            continue
        exact_a, exact_b = part_a.double(), part_b.double()
        # Equal values differ by 0, also where both are infinite; whatever else isn't finite is infinitely far apart.
        gap = torch.where(exact_a == exact_b, 0.0, (exact_a - exact_b).abs())
        max_abs = max(max_abs, torch.nan_to_num(gap, nan=math.inf, posinf=math.inf).max().item())
        largest = max(largest, torch.nan_to_num(exact_b.abs(), nan=0.0, posinf=math.inf).max().item())
    return Difference(name=name, rel=_ratio(max_abs, largest), max_abs=max_abs, same_bits=False, mismatch=mismatch)


def _ratio(max_abs: float, largest: float) -> float:
    if max_abs == 0.0:
        return 0.0
    return math.inf if math.isinf(max_abs) or largest == 0.0 else max_abs / largest


def _in_words(facts: Facts) -> str:
    return f"{list(facts.shape)} {facts.dtype}"
