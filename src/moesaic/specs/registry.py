"""Which spec serves which model: one that was registered, or one that says nothing but the family's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moesaic.specs.base import ModelSpec

# The one table that a user extends; entries are added, never replaced silently.
_SPECS: dict[str, ModelSpec] = {}


def register_spec(spec: ModelSpec) -> None:
    """Make ``spec`` known under each of its model types.

    For a family of one's own this is needed only where something differs from the defaults: experts at transformers'
    experts seam are found without it. How the family's files name its tensors is told to transformers itself, with
    ``transformers.conversion_mapping.register_checkpoint_conversion_mapping``; loading and exporting follow it.

    Raises:
        ValueError: a model type is taken by another spec.
    """
    for model_type in spec.model_types:
        known = _SPECS.get(model_type)
        if known is not None and known != spec:
            raise ValueError(
                f"model_type={model_type!r} already has a spec ({known.name}). Each model type has one: "
                "choose another model_type, or pass the spec as an argument where the model is parallelized."
            )
    for model_type in spec.model_types:
        _SPECS[model_type] = spec


def find_spec(model_type: str) -> ModelSpec:
    """The spec of a ``config.json``'s ``model_type``: the registered one, or else the defaults under that name."""
    return _SPECS.get(model_type) or ModelSpec(model_types=(model_type,))


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that ``pattern`` matches, in the order given; ``*`` stands for exactly one path segment.

    Example: ``model.layers.*.mlp`` matches ``model.layers.3.mlp``, not ``model.layers.3.mlp.experts``.

    Raises:
        ValueError: nothing matches.
    """
    segment = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    matched = [name for name in names if segment.fullmatch(name)]
    if not matched:
        raise ValueError(f"pattern {pattern!r} matches no name in this model; a '*' stands for one path segment.")
    return matched
