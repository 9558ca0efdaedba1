"""Whether an export of a model would have names that other programs read."""

from __future__ import annotations

from transformers import PreTrainedModel

from moesaic.model.seam import find_experts
from moesaic.weights.conversions import has_mapping
from moesaic.weights.source import recall_source


def require_known_layout(model: PreTrainedModel) -> None:
    """Nothing, for a model whose export has the names of its files on the Hub: it was loaded from such files, its
    family has a mapping in transformers, or it stacks no experts and so has its own names there.

    Raises:
        ValueError: the model stacks its experts, and how files name them isn't known.
    """
    stacked = find_experts(model)
    if stacked and recall_source(model) is None and not has_mapping(model):
        raise ValueError(
            f"model_type={model.config.model_type!r} stacks its experts (e.g. {next(iter(stacked))}), and transformers "
            "has no mapping that says how files name them: other programs couldn't load an export under the module's "
            "own names. Register one before, for example "
            "register_checkpoint_conversion_mapping(model_type, get_checkpoint_conversion_mapping('qwen3_moe')), both "
            "of transformers.conversion_mapping."
        )
