"""Which spec names a model's tensors in the Hub's files, where the caller gives none; and when none is an error."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from moesaic.specs import ModelSpec, registered_specs


def choose_spec(model: PreTrainedModel, spec: ModelSpec | None) -> ModelSpec | None:
    """``spec``, or the one that is registered for the config's ``model_type``; None where there is neither."""
    return spec or registered_specs().get(model.config.model_type)


def require_spec(model: PreTrainedModel, spec: ModelSpec | None) -> ModelSpec | None:
    """``choose_spec``, for writing: None only for a model whose tensors all have their own names on the Hub.

    Raises:
        ValueError: there is no spec, and the model stacks its experts, which the Hub mostly stores one by one.
    """
    spec = choose_spec(model, spec)
    stacked = [] if spec is not None else find_stacked_experts(model)
    if stacked:
        raise ValueError(
            f"model_type={model.config.model_type!r} has no spec, but stacks its experts (e.g. {stacked[0]}): how the "
            "Hub names them isn't known, and other programs couldn't load them under the module's own names. "
            "Describe the family with moesaic.register_spec(ModelSpec(...)), or pass spec=ModelSpec(...)."
        )
    return spec


def find_stacked_experts(model: PreTrainedModel) -> list[str]:
    """Names of the stacked parameters, [experts, rows, cols], of a model class at transformers' experts seam."""
    # A class of the caller's own, or the one that FSDP derives, inherits the seam from a class of transformers.
    classes = [cast(type[PreTrainedModel], cls) for cls in type(model).__mro__ if issubclass(cls, PreTrainedModel)]
    if not any(cls._can_set_experts_implementation() for cls in classes):
        return []
    return [
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if not isinstance(module, _ConvNd)  # their kernels have three dims as well
        for name, param in module.named_parameters(recurse=False)
        if _is_stack(param)
    ]


def _is_stack(param: nn.Parameter) -> bool:
    return param.ndim == 3 and param.size(0) > 1
