"""Modules that aren't trained: no gradients, no optimizer state, nothing in the norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from moesaic.specs import match_names


def freeze_modules(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the modules that the globs name, and all in them, out of training. In place, before sharding.

    A tied tensor is one: freezing the embedding freezes a head that is tied to it.

    Args:
        patterns: ``*`` stands for one path segment.

    Raises:
        ValueError: a glob matches nothing, or modules without parameters only; or nothing is left to train.
    """
    modules = dict(model.named_modules())
    for pattern in patterns:
        frozen = [modules[name] for name in match_names(pattern, modules)]
        if not any(True for module in frozen for _ in module.parameters()):
            raise ValueError(f"frozen_modules: {pattern!r} matches only modules without parameters; name their parent.")
        for module in frozen:
            module.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"frozen_modules: {list(patterns)} freeze the whole model; leave something to train.")
