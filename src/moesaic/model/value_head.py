"""Value models: a family's causal language model whose head has one column, a number for each token.

The rest of the class stays as it is, and with it everything that knows the class: positions at which logits are kept,
experts' seam, tensor and context parallelism. The head is tied to nothing. What a family does to logits behind its head
(a cap, a scale) is not done to values: a hook gives the head's own output in the place of the model's.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from moesaic.model.build import build_on_meta, find_config

# The field of configs by which hidden states are divided for the head; classifiers don't.
HIDDEN_SCALE = "logits_mup_width_multiplier"


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
    _give_as_logits(model, value_head)
    return model


def value_head_name(model: nn.Module) -> str | None:
    """The module that gives values, by its name in ``model``; None of a model with logits."""
    return next((name for name, module in model.named_modules() if isinstance(module, ValueHead)), None)


def _give_as_logits(model: PreTrainedModel, head: ValueHead) -> None:
    """The model's logits are what the head gave, untouched."""
    given: list[Tensor] = []

    def keep(_head: nn.Module, _args: Any, values: Tensor) -> None:
        given[:] = [values]

    def give(_model: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = given.pop()
        return output

    head.register_forward_hook(keep)
    model.register_forward_hook(give)


def _neutralize(config: PreTrainedConfig) -> None:
    config.tie_word_embeddings = False
    if HIDDEN_SCALE in config.to_dict():
        setattr(config, HIDDEN_SCALE, 1.0)
