"""What a verification found: bounds and errors of every quantity, the verdict; as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.table import Table

from moesaic.verify.explain import Finding

REPORT = "report.json"
# Relative, fp32: what summing in another order costs, with some room. AdamW divides by the gradients' size, so the
# rounding of weights after its steps is larger. Weights as loaded, and after a reload, are equal bit for bit.
TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"start": 0.0, "loss": 1e-6, "gradient": 1e-5, "norm": 1e-5, "weight": 5e-5, "reload": 0.0}
)
# Where a quantity's own rounding floor is above its tolerance, this many times the floor is its bound.
FLOORS = 2
# But no more than this: beyond it a gradient that is missing or doubled might pass for rounding.
MAX_BOUND = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One quantity, or one tensor's.

    Attributes:
        what: ``start`` (weights as loaded), ``loss``, ``gradient``, ``norm``, ``weight`` (after two steps), ``reload``.
        name: the parameter's, or the quantity's.
        error: relative to the reference; infinite where one side has no such value.
        bound: what it may be.
        floor: how far rounding alone moves it.
        ratio: ours / the reference's by least squares, where that has a meaning.
    """

    what: str
    name: str
    error: float
    bound: float
    floor: float
    ratio: float | None = None

    @property
    def is_passed(self) -> bool:
        """Within its bound; NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it. ``facts``: the topology and what was run, for people."""

    facts: Mapping[str, str]
    notes: tuple[str, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]

    @property
    def is_proven(self) -> bool:
        """Every check passed, and there were some of every kind."""
        return {check.what for check in self.checks} == set(TOLERANCES) and all(one.is_passed for one in self.checks)


def build_check(what: str, name: str, error: float, floor: float = 0.0, ratio: float | None = None) -> Check:
    """With the bound that its tolerance and its floor make, up to ``MAX_BOUND``."""
    tolerance = TOLERANCES[what]
    bound = min(max(tolerance, FLOORS * floor), MAX_BOUND) if tolerance else 0.0
    return Check(what=what, name=name, error=error, bound=bound, floor=floor, ratio=ratio)


def save_report(report: Report, path: Path) -> None:
    """As JSON; infinite numbers are strings."""
    path.write_text(to_json(report) + "\n", encoding="utf-8")


def load_verdict(path: Path) -> bool:
    """Whether the saved report says that all is proven."""
    return bool(json.loads(path.read_text(encoding="utf-8"))["is_proven"])


def to_json(report: Report) -> str:
    """Everything, also what the table leaves out."""
    checks = [_plain({**asdict(one), "is_passed": one.is_passed}) for one in report.checks]
    findings = [_plain(asdict(one)) for one in report.findings]
    fields = {
        "is_proven": report.is_proven,
        "facts": dict(report.facts),
        "notes": report.notes,
        "findings": findings,
        "checks": checks,
    }
    return json.dumps(fields, indent=1)


def build_table(report: Report, num_rows: int) -> Table:
    """The quantities that have no parameter; then by parameter, the ``num_rows`` worst.

    What failed is marked. A bound above the tolerance shows the floor behind it.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("parameter, or number", overflow="fold")
    for title in ("as loaded", "gradient", "2 steps", "reloaded"):
        table.add_column(title, justify="right", no_wrap=True)
    columns = ("start", "gradient", "weight", "reload")
    by_name: dict[str, dict[str, Check]] = {}
    for check in report.checks:
        if check.what in columns:
            by_name.setdefault(check.name, {})[check.what] = check
    for check in report.checks:
        if check.what not in columns:
            table.add_row(check.name, "", _cell(check), "", "")
    ordered = sorted(by_name.items(), key=lambda item: -_excess(item[1]))
    for name, checks in ordered[:num_rows]:
        cells = [_cell(checks[what]) if what in checks else "" for what in columns]
        table.add_row(name, *cells)
    if len(ordered) > num_rows:
        table.add_row(f"{len(ordered) - num_rows} better ones: see {REPORT}")
    return table


def _excess(checks: Mapping[str, Check]) -> float:
    """How far the worst of a parameter's errors is towards, or beyond, its tolerance: wide bounds aren't hidden."""
    bounds = {one: TOLERANCES[one.what] for one in checks.values()}
    shares = [one.error / bound if bound else one.error and math.inf for one, bound in bounds.items()]
    return max(shares)


def _cell(check: Check) -> str:
    if not check.bound:
        return "equal" if check.is_passed else f"[red]{check.error:.1e}[/]"
    text = f"{check.error:.1e}" if check.is_passed else f"[red]{check.error:.1e}[/]"
    if check.bound > TOLERANCES[check.what]:
        text += f" (floor {check.floor:.1e})"
    return text


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
