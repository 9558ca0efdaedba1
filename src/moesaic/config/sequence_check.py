"""What sharing sequences (``cp_size``, ``tp_size``) asks of a model's heads and attention. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moesaic.config.model_check import config_parts, read_config
from moesaic.config.parallel import divisors
from moesaic.config.problem import Problem
from moesaic.config.recipe import Recipe

# Whose masks and packed rows are made anew for the whole sequence.
SHARED_ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")


def sequence_problems(recipe: Recipe) -> Iterable[Problem]:
    """Problems of ``cp_size``, ``tp_size`` and ``attn_implementation`` with the model's ``config.json``."""
    if recipe.cp_size * recipe.tp_size == 1:
        return
    chosen = recipe.attn_implementation
    if chosen is not None and chosen not in SHARED_ATTENTIONS:
        rule = f"with cp_size or tp_size above 1, attention is one of {', '.join(SHARED_ATTENTIONS)}"
        yield Problem(field="attn_implementation", value=chosen, rule=rule, remedy="choose one of these, or remove it")
    config = read_config(Path(recipe.model))
    if isinstance(config, Problem):
        return
    for part in config_parts(config):
        yield from _head_problems(recipe, part)
        yield from _linear_head_problems(recipe, part)


def _head_problems(recipe: Recipe, part: Mapping[str, Any]) -> Iterable[Problem]:
    heads = part.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    tp_size, cp_size = recipe.tp_size, recipe.cp_size
    if heads % tp_size:
        rule, remedy = f"must divide the model's {heads} attention heads", f"choose one of {divisors(heads)}"
        yield Problem(field="tp_size", value=tp_size, rule=rule, remedy=remedy)
        return
    if heads // tp_size % cp_size:
        rule = f"must divide the {heads // tp_size} attention heads that a rank has ({heads} over tp_size {tp_size})"
        remedy = f"choose one of {divisors(heads // tp_size)}"
        yield Problem(field="cp_size", value=cp_size, rule=rule, remedy=remedy)
    kv_heads = part.get("num_key_value_heads")
    # Multi-head latent attention makes keys and values of all heads from a common low-rank part.
    if isinstance(kv_heads, int) and part.get("kv_lora_rank") is None and kv_heads % tp_size and tp_size % kv_heads:
        rule = f"must divide the model's {kv_heads} key and value heads, or be a multiple of them"
        legal = [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
        yield Problem(field="tp_size", value=tp_size, rule=rule, remedy=f"choose one of {legal}")


def _linear_head_problems(recipe: Recipe, part: Mapping[str, Any]) -> Iterable[Problem]:
    """Layers of linear attention are split by heads over all ranks of a sequence."""
    keys, values = part.get("linear_num_key_heads"), part.get("linear_num_value_heads")
    if not (isinstance(keys, int) and isinstance(values, int)) or "linear_attention" not in (
        part.get("layer_types") or ("linear_attention",)
    ):
        return
    ranks = recipe.cp_size * recipe.tp_size
    if values % ranks or (keys % ranks and ranks % keys):
        field, value = ("cp_size", recipe.cp_size) if recipe.cp_size > 1 else ("tp_size", recipe.tp_size)
        legal = [size for size in divisors(values) if keys % size == 0 or size % keys == 0]
        rule = f"cp_size * tp_size = {ranks} must divide {values} value heads of linear attention, and divide or be a "
        rule += f"multiple of {keys} key heads"
        yield Problem(field=field, value=value, rule=rule, remedy=f"choose sizes with a product among {legal}")
