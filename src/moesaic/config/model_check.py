"""What a recipe asks of its model's folder: its files, a known family, experts that ``ep_size`` splits. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moesaic.config.parallel import expert_split_problem
from moesaic.config.problem import Problem, show
from moesaic.config.recipe import Fsdp2Config, Recipe
from moesaic.specs import ModelSpec, registered_specs

# What weights are read from: one file, or the files that an index names.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# A tokenizer has at least one of these.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def model_problems(recipe: Recipe) -> Iterable[Problem]:
    """Problems of ``model``, and on path B of its experts. Path A (``fsdp2``) takes any model."""
    config = _read_config(Path(recipe.model))
    if isinstance(config, Problem):
        yield config
        return
    yield from _file_problems(Path(recipe.model))
    if any(part.get("output_router_logits") is True for part in _parts(config)):
        yield Problem(
            field="model",
            value=recipe.model,
            rule="not yet: output_router_logits of its config.json asks for the router's auxiliary loss, which "
            "would be left out",
            remedy="set output_router_logits to false in that config.json to train without it",
        )
    if isinstance(recipe.dist_config, Fsdp2Config):
        return
    model_type = config.get("model_type")
    spec = registered_specs().get(str(model_type))
    if spec is None:
        known = ", ".join(sorted(registered_specs()))
        yield Problem(
            field="model",
            value=recipe.model,
            rule=f"model_type {show(model_type)} of its config.json has no spec; known: {known}",
            remedy="dist_config.name: fsdp2 for a dense model; moesaic.register_spec(...) for another MoE",
        )
        return
    num_experts = _count_experts(config, spec)
    if num_experts is None:
        rule = f"its config.json has no {' or '.join(spec.num_experts_fields)} of at least 1, which {spec.name} needs"
        yield Problem(field="model", value=recipe.model, rule=rule, remedy="name a folder with a complete config.json")
        return
    problem = expert_split_problem(num_experts, recipe.ep_size)
    if problem is not None:
        yield problem


def packing_problems(recipe: Recipe) -> Iterable[Problem]:
    """Packed rows for a model whose ``config.json`` names linear-attention layers: their state doesn't restart."""
    config = _read_config(Path(recipe.model))
    if not recipe.packing or isinstance(config, Problem):
        return
    if any("linear_attention" in (part.get("layer_types") or ()) for part in _parts(config)):
        rule = "not yet: linear attention would carry its state from one packed sample into the next"
        yield Problem(field="packing", value=True, rule=rule, remedy="set packing: false")


def _read_config(folder: Path) -> Mapping[str, Any] | Problem:
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
    """Routed experts per layer."""
    for part in _parts(config):
        for field in spec.num_experts_fields:
            count = part.get(field)
            if isinstance(count, int) and count >= 1:
                return count
    return None


def _parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The config, and its ``text_config``, where a model of several parts (text and images) has what is the text's."""
    text_config = config.get("text_config")
    return (config, text_config) if isinstance(text_config, dict) else (config,)
