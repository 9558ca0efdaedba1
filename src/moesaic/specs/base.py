"""What moesaic has to know of a model family, as data. Torch-free.

A spec names places in the unmodified Hugging Face module (globs whose ``*`` stands for exactly one path segment) and
how the Hub's files hold the experts. Nothing in it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParam:
    """One stacked parameter of an experts module, ``[E, rows, cols]``, and the Hub tensors that fill one expert of it.

    Attributes:
        name: parameter name on the experts module, e.g. ``gate_up_proj``.
        hub_parts: names behind ``<experts>.<i>.`` in a per-expert checkpoint; their rows (dim 0 of each) follow one
            another in this order along the rows (dim 1) of the stacked parameter. All parts have the same size.
            Example: ``("gate_proj.weight", "up_proj.weight")``, each ``[I, H]``, fill ``gate_up_proj[i]``, ``[2I, H]``.
    """

    name: str
    hub_parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model family.

    Attributes:
        model_types: values of ``model_type`` in ``config.json`` that this spec serves.
        experts: glob of the modules that hold the stacked routed experts.
        expert_params: the stacked parameters of an experts module.
        hub_layout: how the Hub stores experts, and so how they are exported: one tensor per expert, or stacked exactly
            as in the module. Loading takes either.
        hub_renames: (in the module's name, in the Hub's key) substrings that differ between the two.
        other_prefixes: (prefix of the module's names, what some folders have in its place). Loading takes either;
            exports have the module's.
        top_k_field: name in ``config.json`` of the number of experts a token chooses.
        num_experts_fields: names in ``config.json`` of the number of routed experts; the Hub's own files and those that
            transformers saves may differ. The first that is there counts.
    """

    model_types: tuple[str, ...]
    experts: str = "model.layers.*.mlp.experts"
    expert_params: tuple[ExpertParam, ...] = (
        ExpertParam(name="gate_up_proj", hub_parts=("gate_proj.weight", "up_proj.weight")),
        ExpertParam(name="down_proj", hub_parts=("down_proj.weight",)),
    )
    hub_layout: Literal["per_expert", "stacked"] = "per_expert"
    hub_renames: tuple[tuple[str, str], ...] = ()
    other_prefixes: tuple[tuple[str, str], ...] = ()
    num_experts_fields: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k_field: str = "num_experts_per_tok"

    @property
    def name(self) -> str:
        """The family's name: its first model type."""
        return self.model_types[0]
