"""Give the modules of one model the kernels that were selected for it.

Model code calls an operator by a global name of its file. transformers binds that name when the file is imported, to
flash-linear-attention wherever that is installed. Neither the file nor its globals are touched here: each module gets a
forward of its own, the same code over a copy of those globals in which the names are bound as selected.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from moesaic.kernels.base import Function, Operator
from moesaic.kernels.registry import KernelChoice, KernelSelection

logger = logging.getLogger(__name__)


def apply_kernels(model: nn.Module, selection: KernelSelection) -> nn.Module:
    """Bind the selected implementation of every operator that ``model`` has, in place, and log it on the first rank.

    Before or after sharding; a second call replaces what the first one bound. Not collective.

    Raises:
        ValueError: what was asked for by name matches nothing in the model.
    """
    found = _find_operators(model, [choice.operator for choice in selection.choices])
    _refuse_unmatched(model, selection, frozenset(operator for names in found.values() for operator in names))
    for module, names in found.items():
        _bind(module, [choice for choice in selection.choices if choice.operator.name in names], selection)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for choice in {choice.operator.name: choice for choice in _bound(model)}.values():
            logger.log(logging.WARNING if choice.passed_over else logging.INFO, "%s", choice)
    return model


def find_bound_kernels(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What ``apply_kernels`` bound, by operator, for a run's records.

    Example: ``{"chunk_gated_delta_rule": {"implementation": "reference", "passed_over": "flash-linear-attention runs on
    cuda, npu, xpu, not on cpu", "num_modules": 30}}``
    """
    modules: dict[str, list[KernelChoice]] = defaultdict(list)
    for choice in _bound(model):
        modules[choice.operator.name].append(choice)
    return {
        name: {
            "implementation": choices[0].implementation.name,
            "passed_over": choices[0].passed_over or None,
            "num_modules": len(choices),
        }
        for name, choices in modules.items()
    }


def _bound(model: nn.Module) -> Iterable[KernelChoice]:
    for module in model.modules():
        if "bound_kernels" in module.__dict__:
            yield from cast(Any, module).bound_kernels


def _forward_of(module: nn.Module) -> types.FunctionType | None:
    """The class's forward without its decorators: the function whose globals the operators' names are looked up in."""
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, types.FunctionType) else None


def _find_operators(model: nn.Module, operators: Iterable[Operator]) -> Mapping[nn.Module, list[str]]:
    """Modules whose forward calls one of ``operators``, and which."""
    found: dict[nn.Module, list[str]] = {}
    for module in model.modules():
        forward = _forward_of(module)
        if forward is not None:
            known = set(forward.__code__.co_names) & forward.__globals__.keys()
            names = [operator.name for operator in operators if operator.global_name in known]
            if names:
                found[module] = names
    return found


def _refuse_unmatched(model: nn.Module, selection: KernelSelection, present: frozenset[str]) -> None:
    config = selection.config
    has = f"{type(model).__name__} has {', '.join(sorted(present)) or 'none of the known operators'}"
    problems = [
        f"kernel_config.include_kernels: {name} matches nothing in the model; {has}. Remove it from the list."
        for name in config.kernels
        if name not in present
    ]
    for name in config.names:
        offered = {
            choice.operator.name
            for choice in selection.choices
            if any(known.name == name for known in choice.operator.implementations)
        }
        # Where operators are listed too, the lines above have said what is wrong.
        if offered and not offered & present and not config.kernels:
            problems.append(f"kernel_config.name: {name} implements nothing in the model; {has}. Remove it.")
    if problems:
        raise ValueError("\n".join(problems))


def _bind(module: nn.Module, choices: list[KernelChoice], selection: KernelSelection) -> None:
    forward = _forward_of(module)
    assert forward is not None
    names = {
        choice.operator.global_name: choice.implementation.build(
            _find_reference(forward.__globals__[choice.operator.global_name]), selection.config.chunk_size
        )
        for choice in choices
    }
    # The decorator left out here calls accelerate's hooks, with which no model of ours is offloaded.
    own = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, **names},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    cast(Any, module).forward = types.MethodType(own, module)
    cast(Any, module).bound_kernels = tuple(choices)


def _find_reference(function: Any) -> Function:
    """The PyTorch function under what transformers wrapped around it: a call of fla, a warning, and, where the package
    ``kernels`` is installed, a module that package makes of the function."""
    if isinstance(function, nn.Module):
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.unwrap(function)
