"""Which implementation each operator gets: chosen from a recipe's ``kernel_config`` and the device, as a value.

Nothing is registered in place: ``extend`` returns a larger table, which is then an argument, so that two models in one
process may choose differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from moesaic.config.recipe import KernelConfig
from moesaic.kernels import gated_delta_rule
from moesaic.kernels.base import REFERENCE, Implementation, Operator, Package

BUILT_IN_OPERATORS: tuple[Operator, ...] = gated_delta_rule.OPERATORS
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What one operator runs.

    Attributes:
        passed_over: why not what was asked for before it; empty where nothing was.
    """

    operator: Operator
    implementation: Implementation
    passed_over: str = ""

    def __str__(self) -> str:
        instead = f" ({self.passed_over})" if self.passed_over else ""
        return f"kernel {self.operator.name}: {self.implementation.name}{instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSelection:
    """One choice for every operator that is known. ``config`` is what was asked for: a model must have that."""

    config: KernelConfig
    choices: tuple[KernelChoice, ...]


def extend(operators: Sequence[Operator], operator_name: str, implementation: Implementation) -> tuple[Operator, ...]:
    """``operators`` with one more implementation of one of them, tried before those that are there.

    Raises:
        ValueError: no such operator, or it has an implementation of that name: nothing is replaced.
    """
    operator = next((operator for operator in operators if operator.name == operator_name), None)
    if operator is None:
        raise ValueError(f"operator {operator_name!r} is none of {', '.join(o.name for o in operators)}.")
    if implementation.name in (AUTO, REFERENCE, *(known.name for known in operator.implementations)):
        raise ValueError(
            f"implementation {implementation.name!r} of {operator_name} is taken; implementations are added, never "
            "replaced. Choose another name."
        )
    larger = replace(operator, implementations=(implementation, *operator.implementations))
    return tuple(larger if known is operator else known for known in operators)


def select_kernels(
    config: KernelConfig | None = None, *, device_type: str, operators: Sequence[Operator] = BUILT_IN_OPERATORS
) -> KernelSelection:
    """For each operator what ``config`` lists by name, else what ``auto`` has for the device, else the reference.

    An operator that ``include_kernels`` leaves out gets the reference. What is listed by name but doesn't run on this
    type of device is passed over, and the choice says so (a recipe for GPUs then runs on a laptop too); what would run
    here but isn't installed is an error, since a much slower run is not what was asked for.

    Args:
        config: default: ``auto`` for all.
        device_type: ``cpu``, or an accelerator's.
        operators: those that are known; more implementations by ``extend``.

    Raises:
        ValueError: unknown names; a package that is missing or too old. All of them at once.
    """
    config = config or KernelConfig()
    problems = list(_unknown_names(config, operators))
    choices = []
    for operator in operators:
        listed = config.names if not config.kernels or operator.name in config.kernels else ()
        passed_over = []
        for implementation in _candidates(operator, listed):
            if implementation.device_types and device_type not in implementation.device_types:
                devices = ", ".join(sorted(implementation.device_types))
                passed_over.append(f"{implementation.name} runs on {devices}, not on {device_type}")
                continue
            lacking = _lacking(implementation.package)
            if lacking and implementation.name in listed:
                field = f"kernel_config.name={config.name!r}"
                problems.append(f"{field}: {implementation.name} for {operator.name} {lacking}")
            if lacking:
                passed_over.append(f"{implementation.name} {lacking}")
                continue
            choices.append(
                KernelChoice(operator=operator, implementation=implementation, passed_over="; ".join(passed_over))
            )
            break
    if problems:
        raise ValueError("\n".join(problems))
    return KernelSelection(config=config, choices=tuple(choices))


def _candidates(operator: Operator, listed: Sequence[str]) -> Iterable[Implementation]:
    """Best first: listed by its own name, part of ``auto``, the reference."""
    yield from (known for known in operator.implementations if known.name in listed)
    yield from (known for known in operator.implementations if known.is_auto and AUTO in listed)
    yield operator.reference


def _unknown_names(config: KernelConfig, operators: Sequence[Operator]) -> Iterable[str]:
    names = (AUTO, *dict.fromkeys(known.name for operator in operators for known in operator.implementations))
    for field, given, known in (
        ("name", config.names, names),
        ("include_kernels", config.kernels, tuple(operator.name for operator in operators)),
    ):
        for name in given:
            if name not in known:
                yield f"kernel_config.{field}: {name!r} is none of {', '.join(known)}; remove it, or name one of these."


def _lacking(package: Package | None) -> str:
    """What is wrong with a package and how to mend it; empty where nothing is."""
    if package is None:
        return ""
    needs = f"needs {package.distribution} >= {package.min_version}"
    remedy = f"Install it with: pip install '{package.install}'"
    if find_spec(package.module) is None:
        return f"{needs}, and there is no package {package.module}. {remedy}"
    try:
        found = version(package.distribution)
    except PackageNotFoundError:
        return f"{needs}, and the package {package.module} here doesn't say its version. {remedy}"
    return "" if Version(found) >= Version(package.min_version) else f"{needs}, and here is {found}. {remedy}"
