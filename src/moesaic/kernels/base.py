"""What a kernel is: a named operator, its reference, and other implementations with what each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An optional package.

    Attributes:
        module: what is imported.
        distribution: what the metadata of its version is kept under.
        min_version: oldest version that does what the implementation relies on.
        install: what to hand to pip.
    """

    module: str
    distribution: str
    min_version: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        name: as the recipe's ``kernel_config.name`` lists it.
        build: ``build(reference, chunk_size)`` returns the function to call in the reference's place, with the same
            arguments. Imports of optional packages belong inside.
        device_types: where it runs; empty: everywhere.
        package: what must be installed.
        is_auto: ``auto`` takes it where it runs; otherwise only its own name does.
    """

    name: str
    build: Callable[[Function, int], Function]
    device_types: frozenset[str] = frozenset()
    package: Package | None = None
    is_auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator that model code calls by a global name.

    Attributes:
        name: as the recipe's ``kernel_config.include_kernels`` lists it.
        global_name: what it is called in the forward of a Hugging Face module. The function found there, without what
            was wrapped around it, is the reference.
        reference: how the reference itself is bound.
        implementations: the others; the first that is asked for and runs is taken.
    """

    name: str
    global_name: str
    reference: Implementation
    implementations: tuple[Implementation, ...] = ()
