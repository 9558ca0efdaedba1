"""What a verification is of: the recipe as it is run (fp32), the model's folder, and against what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from moesaic.config import (
    Fsdp2Config,
    FsdpTurboConfig,
    ParallelSizes,
    Recipe,
    load_saved_recipe,
    num_micro_batches,
    resolve_sizes,
    save_recipe,
)
from moesaic.model.build import build_on_meta
from moesaic.runtime import device_type, free_memory_bytes
from moesaic.specs import match_names
from moesaic.verify.shrink import count_parameters, shrink_config, without_noise
from moesaic.verify.small_model import save_small_model

FOLDER, MODEL, RECIPE, PLAN = "verify", "model", "recipe.yaml", "plan.json"
MAX_MICRO_BATCHES = 2
# Weights, gradients, two moments, the weights before, and gradients and weights of a first run: fp32 each.
BYTES_PER_PARAMETER = 28
# Of what is free: the rest is activations', and other people's.
MEMORY_SHARE = 0.5
EXACT_ATTENTIONS = ("eager", "sdpa", "flex_attention")

Against = Literal["single", "hf"]
Shrink = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all processes of a verification agree on.

    Attributes:
        against: ``hf``: plain transformers; ``single``: moesaic itself; both in one process.
        world_size: ranks of the topology.
        is_shrunk: the model is a small one of the same structure, with weights of its own.
        num_parameters: of the model that is run.
        notes: what differs from the recipe, in sentences.
    """

    against: Against
    world_size: int
    is_shrunk: bool
    num_parameters: int
    notes: tuple[str, ...]


def save_plan(
    recipe: Recipe, folder: Path, *, against: Against = "hf", shrink: Shrink = "auto", world_size: int
) -> Plan:
    """Make ``folder`` anew: the plan, the recipe as it will be run, and the model. By one process.

    Args:
        folder: all ranks must see it. Weights of the model itself aren't copied: they are linked.
        shrink: ``auto``: where the model doesn't fit into one process' memory, in fp32 with its optimizer.

    Raises:
        ValueError: the model doesn't fit and ``shrink`` is ``never``, or no small model of its structure can be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / MODEL).mkdir(parents=True)
    sizes = resolve_sizes(recipe, world_size)
    config = AutoConfig.from_pretrained(recipe.model, local_files_only=True)
    num_parameters = count_parameters(_meta(config))
    reason = _why_shrunk(Path(recipe.model), config, num_parameters, shrink)
    notes = ["everything in fp32"]
    if reason:
        config, left_out = shrink_config(config, sizes)
        save_small_model(config, folder / MODEL, recipe.seed)
        small = _meta(config)
        notes.append(
            f"a shrunken copy with weights of its own: {num_parameters / 1e6:.1f}M -> "
            f"{count_parameters(small) / 1e6:.1f}M parameters ({reason})"
        )
        notes += [f"the family can't have less of this: {', '.join(left_out)}"] if left_out else []
        num_parameters = count_parameters(small)
    else:
        _link_model(Path(recipe.model), folder / MODEL)
    modules = {name for name, _ in _meta(config).named_modules()} if reason else set()
    recipe, changes = _as_run(recipe, folder, modules)
    save_recipe(recipe, folder / RECIPE)
    plan = Plan(
        against=against,
        world_size=world_size,
        is_shrunk=bool(reason),
        num_parameters=num_parameters,
        notes=(*notes, *changes),
    )
    (folder / PLAN).write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    return plan


def load_plan(folder: Path) -> tuple[Plan, Recipe]:
    """What ``save_plan`` wrote."""
    fields = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    return Plan(**{**fields, "notes": tuple(fields["notes"])}), load_saved_recipe(folder / RECIPE)


def count_micro_batches(recipe: Recipe, sizes: ParallelSizes) -> int:
    """The recipe's, but at most 2: what more of them would add is more of the same."""
    many = recipe.micro_batch_tokens is not None  # a number of its own for every step
    return MAX_MICRO_BATCHES if many else min(MAX_MICRO_BATCHES, num_micro_batches(recipe, sizes))


def on_one_rank(recipe: Recipe) -> Recipe:
    """The recipe with every axis of size 1."""
    dist_config = recipe.dist_config
    if not isinstance(dist_config, Fsdp2Config):
        alone: dict[str, Any] = {"ep_size": 1, "edp_size": None, "fsdp_implementation": "native"}
        dist_config = dist_config.model_copy(update=alone)
    sizes = {"cp_size": 1, "tp_size": 1, "mp_replicate_size": 1, "dp_size": None, "mp_shard_size": None}
    return recipe.model_copy(update={**sizes, "dist_config": dist_config})


def _why_shrunk(folder: Path, config: PreTrainedConfig, num_parameters: int, shrink: Shrink) -> str:
    """Empty where the model itself is run."""
    if shrink == "always":
        return "as asked for"
    needed, free = num_parameters * BYTES_PER_PARAMETER, free_memory_bytes(device_type()) * MEMORY_SHARE
    reason = ""
    if not any(folder.glob("*.safetensors")):
        reason = "the model's folder has no weights"
    elif needed > free:
        reason = f"one process would need {needed / 2**30:.0f} GiB for it, of {free / 2**30:.0f} that may be taken"
    elif any("quantization_config" in part for part in (config.to_dict(), config.get_text_config().to_dict())):
        reason = "its weights are quantized, which plain transformers would keep"
    if reason and shrink == "never":
        raise ValueError(f"shrink=never: {reason}. Choose auto, or a machine with more memory and plain weights.")
    return reason


def _link_model(source: Path, folder: Path) -> None:
    """The same weights under a config without dropout."""
    for path in source.iterdir():
        if path.is_file() and path.name != CONFIG_NAME:
            (folder / path.name).symlink_to(path.absolute())
    fields = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))
    (folder / CONFIG_NAME).write_text(json.dumps(without_noise(fields), indent=1), encoding="utf-8")


def _meta(config: PreTrainedConfig) -> torch.nn.Module:
    return build_on_meta(config, attn_implementation=None, dtype=torch.float32)


def _as_run(recipe: Recipe, folder: Path, modules: set[str]) -> tuple[Recipe, list[str]]:
    """The recipe in fp32, on the folder's model, and what else had to change.

    Args:
        modules: of a small model, which may not have all that the recipe's globs name; empty for the model itself.
    """
    changes: dict[str, Any] = {"model": str(folder / MODEL), "bf16": False, "master_dtype": None, "dump": None}
    notes: list[str] = []
    attention = recipe.attn_implementation
    if attention is not None and attention not in EXACT_ATTENTIONS:
        changes["attn_implementation"] = None
        notes.append(f"the attention that transformers picks in place of {attention}, which has no fp32")
    if not modules:
        return recipe.model_copy(update=changes), notes
    matches = _matcher(modules)
    changes["frozen_modules"] = _matching("frozen_modules", recipe.frozen_modules, matches, notes)
    dist_config = recipe.dist_config
    if not isinstance(dist_config, Fsdp2Config):
        ignored = _matching("fsdp_ignored_modules", dist_config.fsdp_ignored_modules, matches, notes)
        dist_config = dist_config.model_copy(update={"fsdp_ignored_modules": ignored})
    if isinstance(dist_config, FsdpTurboConfig):
        hooks = _matching("hook_modules", dist_config.hook_modules, matches, notes)
        dist_config = dist_config.model_copy(update={"hook_modules": hooks})
    return recipe.model_copy(update={**changes, "dist_config": dist_config}), notes


def _matcher(modules: set[str]) -> Callable[[str], bool]:
    def matches(glob: str) -> bool:
        try:
            return bool(match_names(glob, modules))
        except ValueError:
            return False

    return matches


def _matching(field: str, globs: Sequence[str], matches: Callable[[str], bool], notes: list[str]) -> tuple[str, ...]:
    """Those that name something in the model that is run: a layer that a small one lacks isn't named."""
    kept = tuple(glob for glob in globs if matches(glob))
    lost = [glob for glob in globs if glob not in kept]
    if lost:
        notes.append(f"{field} without {', '.join(lost)}, which the small model doesn't have")
    return kept
