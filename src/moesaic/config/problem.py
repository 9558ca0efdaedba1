"""What is wrong with a recipe, said so that it can be put right. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing a user has to change.

    Attributes:
        field: dotted name of the recipe field, e.g. ``dist_config.ep_size``.
        value: what it holds; None where nothing is set.
        rule: what must hold, and why it doesn't.
        remedy: what to write instead.
    """

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.title}: {self.rule}; {self.remedy}"

    @property
    def title(self) -> str:
        """Field and value as the recipe would have them, e.g. ``dist_config.ep_size: 4``."""
        return f"{self.field} (not set)" if self.value is None else f"{self.field}: {show(self.value)}"


class RecipeError(ValueError):
    """All problems of one recipe.

    Attributes:
        problems: never empty.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "recipe") -> None:
        assert problems, "an error needs a problem"
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{source}: {count}"]
        for problem in problems:
            lines += [f"  {problem.title}", f"      rule:   {problem.rule}", f"      remedy: {problem.remedy}"]
        super().__init__("\n".join(lines))


def show(value: object, max_chars: int = 100) -> str:
    """``value`` as YAML on one line, cut after ``max_chars``. Example: ``{'a': (1, None)}`` -> ``{a: [1, null]}``."""
    try:
        text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError:
        text = repr(value)
    text = " ".join(text.removesuffix("\n").removesuffix("\n...").split())
    return text if len(text) <= max_chars else text[:max_chars] + " ..."


def _plain(value: object) -> object:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
