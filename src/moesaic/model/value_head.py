"""Value models: a family's causal language model whose head has one column, a number for each token.

The rest of the class stays as it is, and with it everything that knows the class: positions at which logits are kept,
experts' seam, tensor and context parallelism. The head is tied to nothing, and what a family does to logits behind its
head (a cap, a scale) is switched off.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from moesaic.model.build import build_on_meta, find_config

# Fields of configs that say what is done to logits, with what leaves them as they are.
LOGIT_FIELDS: Mapping[str, float | None] = MappingProxyType(
    {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
)


class ValueHead(nn.Linear):
    """Hidden states [..., H] -> values [..., 1], in memory of their own: torch gives a product with one column as a
    view, which FSDP warns of."""

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        return super().forward(input).clone()


def build_value_model_on_meta(
    folder: str | Path, *, attn_implementation: str | None, dtype: torch.dtype, has_bias: bool = False
) -> PreTrainedModel:
    """As ``build_on_meta``, with a head of one column, to be found by ``value_head_name``.

    Args:
        has_bias: the head adds one number to all (as a token classifier's does).

    Raises:
        ValueError: as ``build_on_meta``; or the family's language model has no linear head.
    """
    config = copy.deepcopy(find_config(folder))
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        _neutralize(part)
    model = build_on_meta(config, attn_implementation=attn_implementation, dtype=dtype)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"model={str(folder)!r}: {type(model).__name__} has no linear head to put values in place of.")
    name = next(name for name, module in model.named_modules() if module is head)
    value_head = ValueHead(head.in_features, 1, bias=has_bias, device="meta", dtype=head.weight.dtype)
    model.set_output_embeddings(value_head)
    assert value_head_name(model) == name
    return model


def value_head_name(model: nn.Module) -> str | None:
    """The module that gives values, by its name in ``model``; None of a model with logits."""
    return next((name for name, module in model.named_modules() if isinstance(module, ValueHead)), None)


def _neutralize(config: PreTrainedConfig) -> None:
    fields = config.to_dict()
    config.tie_word_embeddings = False
    for name, neutral in LOGIT_FIELDS.items():
        if fields.get(name) is not None:
            setattr(config, name, neutral)
