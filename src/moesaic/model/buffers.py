"""Give a meta model storage: parameters uninitialised (their weights are loaded next), buffers computed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device | str) -> None:
    """Move ``model`` from meta to ``device``, in place. Parameters may already be DTensors (after ``fully_shard``).

    Parameters get storage and no values: load weights next. Tied tensors are tied again. Buffers get the values that
    transformers' own ``_init_weights`` gives them, in the dtype in which the module made them (rotary frequencies:
    fp32). The random state is left as it was. No communication.

    Raises:
        ValueError: a non-persistent buffer that ``_init_weights`` doesn't fill, or a tensor that is neither parameter
            nor buffer and so can't be moved; all of them, by name.
    """
    ties = _tied_groups(model)
    model.to_empty(device=device)
    _tie(model, ties)
    unfilled = [f"{name} (a plain attribute on meta)" for name in _meta_attributes(model)]
    buffers = dict(model.named_non_persistent_buffers())
    before = {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}
    _init_buffers(model, torch.device(device))
    for name, buffer in model.named_non_persistent_buffers():
        if before.get(name) == (id(buffer), buffer._version):
            unfilled.append(f"{name} (a non-persistent buffer)")
    if unfilled:
        raise ValueError(
            f"{type(model).__name__} can't be built on meta: nothing computes {unfilled}. Its _init_weights must fill "
            "every non-persistent buffer; use a transformers version in which it does."
        )


def _init_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Run transformers' initialisation with every parameter marked as done, so that only buffers change."""
    parameters = list(model.parameters())
    # Some families draw random values even for a parameter that is marked as done.
    with random_state_kept(device):
        for parameter in parameters:
            parameter._is_hf_initialized = True
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
        for parameter in parameters:
            del parameter._is_hf_initialized


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the random state, of the host and of ``device``, as it was, whatever is drawn within."""
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else [torch.accelerator.current_device_index() if device.index is None else device.index]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if not on_cpu:
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=device.type))
        yield


def _tied_groups(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that has more than one: (module, name on it)."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((module, name))
    return [group for group in places.values() if len(group) > 1]


def _tie(model: nn.Module, groups: list[list[tuple[nn.Module, str]]]) -> None:
    for (owner, owner_name), *others in groups:
        parameter = owner.get_parameter(owner_name)
        for module, name in others:
            module.register_parameter(name, parameter)


def _meta_attributes(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{prefix}.{name}"
