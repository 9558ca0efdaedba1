"""A small config with the structure of a large one: fewer layers of every kind, narrower, with the same experts.

Head dims, head ratios, numbers of experts, groups and top-k stay; so does what the topology divides: a size that the
number of ranks divided still is divided. Families differ in what else their sizes must satisfy, so what was made is
tried: a forward and a backward pass of the small model. A change that a family can't take is left out.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from moesaic.config import ParallelSizes
from moesaic.model.build import build_on_meta, find_auto_class
from moesaic.parallel.outer import find_text_blocks

HIDDEN_SIZE, WIDTH, VOCAB_SIZE, WINDOW = 64, 32, 128, 8
# Weights as decided as a trained model's: with the usual 0.02 gradients are small beside their rounding.
INITIALIZER_RANGE = 0.06
# Larger, nobody wants to wait for it.
MAX_PARAMETERS = 2**28
NOISE_FIELDS = ("dropout", "pdrop", "jitter_noise")
TOKEN_FIELDS = ("token_id", "token_index")
LAYER_COUNTS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """The config as fields: of the whole model, and of its language model (the same, or a part of it).

    ``num_layers`` are to be kept; ``head_dim`` is the original's, where its config derives it.
    """

    whole: Fields
    text: Fields
    num_layers: int
    head_dim: int
    sizes: ParallelSizes


def shrink_config(config: PreTrainedConfig, sizes: ParallelSizes) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """A small config of the same structure, and the names of the changes that the family couldn't take.

    Args:
        config: of the whole model; not changed.
        sizes: of the topology that the small model must still fit.

    Raises:
        ValueError: no small model of this family could be made.
    """
    num_layers = count_layers_of_every_kind(config)
    reason = ""
    for num_left_out in range(len(_CHANGES)):
        for left_out in itertools.combinations(_CHANGES, num_left_out):
            draft = _draft_of(config, num_layers, sizes)
            for name, change in _CHANGES.items():
                if name not in left_out:
                    change(draft)
            try:
                small = type(config).from_dict(without_noise(draft.whole))
                _try_out(small)
            except Exception as error:  # whatever a family's own code says of sizes that it can't have
                reason = f"{type(error).__name__}: {error}"
            else:
                return small, left_out
    raise ValueError(
        f"model_type={config.model_type!r}: no small model of its structure could be made ({reason}). "
        "Set shrink to never, on a machine that holds the whole."
    )


def without_noise(fields: Fields) -> Fields:
    """The fields of a config (copied) with dropout and router noise off: no two topologies draw the same."""
    clean = copy.deepcopy(fields)
    for part in _parts(clean):
        for key, value in part.items():
            if isinstance(value, float) and key.endswith(NOISE_FIELDS):
                part[key] = 0.0
    return clean


def special_tokens(config: PreTrainedConfig) -> frozenset[int]:
    """Ids that mean something to the model's code: padding, images, ends."""
    found: set[int] = set()
    for part in _parts(config.to_dict()):
        for key, value in part.items():
            if key.endswith(TOKEN_FIELDS):
                found.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    return frozenset(found)


def count_layers_of_every_kind(config: PreTrainedConfig) -> int:
    """The smallest number of first layers that has a layer of every kind; 2 where all are alike."""
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
    kinds = layer_kinds(model)
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    return max(min(2, len(kinds)), *(number + 1 for number in first.values()))


def layer_kinds(model: PreTrainedModel) -> list[tuple[Any, ...]]:
    """What each layer of the language model is: its modules' classes, and what the config's lists say of it."""
    blocks = find_text_blocks(model)
    fields = model.config.get_text_config().to_dict()
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == len(blocks)]
    lists = [value for value in lists if not any(isinstance(one, float) for one in value)]  # a range, not kinds
    return [
        (*((name, type(module).__name__) for name, module in block.named_modules()), *(str(one[i]) for one in lists))
        for i, block in enumerate(blocks)
    ]


def _draft_of(config: PreTrainedConfig, num_layers: int, sizes: ParallelSizes) -> _Draft:
    whole = copy.deepcopy(config.to_dict())
    whole.pop("quantization_config", None)
    text = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    text.pop("quantization_config", None)
    for part in (whole, text):
        if "initializer_range" in part:
            part["initializer_range"] = INITIALIZER_RANGE
    head_dim = text["hidden_size"] // text.get("num_attention_heads", 1)
    return _Draft(whole=whole, text=text, num_layers=num_layers, head_dim=head_dim, sizes=sizes)


def _parts(fields: Fields) -> Iterator[Fields]:
    """The fields, and those of every config in them."""
    yield fields
    for key, value in fields.items():
        if key.endswith("config") and isinstance(value, dict):
            yield from _parts(value)


def _cut_layers(part: Fields, count: int) -> None:
    """Keep the first ``count`` layers, in lists of one entry a layer too; lists of layers' numbers lose the others."""
    field = next((name for name in LAYER_COUNTS if isinstance(part.get(name), int)), None)
    if field is None or part[field] <= count:
        return
    total = part[field]
    part[field] = count
    for key, value in part.items():
        if not isinstance(value, list):
            continue
        if len(value) == total:
            part[key] = value[:count]
        elif ("layers" in key or "indexes" in key) and all(isinstance(one, int) for one in value):
            part[key] = [one for one in value if one < count]


def _fewer_layers(draft: _Draft) -> None:
    _cut_layers(draft.text, draft.num_layers)


def _smaller_towers(draft: _Draft) -> None:
    """Towers of images and sound are loaded, and no text runs them."""
    for part in _parts(draft.whole):
        if part is not draft.whole and part is not draft.text:
            _cut_layers(part, 1)


def _fewer_heads(draft: _Draft) -> None:
    """Per kind of attention: as few K/V heads as tp and cp let be, at least 2, and the same number of Q heads each."""
    text, ranks = draft.text, draft.sizes.tp_size * draft.sizes.cp_size
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        num_many = text.get(many)
        num_few = text.get(few) or num_many
        if not isinstance(num_many, int) or not isinstance(num_few, int) or num_many % num_few:
            continue
        small = next(
            n
            for n in range(min(2, num_few), num_few + 1)
            if num_few % n == 0
            and (num_few % ranks or n % ranks == 0)
            and (num_many % ranks or n * num_many // num_few % ranks == 0)
        )
        text[many] = small * num_many // num_few
        if text.get(few) is not None:
            text[few] = small


def _narrower(draft: _Draft) -> None:
    """The hidden size. Where it says how large a head is, heads keep their size."""
    text = draft.text
    old, heads = text["hidden_size"], text.get("num_attention_heads")
    has_own_heads = any(text.get(name) for name in ("head_dim", "v_head_dim", "qk_nope_head_dim"))
    if has_own_heads or heads is None:
        new = _round_up(HIDDEN_SIZE, math.gcd(old, draft.sizes.world_size))
    else:
        new = heads * draft.head_dim
    if new >= old:
        return
    for part in _parts(draft.whole):
        for key, value in part.items():
            is_text = part is text and key == "hidden_size"
            if value == old and (is_text or ("hidden_size" in key and part is not text and key != "hidden_size")):
                part[key] = new
    expand = text.get("mamba_expand", text.get("expand"))
    for heads_name, dim_name in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
        if expand and isinstance(text.get(dim_name), int) and text[heads_name] * text[dim_name] == expand * old:
            text[heads_name] = max(1, expand * new // text[dim_name])


def _thinner(draft: _Draft) -> None:
    """The widths of experts and MLPs; different ones stay different."""
    names = [key for key, value in draft.text.items() if key.endswith("intermediate_size") and isinstance(value, int)]
    for order, old in enumerate(sorted({draft.text[name] for name in names})):
        new = _round_up(WIDTH + 16 * order, math.gcd(old, draft.sizes.world_size))
        for name in names:
            if draft.text[name] == old and new < old:
                draft.text[name] = new


def _smaller_vocabulary(draft: _Draft) -> None:
    """Special tokens keep being different: those beyond the small vocabulary get its last numbers."""
    old = draft.text["vocab_size"]
    new = _round_up(VOCAB_SIZE, math.gcd(old, draft.sizes.world_size))
    if new >= old:
        return
    renumbered: dict[int, int] = {}
    for part in _parts(draft.whole):
        for key, value in part.items():
            if "vocab_size" in key and isinstance(value, int) and (part is draft.text or value == old) and value > new:
                part[key] = new
            elif key.endswith(TOKEN_FIELDS):
                many = value if isinstance(value, list) else [value]
                for one in many:
                    if isinstance(one, int) and one >= new:
                        renumbered.setdefault(one, new - 1 - len(renumbered))
                small = [renumbered.get(one, one) for one in many]
                part[key] = small if isinstance(value, list) else small[0]


def _shorter_windows(draft: _Draft) -> None:
    """So that short documents are longer than the window."""
    if isinstance(draft.text.get("sliding_window"), int):
        draft.text["sliding_window"] = min(WINDOW, draft.text["sliding_window"])


# By name, in order; from the last one on they are left out where a family can't take them.
_CHANGES: dict[str, Callable[[_Draft], None]] = {
    "layers": _fewer_layers,
    "vocabulary": _smaller_vocabulary,
    "widths": _thinner,
    "heads": _fewer_heads,
    "hidden size": _narrower,
    "towers": _smaller_towers,
    "windows": _shorter_windows,
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _try_out(config: PreTrainedConfig) -> None:
    """Forward and backward of a few tokens, in memory that nobody misses."""
    size = count_parameters(build_on_meta(config, attn_implementation=None, dtype=torch.float32))
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would still have {size / 1e6:.0f}M parameters")
    model = find_auto_class(config).from_config(config, experts_implementation="eager").float().train()
    usable = sorted(set(range(config.get_text_config().vocab_size)) - special_tokens(config))
    logits = model(input_ids=torch.tensor([usable[:5]]), use_cache=False).logits
    logits.square().mean().backward()


def count_parameters(model: nn.Module) -> int:
    """Of all parameters, tied ones once."""
    return sum(param.numel() for param in model.parameters())
