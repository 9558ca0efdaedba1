"""What a check of a recipe is: the fields it reads, and how it finds problems. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from moesaic.config.problem import Problem
from moesaic.config.recipe import Recipe

# Not a field: what a caller that reads no weights and no tokenizer leaves out, beside the fields it doesn't read.
MODEL_FILES = "files of model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What checks look at. ``world_size`` is None where neither the caller nor the recipe says it."""

    recipe: Recipe
    world_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        needs: dotted fields that it reads; ``actor.*`` is the section with all in it. It is left out where one of them
            couldn't be read.
        find: the problems.
    """

    needs: tuple[str, ...]
    find: Callable[[Case], Iterable[Problem]]


def is_unread(fields: Iterable[str], unread: frozenset[str]) -> bool:
    """True where one of ``fields``, a section it is in, or for ``section.*`` anything in it, is unread."""
    return any(_is_one_unread(field, unread) for field in fields)


def _is_one_unread(field: str, unread: frozenset[str]) -> bool:
    section = field.removesuffix("*")
    if section != field and any(name.startswith(section) for name in unread):
        return True
    return not unread.isdisjoint(_within(section.removesuffix(".")))


def _within(field: str) -> list[str]:
    """A field and the sections around it. Example: ``a.b.c`` -> ``a``, ``a.b``, ``a.b.c``."""
    return list(accumulate(field.split("."), lambda section, key: f"{section}.{key}"))
