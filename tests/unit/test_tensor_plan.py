"""What tensor parallelism splits is found from the modules; beside it, what transformers' own plans name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.model.build import build_on_meta
from moesaic.parallel.outer import find_text_blocks
from moesaic.parallel.tensor import _find_split_modules
from moesaic.specs import match_names
from tests.families.configs import tiny_config

# Families with a plan for matrices that aren't experts', and that tp can split.
FAMILIES = (
    "qwen3_moe", "qwen2_moe", "mixtral", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe", "ernie4_5_moe",
    "dots1", "exaone_moe", "solar_open",
)  # fmt: skip


def named_in_plan(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """``columns`` or ``rows`` of each linear module that a plan names, by the module's name."""
    found = {}
    linears = {name: module for name, module in model.get_decoder().named_modules() if isinstance(module, nn.Linear)}
    for pattern, style in plan.items():
        kind = {"colwise": "columns", "rowwise": "rows"}.get(style)
        for name in linears if kind is not None else ():
            if name in _matching(pattern, linears):
                found[name] = kind
    return found


def _matching(pattern: str, names: dict[str, nn.Module]) -> list[str]:
    try:
        return match_names(pattern, names)
    except ValueError:  # of layers that the tiny model lacks
        return []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_models_own_plan_splits_is_split(family: str) -> None:
    config = tiny_config(family)
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
    plan = config.get_text_config().base_model_tp_plan or {}
    expected = named_in_plan(model, plan)
    names = {module: name for name, module in model.get_decoder().named_modules()}
    ours: dict[str, str] = {}
    for block in find_text_blocks(model):
        for found in _find_split_modules(block, names):
            ours |= {f"{found.name}.{name}": "columns" for name in found.columns}
            ours[f"{found.name}.{found.rows}"] = "rows"
    assert expected and expected.items() <= ours.items(), sorted(expected.items() - ours.items())
    assert {"columns", "rows"} == set(ours.values())
