"""Weights for a shrunken model: random, and such that its gradients and routes are as decided as a trained model's."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from moesaic.model.build import find_auto_class
from moesaic.model.seam import find_experts, num_experts

ROUTER_STD = 1.2


def save_small_model(config: PreTrainedConfig, folder: Path, seed: int) -> None:
    """Write a randomly initialised model in the Hub's keys, as transformers saves it. In one process."""
    torch.manual_seed(seed)
    model = find_auto_class(config).from_config(config, experts_implementation="eager").float()
    with torch.no_grad():
        _spread_routers(model)
        _slow_decays(model)
        _spread_hashes(model)
    model.save_pretrained(folder)


def _spread_routers(model: PreTrainedModel) -> None:
    """With usual initial weights all scores would nearly tie. A router is a matrix beside the experts, with a row for
    each of them."""
    for name, experts in find_experts(model).items():
        block = model.get_submodule(name.rpartition(".")[0])
        inside = {id(param) for param in experts.parameters()}
        for param in block.parameters():
            if param.ndim == 2 and param.size(0) == num_experts(experts) and id(param) not in inside:
                nn.init.normal_(param, std=ROUTER_STD / math.sqrt(param.size(1)))


def _slow_decays(model: PreTrainedModel) -> None:
    """Linear attention that forgets slowly: with the initial rates, up to 16 a token, the gradients of what sets the
    decay are mostly rounding."""
    for name, param in model.named_parameters():
        if name.endswith("linear_attn.A_log"):
            param.uniform_(-3, 0)


def _spread_hashes(model: PreTrainedModel) -> None:
    """A table from token ids to experts is all zeros before it is loaded: every token's experts would be the same."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            count = model.config.get_text_config().n_routed_experts
            table.copy_(torch.rand(table.size(0), count).argsort(dim=-1)[:, : table.size(1)])
