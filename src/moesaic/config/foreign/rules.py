"""Rules that the tables of other tools' fields are made of. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Value

Condition = Callable[[Theirs], bool]


def same(target: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """The recipe has this field; null stays unset."""

    def apply(value: Any, _: Theirs) -> Outcome:
        return Needless("unset") if value is None else Value({target: convert(value)}, note)

    return Rule(apply=apply, targets=(target,))


def one_of(target: str, names: Mapping[Any, Any], otherwise: str) -> Rule:
    """The recipe has this field for some values: theirs -> ours; ``otherwise`` is the reason for all others."""

    def apply(value: Any, _: Theirs) -> Outcome:
        if value is None:
            return Needless("unset")
        return Value({target: names[value]}) if value in names else NoEquivalent(otherwise)

    return Rule(apply=apply, targets=(target,))


def only(*neutral: Any, reason: str) -> Rule:
    """No field: fine where the value is one of ``neutral`` (null always is), otherwise not to be had."""

    def apply(value: Any, _: Theirs) -> Outcome:
        is_neutral = value is None or any(value == one and type(value) is type(one) for one in neutral)
        return Needless("as here") if is_neutral else NoEquivalent(reason)

    return Rule(apply=apply)


def needless(reason: str) -> Rule:
    """No field, whatever the value."""
    return Rule(apply=lambda *_: Needless(reason))


def never(reason: str) -> Rule:
    """No field, and the run would differ."""
    return Rule(apply=lambda *_: NoEquivalent(reason))


def computed(apply: Callable[[Any, Theirs], Outcome], *targets: str) -> Rule:
    """What needs more than the value."""
    return Rule(apply=apply, targets=targets)


def when(condition: Condition, rule: Rule, otherwise: str) -> Rule:
    """A rule for files of one kind; in others the field says nothing."""

    def apply(value: Any, theirs: Theirs) -> Outcome:
        return rule.apply(value, theirs) if condition(theirs) else Needless(otherwise)

    return Rule(apply=apply, targets=rule.targets)
