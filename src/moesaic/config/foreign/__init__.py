"""Other trainers' configuration files, read as recipes: nothing of them is dropped without a word. Torch-free.

What a field is called here is data: ``llamafactory.py``, ``verl.py`` and the like are tables of rules (``table.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from moesaic.config.foreign import llamafactory, verl
from moesaic.config.foreign.table import Line, Needless, NoEquivalent, Outcome, Theirs, Tool, Unknown, Value, apply_tool
from moesaic.config.problem import show
from moesaic.config.recipe import Recipe

TOOLS: Mapping[str, Callable[[Mapping[str, Any]], Tool]] = MappingProxyType(
    {"llamafactory": llamafactory.choose, "verl": verl.choose}
)

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(?P<name>\.?[\w.]+)(?:,(?P<default>[^}]*))?\}")
MAX_REFERENCES = 10
"""Most references that lead from one to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A file read as a recipe.

    Attributes:
        tool: whose file it is.
        lines: one per field, none left out.
    """

    tool: str
    lines: tuple[Line, ...]

    @property
    def is_complete(self) -> bool:
        """Every field has an equivalent or needs none."""
        return not any(isinstance(line.outcome, NoEquivalent | Unknown) for line in self.lines)

    def recipe(self) -> dict[str, Any]:
        """The recipe's fields in its order, sections as nested dictionaries. Of two lines that set the same field, the
        later one counts, and the file's own before a default."""
        recipe: dict[str, Any] = {}
        for line in sorted(self.lines, key=lambda line: not line.is_default):
            for target, value in line.outcome.fields.items() if isinstance(line.outcome, Value) else ():
                *sections, key = target.split(".")
                mapping = recipe
                for section in sections:
                    mapping = mapping.setdefault(section, {})
                mapping[key] = value
        if "dist_config" in recipe:
            recipe["dist_config"].setdefault("name", "fsdp2")
        return {name: recipe[name] for name in Recipe.model_fields if name in recipe}

    def table(self) -> str:
        """Every field, what it is here, and why not; aligned, for reading."""
        rows = [(_name(line), _equivalent(line.outcome)) for line in self.lines]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in [(self.tool, "here"), *rows])


def translate(tool: str, data: Mapping[str, Any], *, world_size: int | None = None) -> Translation:
    """Read the values of ``tool``'s file (a key of ``TOOLS``) as a recipe.

    Args:
        data: the file's mapping, as YAML gives it.
        world_size: ranks of the run; some fields can't be translated without.
    """
    values = _resolve(dict(_flatten(data)))
    chosen = TOOLS[tool](values)
    lines = apply_tool(chosen, Theirs(values=values, world_size=world_size))
    return Translation(tool=chosen.name, lines=tuple(lines))


def render(translation: Translation, recipe: Mapping[str, Any], source: Path) -> str:
    """A recipe file: the table as a comment, then the fields."""
    comment = "\n".join(f"# {line}".rstrip() for line in [f"From {source}", "", *translation.table().splitlines()])
    return f"{comment}\n\n{yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)}"


def _name(line: Line) -> str:
    return f"{line.field}: {show(line.value, 40)}{' (its default)' if line.is_default else ''}"


def _equivalent(outcome: Outcome) -> str:
    if isinstance(outcome, Value):
        fields = ", ".join(f"{name}: {show(value, 60)}" for name, value in outcome.fields.items())
        return f"{fields}{f'  ({outcome.note})' if outcome.note else ''}"
    words = {Needless: "not needed", NoEquivalent: "NO EQUIVALENT", Unknown: "UNKNOWN"}
    return f"{words[type(outcome)]}: {outcome.reason}"


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; an empty section is a value."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Values with ``${other.field}`` and ``${oc.select:other.field,default}`` filled in; others stay as they are."""
    for _ in range(MAX_REFERENCES):
        filled = {name: _fill(name, value, values) for name, value in values.items()}
        if filled == values:
            break
        values = filled
    return values


def _fill(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> Any:
        target = match["name"]
        if target.startswith("."):
            target = name.rpartition(".")[0] + target
        if target in values:
            return values[target]
        try:
            return match[0] if match["default"] is None else yaml.safe_load(match["default"])
        except yaml.YAMLError:
            return match[0]

    whole = _REFERENCE.fullmatch(value)
    return look_up(whole) if whole else _REFERENCE.sub(lambda match: str(look_up(match)), value)
