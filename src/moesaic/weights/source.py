"""What a folder's files are to a model: which tensor fills what, what doesn't fit, and what the model has no use for.

A model remembers the folder it was loaded from, so that an export has the same tensors again: those that the model
holds, and the others (layers for multi-token prediction, a vision tower beside a text model) as the files have them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from moesaic.weights.agree import state_tensors, tied_names
from moesaic.weights.conversions import Derivation, derive_default_grids, derive_grids, original_class
from moesaic.weights.files import read_config, read_headers
from moesaic.weights.quantized import Stored, explain_unreadable, find_stored
from moesaic.weights.tiles import Grid, Shape
from moesaic.weights.value_head import place_value_head

logger = logging.getLogger(__name__)

# What may be cast to a parameter's dtype as it is.
CASTABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# How configs call the number of layers that predict more tokens, which files hold behind the model's own layers.
NUM_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Parts of a model for several media that its text model alone doesn't have.
OTHER_MEDIA = r"(^|\.)(visual|vision_\w+|audio_\w+|multi_modal_projector|embed_(vision|audio))\."
MAX_MISSING_PER_PARAMETER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where a model's weights came from.

    Attributes:
        folder: the model folder.
        grids: parameter or buffer -> the tiles that fill it; a tied one under the name that owns it. None for the head
            of a value model that the folder has none for.
        stored: key -> tensor, of all that a grid names.
        doubled: (tied parameter, tiles under another of its names) where the files hold both.
        kept: tensors that fill nothing and that the model declares ignorable; an export has them again.
    """

    folder: Path
    grids: Mapping[str, Grid]
    stored: Mapping[str, Stored]
    doubled: tuple[tuple[str, Grid], ...]
    kept: tuple[Stored, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the tensors that grids name."""
        keys = dict.fromkeys(tile.key for grid in self.grids.values() for tile in grid.tiles)
        return {key: self.stored[key].shape for key in keys}

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """Keys of the files that fill nothing: those that are kept, and further names of tied parameters."""
        others = [key for _, grid in self.doubled for tile in grid.tiles for key in self.stored[tile.key].keys]
        return tuple(key for stored in self.kept for key in stored.keys) + tuple(dict.fromkeys(others))


def remember_source(model: PreTrainedModel, source: WeightSource) -> None:
    """Note on ``model`` where its weights come from, for an export."""
    cast(Any, model).weight_source = source


def recall_source(model: PreTrainedModel) -> WeightSource | None:
    """What ``remember_source`` noted; None for a model that was made otherwise."""
    return vars(model).get("weight_source")


def match_folder(model: PreTrainedModel, folder: Path) -> WeightSource:
    """What fills what in ``model`` (on meta, or parallelized), from the headers of the folder's files alone. Pure: the
    same on every rank.

    Raises:
        ValueError: no safetensors; or keys that are missing, mis-shaped, of a dtype that can't be cast, or unknown, all
            of them in one message.
    """
    stored, problems = find_stored(read_headers(folder), read_config(folder))
    stored, made_new = place_value_head(stored, model)
    derivation = derive_grids(model, {key: each.shape for key, each in stored.items()})
    state = state_tensors(model)
    aliases = tied_names(model)
    grids, doubled = _choose_grids(state, aliases, derivation)
    problems += derivation.problems
    lost = [name for name in state if name not in grids and name not in made_new]
    problems += _missing(model, lost, aliases, derivation)
    problems += _dtype_problems(state, grids, stored)
    ignorable = _ignorable_pattern(model, folder)
    unknown = [key for key, name in derivation.unused.items() if not (ignorable and ignorable.search(name))]
    problems += [f"unknown: {key} {list(stored[key].shape)} fills nothing{_hint(stored[key])}" for key in unknown]
    if problems:
        raise ValueError(
            f"model={str(folder)!r} doesn't fit {original_class(model).__name__}; every weight must be there once, in "
            f"the right shape, and be used. {len(problems)} problems:\n  " + "\n  ".join(problems) + f"\n{_REMEDY}"
        )
    kept = tuple(stored[key] for key in derivation.unused)
    return WeightSource(folder=folder, grids=grids, stored=stored, doubled=doubled, kept=kept)


def log_kept(source: WeightSource) -> None:
    """Say what the model has no use for: how many tensors, and how they are called."""
    if source.kept:
        counts = Counter(_prefix(stored.key) for stored in source.kept)
        names = ", ".join(f"{prefix}.* ({count})" for prefix, count in counts.items())
        logger.info("%s: %d tensors fill nothing and are kept for exports: %s", source.folder, len(source.kept), names)


_REMEDY = (
    "Give the folder that belongs to this config.json. If transformers has no mapping from this family's files to its "
    "modules (or a wrong one), register it: transformers.conversion_mapping.register_checkpoint_conversion_mapping."
)


def _choose_grids(
    state: Mapping[str, torch.Tensor], aliases: Mapping[str, tuple[str, ...]], derivation: Derivation
) -> tuple[dict[str, Grid], tuple[tuple[str, Grid], ...]]:
    """The grid of each tensor: a file may hold a tied one under another of its names, or under several."""
    grids: dict[str, Grid] = {}
    doubled: list[tuple[str, Grid]] = []
    for name in state:
        found = [derivation.grids[each] for each in (name, *aliases.get(name, ())) if each in derivation.grids]
        if found:
            grids[name] = found[0]
            doubled += [(name, other) for other in found[1:]]
    return grids, tuple(doubled)


def _missing(
    model: PreTrainedModel, names: Iterable[str], aliases: Mapping[str, tuple[str, ...]], derivation: Derivation
) -> list[str]:
    """A line for each tensor of the Hub that would fill ``names``, a few per parameter."""
    lost = [name for name in names if not derivation.broken & {name, *aliases.get(name, ())}]
    if not lost:
        return []
    grids, shapes = derive_default_grids(model, lost)
    lines = []
    for name in lost:
        keys = list(dict.fromkeys(tile.key for tile in grids[name].tiles))
        lines += [f"missing: {key} {list(shapes[key])} (for {name})" for key in keys[:MAX_MISSING_PER_PARAMETER]]
        if len(keys) > MAX_MISSING_PER_PARAMETER:
            lines.append(f"missing: {len(keys) - MAX_MISSING_PER_PARAMETER} more like it (for {name})")
    return lines


def _dtype_problems(
    state: Mapping[str, torch.Tensor], grids: Mapping[str, Grid], stored: Mapping[str, Stored]
) -> list[str]:
    problems = []
    for name, grid in grids.items():
        for key in dict.fromkeys(tile.key for tile in grid.tiles) if state[name].is_floating_point() else ():
            if stored[key].scales is None and stored[key].values.dtype not in CASTABLE_DTYPES:
                dtype, why = stored[key].values.dtype, explain_unreadable(stored[key])
                problems.append(f"dtype: {key} is {dtype}{why}; {name} needs one of {sorted(CASTABLE_DTYPES)}")
    return problems


def _hint(stored: Stored) -> str:
    """A file's known fault."""
    if stored.key.endswith("_blocks") and stored.values.dtype in CASTABLE_DTYPES:
        return (
            ": plain values under a packed tensor's name, as transformers saves a dequantized MXFP4 model. Save it "
            "again with save_pretrained(..., save_original_format=False)"
        )
    return ""


def _ignorable_pattern(model: PreTrainedModel, folder: Path) -> re.Pattern[str] | None:
    """Names (by the model's renamings) of what may stay unused: what the Hugging Face class declares, layers for
    multi-token prediction, other media beside a text model, and buffers that old files hold and newer modules compute.
    """
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq$")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    fields = model.config.get_text_config().to_dict()
    num_layers = fields.get("num_hidden_layers")
    num_mtp = max((fields.get(name) or 0 for name in NUM_MTP_FIELDS), default=0)
    # transformers names the layer's number in the released sizes; here it is what this config says.
    patterns |= {rf"(^|\.)layers\.{num_layers + i}\." for i in range(num_mtp) if num_layers}
    if is_part_of_composite(model, read_config(folder)):
        patterns.add(OTHER_MEDIA)
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None


def is_part_of_composite(model: PreTrainedModel, config: Mapping[str, Any]) -> bool:
    """True for the text model of a folder whose ``config`` describes a model for several media."""
    text = config.get("text_config")
    return isinstance(text, dict) and config.get("model_type") != model.config.model_type


def _prefix(key: str) -> str:
    parts = key.split(".")
    if parts[0] != "model":
        return parts[0]
    return ".".join(parts[:3] if parts[1] == "layers" else parts[:2])
