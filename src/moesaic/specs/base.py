"""What moesaic has to know of a model family beforehand, as data. Torch-free.

Little: which modules hold experts, and how they compute, shows at transformers' experts seam once the model is built.
What is left is what a recipe's check reads from ``config.json`` without torch, and what a user wants otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

# How families call their numbers of routed experts, and of experts that a token chooses, in ``config.json``.
NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model family, where it differs from what the model itself shows.

    Attributes:
        model_types: values of ``model_type`` in ``config.json`` that this spec serves.
        experts: glob of the modules whose experts are split, ``*`` standing for one path segment; None: every module at
            transformers' experts seam.
        num_experts_fields, top_k_fields: names in ``config.json`` of the number of routed experts, and of those that a
            token chooses; the Hub's own files and those that transformers saves may differ. The first that is there
            counts.
    """

    model_types: tuple[str, ...]
    experts: str | None = None
    num_experts_fields: tuple[str, ...] = NUM_EXPERTS_FIELDS
    top_k_fields: tuple[str, ...] = TOP_K_FIELDS

    @property
    def name(self) -> str:
        """The family's name: its first model type."""
        return self.model_types[0]
