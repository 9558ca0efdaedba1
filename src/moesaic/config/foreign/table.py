"""What a table of another tool's fields is made of, and how one is applied. Torch-free.

A table maps the tool's dotted field names (``*`` matches anything) to rules. A rule looks at the value and says which
of four things it is:

- a ``Value``: fields of the recipe that say the same;
- ``Needless``: nothing has to be said, because it is so here anyhow, or changes nothing in training;
- ``NoEquivalent``: it can't be said here;
- what no rule knows is ``Unknown``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """The other tool's file.

    Attributes:
        values: its fields, dotted, references resolved.
        world_size: ranks of the run, if told.
    """

    values: Mapping[str, Any]
    world_size: int | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class Value:
    """Fields of the recipe, dotted, and what has to be known about the conversion."""

    fields: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Needless:
    """Nothing to write, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoEquivalent:
    """Can't be said here, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """No rule knows the field."""

    reason: str = "no field that this translation knows"


Outcome = Value | Needless | NoEquivalent | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one field is translated.

    Attributes:
        apply: its value and the whole file to an outcome.
        targets: all recipe fields that ``apply`` may set.
    """

    apply: Callable[[Any, Theirs], Outcome]
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool's fields.

    Attributes:
        name: as its users call it.
        rules: by field; an exact name goes before a pattern.
        defaults: values that the tool takes for absent fields, where the recipe's own default is another.
    """

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def rule(self, name: str) -> Rule | None:
        """The rule of a field."""
        exact = self.rules.get(name)
        if exact is not None:
            return exact
        patterns = (pattern for pattern in self.rules if "*" in pattern)
        return next((self.rules[pattern] for pattern in patterns if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the printed table."""

    field: str
    value: Any
    is_default: bool
    outcome: Outcome


def apply_tool(tool: Tool, theirs: Theirs) -> list[Line]:
    """A line for every field of the file, then for every default that matters."""
    absent = {name: value for name, value in tool.defaults.items() if name not in theirs.values}
    whole = Theirs(values={**theirs.values, **absent}, world_size=theirs.world_size)
    lines = []
    for name, value in whole.values.items():
        rule = tool.rule(name)
        outcome = Unknown() if rule is None else _apply(rule, value, whole)
        lines.append(Line(field=name, value=value, is_default=name in absent, outcome=outcome))
    return lines


def _apply(rule: Rule, value: Any, theirs: Theirs) -> Outcome:
    try:
        return rule.apply(value, theirs)
    except (TypeError, ValueError, ArithmeticError):  # of whatever type: "auto" or ??? for a number, a list for a name
        return NoEquivalent("value isn't understood")
