"""The recipe's fields as data, for documentation and error messages. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from moesaic.config.recipe import DIST_CONFIGS, DatasetConfig, Recipe
from moesaic.config.section import LF, Section
from moesaic.config.verl_names import VERL_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeField:
    """One field, as documentation and error messages show it.

    Attributes:
        path: dotted name, e.g. ``optim_config.betas``.
        type_text: its type in words, e.g. ``integer or null``.
        default: None where ``is_required``, or where None is the default.
        variants: for fields of ``dist_config``: the names under which they exist.
        verl: verl's full name of it; empty where verl has no such field.
    """

    path: str
    type_text: str
    default: object
    is_required: bool
    origin: str
    description: str
    variants: tuple[str, ...] = ()
    verl: str = ""

    @property
    def verl_names(self) -> tuple[str, ...]:
        """``verl`` at its commas."""
        return tuple(self.verl.split(", ")) if self.verl else ()


def list_fields() -> tuple[RecipeField, ...]:
    """All fields, in the order of the classes, sections followed by their own fields."""
    return tuple(_list("", Recipe.model_fields))


def _list(prefix: str, infos: Mapping[str, FieldInfo]) -> Iterator[RecipeField]:
    for name, info in infos.items():
        yield _describe(f"{prefix}{name}", info)
        if f"{prefix}{name}" == "dist_config":
            yield from _dist_config_fields()
        else:
            yield from _list(f"{prefix}{name}.", section_fields(info))


def section_fields(info: FieldInfo) -> Mapping[str, FieldInfo]:
    """Fields of the section that a field of the recipe holds; empty for a plain value. Not for ``dist_config``."""
    for kind in (info.annotation, *get_args(info.annotation)):  # of a list: the sections in it
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind.model_fields
    return {}


def _dist_config_fields() -> Iterator[RecipeField]:
    yield RecipeField(
        path="dist_config.name",
        type_text=_any_of(DIST_CONFIGS),
        default=None,
        is_required=True,
        origin=LF,
        description=" ".join(f"`{name}`: {_text(kind, 'name')}" for name, kind in DIST_CONFIGS.items()),
        verl=VERL_NAMES["dist_config.name"],
    )
    infos = {key: info for kind in DIST_CONFIGS.values() for key, info in kind.model_fields.items() if key != "name"}
    for key, info in infos.items():
        variants = tuple(name for name, kind in DIST_CONFIGS.items() if key in kind.model_fields)
        yield _describe(f"dist_config.{key}", info, variants)


def _text(kind: type[Section], key: str) -> str:
    return kind.model_fields[key].description or ""


def _describe(path: str, info: FieldInfo, variants: tuple[str, ...] = ()) -> RecipeField:
    assert info.description and isinstance(info.json_schema_extra, dict), f"{path} has no about(...)"
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    return RecipeField(
        path=path,
        type_text=type_text(info.annotation),
        default=default.model_dump() if isinstance(default, Section) else default,
        is_required=info.is_required(),
        origin=str(info.json_schema_extra["origin"]),
        description=info.description,
        variants=variants,
        verl=VERL_NAMES.get(path, ""),
    )


def type_text(annotation: Any) -> str:
    """A type in words. Examples: ``int | None`` -> ``integer or null``; ``Literal[16, 32]`` -> ``16 or 32``."""
    if get_origin(annotation) is Annotated:
        return type_text(get_args(annotation)[0])
    words = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null"}
    if annotation in words:
        return words[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return "mapping"
    if origin is Literal:
        return _any_of(args)
    if origin is tuple:
        if _is_dataset(args[0]):
            return f"{type_text(args[0])}, or a list of them"
        return f"list of {type_text(args[0])}" if Ellipsis in args else f"list of {len(args)} numbers"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(arg) for arg in args))
    return "path or section" if _is_dataset(annotation) else "section"


def _is_dataset(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, DatasetConfig)


def _any_of(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return " or ".join(texts) if len(texts) < 3 else f"one of {', '.join(texts)}"
