"""From a YAML file and ``key=value`` overrides to a checked Recipe, or to all of its problems at once. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moesaic.config.check import check_recipe
from moesaic.config.parse import parse_recipe
from moesaic.config.problem import Problem, RecipeError, show
from moesaic.config.recipe import SHORTHAND_SECTIONS, Recipe


def load_recipe(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    default_world_size: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Recipe:
    """Read a recipe, apply the overrides, check everything that can be checked without starting a process.

    Args:
        path: YAML file.
        overrides: ``key=value``, dotted inside sections, the value parsed as YAML: ``dist_config.ep_size=4``,
            ``dist_config={name: fsdp2}``.
        world_size: ranks of the run. None: what needs it is checked only as far as ``dp_size`` or ``mp_shard_size``
            imply it; call ``check_recipe`` once it is known.
        default_world_size: ranks where neither ``world_size`` nor the recipe says it.
        ignored: fields that the caller won't read: they may be missing, and what they refer to isn't looked at.

    Raises:
        RecipeError: all problems: of the file, of types and names, of sizes, of the model's experts.
    """
    data, problems = read_mapping(Path(path))
    if problems and not data:  # of a file that can't be read, nothing else is worth saying
        raise RecipeError(problems, source=str(path))
    problems += apply_overrides(data, overrides)
    return build_recipe(
        data, problems, str(path), world_size=world_size, default_world_size=default_world_size, ignored=ignored
    )


def build_recipe(
    data: Mapping[str, Any],
    problems: Sequence[Problem],
    source: str,
    *,
    world_size: int | None = None,
    default_world_size: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Recipe:
    """The checked recipe of fields as YAML gives them; ``problems`` are those found so far. Others as `load_recipe`'s.

    Raises:
        RecipeError: all problems; ``source`` is what they are of.
    """
    problems = list(problems)
    recipe, more_problems, unread = parse_recipe(data)
    problems += [one for one in more_problems if one.value is not None or one.field not in ignored]
    problems += check_recipe(recipe, world_size, default_world_size=default_world_size, unread=unread | ignored)
    if problems:
        raise RecipeError(problems, source=source)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every field written out; loading it gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write ``dump_recipe(recipe)`` to ``path``."""
    path.write_text(dump_recipe(recipe), encoding="utf-8")


def load_saved_recipe(path: Path) -> Recipe:
    """What ``save_recipe`` wrote. Keys and types are checked; files, sizes and machines are not: they may have moved.

    Raises:
        RecipeError: the file is not a saved recipe of this version.
    """
    data, problems = read_mapping(path)
    recipe, more_problems, _ = parse_recipe(data)
    if problems or more_problems:
        raise RecipeError(problems + more_problems, source=str(path))
    return recipe


class _Loader(yaml.SafeLoader):
    """YAML 1.1's safe subset, with two differences: ``1e-4`` is a number, and a key given twice is reported."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated_keys: list[Problem] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in seen:
                value = value_node.value if isinstance(value_node, yaml.ScalarNode) else "(section)"
                rule = f"is given twice, the second time in line {key_node.start_mark.line + 1}"
                self.repeated_keys.append(Problem(field=key, value=value, rule=rule, remedy="keep one of the two"))
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML wants a dot and a signed exponent in a float, and so reads 1e-4 as text; YAML 1.2 reads a number.
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _parse_yaml(text: str, field: str, source: str) -> tuple[Any, list[Problem]]:
    """The value of a YAML text, and what is wrong with it; None where it can't be read. ``source`` is shown then."""
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that isn't one
        reason = " ".join(str(error).split())
        return None, [Problem(field=field, value=source, rule=f"must be YAML: {reason}", remedy="correct that place")]
    return value, loader.repeated_keys


def read_mapping(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The file's top-level mapping; empty, with a problem, where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a readable UTF-8 file: {error}"
        return {}, [Problem(field="recipe", value=str(path), rule=rule, remedy="give the path of a YAML file")]
    data, problems = _parse_yaml(text, "recipe", str(path))
    if isinstance(data, dict):
        return {str(key): value for key, value in data.items()}, problems
    if not problems:
        rule = "must be a mapping of fields to values"
        problems = [Problem(field="recipe", value=data, rule=rule, remedy="write `model: ...`, `train_dataset: ...`")]
    return {}, problems


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Put each ``key=value`` into ``data``; their problems."""
    return [problem for override in overrides for problem in _apply_override(data, override)]


def _apply_override(data: dict[str, Any], override: str) -> list[Problem]:
    """Put one ``key=value`` into ``data``; its problems."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        rule = "an override is key=value, dotted inside sections"
        return [Problem(field="override", value=override, rule=rule, remedy="write e.g. dist_config.ep_size=4")]
    value, problems = _parse_yaml(text, path.strip(), text)
    if problems:
        return problems
    mapping = data
    for key in keys[:-1]:
        inner = mapping.get(key)
        if isinstance(inner, str) and mapping is data and key in SHORTHAND_SECTIONS:
            inner = {SHORTHAND_SECTIONS[key]: inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            rule = f"{key} holds {show(inner)}, which has no fields inside"
            return [Problem(field=path.strip(), value=value, rule=rule, remedy=f"override {key} itself: {key}=...")]
        mapping[key] = dict(inner)
        mapping = mapping[key]
    mapping[keys[-1]] = value
    return []
