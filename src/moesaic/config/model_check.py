"""What a recipe asks of its model's folder: files, a trainable family, experts that ``ep_size`` splits. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moesaic.config.parallel import expert_split_problem
from moesaic.config.problem import Problem, show
from moesaic.config.recipe import Fsdp2Config, Recipe
from moesaic.specs import ModelSpec, find_spec, refusal

# What weights are read from: one file, or the files that an index names.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# gemma4's: False leaves its layers without experts, whatever their number is said to be.
EXPERTS_SWITCH = "enable_moe_block"
# What tells one quantisation from another.
QUANTIZATION_FIELDS = ("quant_method", "weight_block_size", "activation_scheme", "expert_dtype")
# A tokenizer has at least one of these.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def model_problems(recipe: Recipe) -> Iterable[Problem]:
    """Problems of ``model``, and on path B of its experts. Path A (``fsdp2``) takes any model."""
    config = read_config(Path(recipe.model))
    if isinstance(config, Problem):
        yield config
        return
    yield from _quantization_problems(recipe, config)
    if isinstance(recipe.dist_config, Fsdp2Config):
        return
    yield from _expert_problems(recipe, config)


def model_file_problems(recipe: Recipe) -> Iterable[Problem]:
    """Weights and a tokenizer that the model's folder lacks, as far as their files' names show."""
    if not isinstance(read_config(Path(recipe.model)), Problem):
        yield from _file_problems(Path(recipe.model))


def _expert_problems(recipe: Recipe, config: Mapping[str, Any]) -> Iterable[Problem]:
    """What path B asks of a model: a family that it can train, with experts that ``ep_size`` splits."""
    model_type = str(config.get("model_type"))
    reason = refusal(model_type)
    if reason is not None:
        yield Problem(
            field="model",
            value=recipe.model,
            rule=f"model_type {show(model_type)} can't be trained with expert parallelism: {reason}",
            remedy="dist_config.name: fsdp2, where transformers has a causal language model of it, or another model",
        )
        return
    spec = find_spec(model_type)
    num_experts = _count_experts(config, spec)
    if num_experts is None:
        yield Problem(
            field="model",
            value=recipe.model,
            rule=f"its config.json (model_type {show(model_type)}) has no experts: none of "
            f"{', '.join(spec.num_experts_fields)} is 1 or more",
            remedy="dist_config.name: fsdp2 for a model without experts; for an MoE with other field names, "
            "moesaic.register_spec(ModelSpec(num_experts_fields=...))",
        )
        return
    problem = expert_split_problem(num_experts, recipe.ep_size)
    if problem is not None:
        yield problem


def packing_problems(recipe: Recipe) -> Iterable[Problem]:
    """Packed rows for a model whose ``config.json`` names linear-attention layers: their state doesn't restart."""
    config = read_config(Path(recipe.model))
    if not recipe.shares_rows or isinstance(config, Problem):
        return
    if any("linear_attention" in (part.get("layer_types") or ()) for part in config_parts(config)):
        rule = "not yet: linear attention would carry its state from one packed sample into the next"
        if recipe.packing:
            yield Problem(field="packing", value=True, rule=rule, remedy="set packing: false")
        else:
            value = recipe.micro_batch_tokens
            yield Problem(field="micro_batch_tokens", value=value, rule=rule, remedy="set micro_batch_size instead")


def _quantization_problems(recipe: Recipe, config: Mapping[str, Any]) -> Iterable[Problem]:
    """Quantised weights that loading doesn't unpack. fp8 by blocks and MXFP4 it does; training is then in plain types,
    and so are exports."""
    for part in config_parts(config):
        quantization = part.get("quantization_config")
        if not isinstance(quantization, dict):
            continue
        method = quantization.get("quant_method")
        block = quantization.get("weight_block_size")
        if method == "mxfp4":
            continue
        if method == "fp8" and isinstance(block, list) and len(block) == 2:
            if quantization.get("activation_scheme", "dynamic") == "dynamic" and not quantization.get("expert_dtype"):
                continue
        shown = {name: quantization.get(name) for name in QUANTIZATION_FIELDS if quantization.get(name) is not None}
        yield Problem(
            field="model",
            value=recipe.model,
            rule=f"its weights are quantized in a way that isn't unpacked on loading ({shown}); known: fp8 with a "
            "weight_block_size and dynamic activations, and mxfp4",
            remedy="name a folder of plain weights (bf16): the release that was quantized, or a dequantized copy of it",
        )
        return


def read_config(folder: Path) -> Mapping[str, Any] | Problem:
    """The folder's config.json, or why there is none."""
    path = folder / "config.json"
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else f"no such folder (seen from {Path.cwd()})"
        remedy = f"correct the path, or download the model first: hf download <name on the Hub> --local-dir {folder}"
        return Problem(field="model", value=str(folder), rule=what, remedy=remedy)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule, remedy = f"{path} can't be read as JSON: {error}", "download the model again"
        return Problem(field="model", value=str(folder), rule=rule, remedy=remedy)
    if not isinstance(config, dict):
        return Problem(
            field="model", value=str(folder), rule=f"{path} holds no object", remedy="download the model again"
        )
    return config


def _file_problems(folder: Path) -> Iterable[Problem]:
    """Weights and tokenizer, as far as their files' names show."""
    lost: list[str] = []
    if not (folder / SINGLE_FILE).is_file():
        lost = _missing_shards(folder / INDEX_FILE)
    if lost:
        rule = f"lacks {', '.join(lost[:3])}{f' and {len(lost) - 3} more files' if len(lost) > 3 else ''}"
        remedy = "download the model again; other formats: convert them with transformers' save_pretrained"
        yield Problem(field="model", value=str(folder), rule=rule, remedy=remedy)
    if not any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        rule, remedy = "has no tokenizer: none of " + ", ".join(TOKENIZER_FILES), "copy the tokenizer's files there"
        yield Problem(field="model", value=str(folder), rule=rule, remedy=remedy)


def _missing_shards(index: Path) -> list[str]:
    """The files that an index names and that aren't there, or that there is no index."""
    if not index.is_file():
        return [f"{SINGLE_FILE} or {INDEX_FILE}"]
    try:
        names = dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"a readable {INDEX_FILE} ({type(error).__name__}: {error})"]
    return [str(name) for name in names if not (index.parent / str(name)).is_file()]


def _count_experts(config: Mapping[str, Any], spec: ModelSpec) -> int | None:
    """Routed experts per layer; None for a model without any."""
    for part in config_parts(config):
        if part.get(EXPERTS_SWITCH) is False:
            return None
        for field in spec.num_experts_fields:
            count = part.get(field)
            if isinstance(count, int) and count >= 1:
                return count
    return None


def config_parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The config, and its ``text_config``, where a model of several parts (text and images) has what is the text's."""
    text_config = config.get("text_config")
    return (config, text_config) if isinstance(text_config, dict) else (config,)
