"""Which spec serves which model. An unknown model is an error that lists the known ones, never a silent skip."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moesaic.specs import mixtral, qwen2_moe, qwen3_5_moe, qwen3_moe
from moesaic.specs.base import ModelSpec

BUILT_IN_SPECS: tuple[ModelSpec, ...] = (qwen3_moe.SPEC, qwen2_moe.SPEC, qwen3_5_moe.SPEC, mixtral.SPEC)

# The one table that a user extends; entries are added, never replaced silently.
_SPECS: dict[str, ModelSpec] = {}


def register_spec(spec: ModelSpec) -> None:
    """Make ``spec`` known under each of its model types.

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


def registered_specs() -> Mapping[str, ModelSpec]:
    """Read-only view: model type -> spec."""
    return MappingProxyType(_SPECS)


def find_spec(model_type: str) -> ModelSpec:
    """The spec of a ``config.json``'s ``model_type``.

    Raises:
        ValueError: no spec serves it; the message lists those that exist and the remedy.
    """
    if model_type not in _SPECS:
        raise ValueError(
            f"model_type={model_type!r} has no spec. Known: {', '.join(sorted(_SPECS))}. "
            "Describe the family with moesaic.register_spec(ModelSpec(...))."
        )
    return _SPECS[model_type]


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


for _spec in BUILT_IN_SPECS:
    register_spec(_spec)
