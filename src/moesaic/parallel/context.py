"""Context parallelism: attention of ranks that share a sequence, at transformers' attention seam.

transformers calls a registered function as an attention's core, chosen by name in that module's config. Ours is
registered once; what it needs is kept on each attention module. It makes the mask of the whole sequence anew, from the
layout that travels with the batch (a rank's own inputs don't show it), and runs the attention that the user chose
(sdpa, flash attention) on all positions of some heads. A mode says how these come to a rank: ``ulysses`` exchanges
heads for positions. With tp alone nothing is exchanged: its ranks have gathered the positions, and hold own heads.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moesaic.meshes import Meshes
from moesaic.ops.attention_mask import Documents, build_flash_arguments, build_mask
from moesaic.ops.head_exchange import heads_to_positions, positions_to_heads, repeat_heads
from moesaic.ops.sequence import SequenceLayout, run_of
from moesaic.parallel.outer import find_text_blocks

ATTENTION_FUNCTION = "moesaic"
FLASH = ("flash_attention_2", "flash_attention_3")
BASES = ("sdpa", *FLASH)
# What the masks below describe. Layers of linear attention are split by another module, and see no mask.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "linear_attention", "moe"})
LINEAR_ATTENTION = "GatedDeltaNet"
CUT = "cut the batch with moesaic.data.shard.shard_batch, which passes sequence_layout"

Compute = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Mode(Protocol):
    """How the ranks of a cp group compute attention over a sequence that they share."""

    def problem(self, num_heads: int) -> str | None:
        """Why a rank's attention heads (after tp) can't be shared in this way, and the remedy; None where they can."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, compute: Compute) -> Tensor:
        """[B, S/P, H, D] of the rank's own positions; collective over the cp group, in forward and in backward.

        Args:
            query, key, value: [B, H, S/P, D]; key and value may have fewer heads, value another D.
            sinks_H: one number per head of the query, or None.
            compute: attention of whole sequences and of some heads: the same arguments, [B, S, H, D] out.
        """


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Heads are exchanged for positions: each rank computes the whole sequence for 1/P of the heads."""

    group: dist.ProcessGroup

    def problem(self, num_heads: int) -> str | None:
        """P must divide the heads; keys and values of fewer heads are repeated."""
        if num_heads % self.group.size() == 0:
            return None
        return f"a rank has {num_heads} attention heads, which cp_size must divide; choose a divisor of {num_heads}"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, compute: Compute) -> Tensor:
        """One exchange there, of all three, and one back."""
        size = self.group.size()
        repeated = [repeat_heads(part, size) for part in (key, value)]
        own_sinks = None if sinks_H is None else run_of(sinks_H, self.group.rank(), size)
        whole = heads_to_positions([query, *repeated], self.group)
        out = compute(whole[0], whole[1], whole[2], own_sinks)
        return positions_to_heads(out, self.group)


# Modes by the name that a recipe gives (``cp_mode``); an entry is all that a new one needs.
MODES: Mapping[str, Callable[[dist.ProcessGroup], Mode]] = MappingProxyType({"ulysses": Ulysses})


def build_mode(name: str, group: dist.ProcessGroup) -> Mode:
    """The mode called ``name`` over a cp group.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in MODES:
        raise ValueError(f"cp_mode={name!r}: unknown; choose one of {sorted(MODES)}.")
    return MODES[name](group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAttention:
    """What one attention module needs; lives on it as ``shared_attention``.

    Attributes:
        mode: None with tp alone.
        cp_size: ranks of a sequence, tp left out.
        config: the module's config before it got one of its own; it names the attention that the user chose.
    """

    mode: Mode | None
    cp_size: int
    config: PreTrainedConfig

    @property
    def base(self) -> str:
        """Name of the attention that the user chose."""
        return str(self.config._attn_implementation)


def apply_context_parallel(model: PreTrainedModel, meshes: Meshes, mode: str = "ulysses") -> None:
    """Let ``model`` attend over sequences that the ranks of ``meshes.sequence`` share. In place, before FSDP.

    Inputs are then parts (``data.shard.shard_batch``). Not collective; every rank must call it. ``model.config`` stays
    as it is: the modules concerned get configs of their own.

    Args:
        mode: name of the mode (recipe: ``cp_mode``).

    Raises:
        ValueError: attention that can't be shared in this way, all reasons in one message.
    """
    cp_mesh, tp_size = meshes.data["cp"], meshes.sizes.tp_size
    shared = build_mode(mode, cp_mesh.get_group()) if cp_mesh.size() > 1 else None
    attentions = find_attentions(model)
    problems = dict.fromkeys([*_model_problems(model), *_head_problems(attentions, shared, meshes)])
    if problems:
        sizes = f"cp_size={cp_mesh.size()}, tp_size={tp_size}"
        raise ValueError("\n".join(f"{sizes}: {model.config.model_type}: {problem}." for problem in problems))
    for module in attentions.values():
        config = cast(PreTrainedConfig, module.config)
        cast(Any, module).shared_attention = SharedAttention(mode=shared, cp_size=cp_mesh.size(), config=config)
        cast(Any, module).config = _named_config(config)
    decoder = cast(PreTrainedModel, model.get_decoder())
    assert decoder is not model, "the config of the model itself must stay as it is"
    decoder.register_forward_pre_hook(_prepare_layout, with_kwargs=True)
    decoder.config = _named_config(decoder.config)


def find_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Attention modules of the text blocks by name: those whose forward asks transformers' attention interface."""
    inside = {module for block in find_text_blocks(model) for module in block.modules()}
    return {name: m for name, m in model.named_modules() if m in inside and _is_at_seam(m)}


def _is_at_seam(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _knows_its_window(module: nn.Module) -> bool:
    """Whether attention has its window itself, or passes it on; a family may give it in its masks alone."""
    forward = inspect.unwrap(type(module).forward)
    consts = forward.__code__.co_consts
    names = [name for const in consts for name in (const if isinstance(const, tuple) else (const,))]
    return "sliding_window" in vars(module) or "sliding_window" in names


def _named_config(config: PreTrainedConfig) -> PreTrainedConfig:
    own = copy.copy(config)
    own._attn_implementation_internal = ATTENTION_FUNCTION  # the property would reach into shared sub-configs
    return own


def _model_problems(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    if config._attn_implementation not in BASES:
        # What transformers would refuse for this model is no remedy.
        able = ("sdpa",) * model._supports_sdpa + FLASH * model._supports_flash_attn
        remedy = f"choose {' or '.join(able)}" if able else "this model has no other; set cp_size and tp_size 1"
        yield f"attn_implementation={config._attn_implementation!r} can't attend over parts of sequences; {remedy}"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        yield f"layer_types {', '.join(unknown)} look at positions that a rank doesn't hold; set cp_size and tp_size 1"
    if getattr(config, "sliding_window", None):
        attentions = list(find_attentions(model).values())
        # A class, not a module: layers of full attention may lack the attribute.
        blind = {type(m) for m in attentions} - {type(m) for m in attentions if _knows_its_window(m)}
        if blind:
            names = ", ".join(sorted(kind.__name__ for kind in blind))
            yield f"{names}: its sliding window is only in a mask of a rank's own positions; set cp_size and tp_size 1"
    for block in find_text_blocks(model):
        unable = [module for module in block.modules() if _mixes_positions(module)]
        if unable or not any(_is_at_seam(m) or _is_linear_attention(m) for m in block.modules()):
            names = ", ".join(type(module).__name__ for module in unable or block.children())
            place = "elsewhere than at transformers' attention seam"
            yield f"{type(block).__name__} ({names}) mixes positions {place}; set cp_size and tp_size 1"


def _is_linear_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith(LINEAR_ATTENTION)


def _mixes_positions(module: nn.Module) -> bool:
    """A convolution along the sequence, which nobody here splits: that of a state space, or beside attention."""
    return not _is_linear_attention(module) and any(isinstance(child, nn.Conv1d) for child in module.children())


def _head_problems(attentions: dict[str, nn.Module], mode: Mode | None, meshes: Meshes) -> Iterator[str]:
    tp_size = meshes.sizes.tp_size
    for module in attentions.values():
        if not getattr(module, "is_causal", True):
            yield f"{type(module).__name__} isn't causal; set cp_size and tp_size 1"
        # How tp splits heads is tp's own to say.
        num_heads, rest = divmod(cast(int, cast(PreTrainedConfig, module.config).num_attention_heads), tp_size)
        problem = mode.problem(num_heads) if mode is not None and rest == 0 else None
        if problem is not None:
            yield problem


def _prepare_layout(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the decoder runs: refuse a batch that wasn't cut, and read on the host what attention needs.

    Here and not in the layers: recomputation hands out the host reads of a layer's first run, one by one.
    """
    layout = kwargs.get("sequence_layout")
    if layout is None or kwargs.get("attention_mask") is not None:
        raise ValueError(f"{type(decoder).__name__}: its ranks share each sequence, of which they hold parts: {CUT}.")
    if layout.documents_BS is not None and Documents not in layout.kept:
        layout.kept[Documents] = Documents.read(layout.documents_BS)


def attention_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """In place of transformers' masks, which would be those of a rank's own positions: none.

    Raises:
        ValueError: there is a mask that the layout doesn't describe.
    """
    if attention_mask is not None:
        raise ValueError(f"attention_mask: describes a rank's own positions only: {CUT}.")
    if use_vmap:
        raise ValueError("This model overlays its causal mask with another one; set cp_size and tp_size 1.")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention's core, as transformers calls it. Collective over the cp group, in forward and in backward.

    Args:
        query, key, value: [B, H, S/P, D] of the rank's positions and heads; key and value may have fewer heads.
        kwargs: those of the base attention, and ``sequence_layout``.

    Returns:
        [B, S/P, H, D], and None for the weights.

    Raises:
        ValueError: the batch isn't a part, or the model asks for what the base can't do on shared sequences.
    """
    state = cast(SharedAttention, cast(Any, module).shared_attention)
    layout = cast("SequenceLayout | None", kwargs.pop("sequence_layout", None))
    if layout is None or attention_mask is not None or query.size(2) * state.cp_size != layout.num_positions:
        raise ValueError(f"{type(module).__name__}: its ranks share each sequence, of which they hold parts: {CUT}.")
    sinks = kwargs.pop("s_aux", None)
    if sinks is not None and state.base not in FLASH:
        raise ValueError(f"{type(module).__name__}: attention sinks need attn_implementation {' or '.join(FLASH)}.")
    if kwargs.get("position_bias") is not None or not kwargs.pop("is_causal", True):
        raise ValueError(f"{type(module).__name__}: a position bias, or attention that isn't causal; set cp_size 1.")
    problem = state.mode.problem(query.size(1)) if state.mode is not None else None
    if problem is not None:
        raise ValueError(f"{type(module).__name__}: {problem}.")
    window = kwargs.pop("sliding_window", getattr(module, "sliding_window", None)) or None
    for of_own_positions in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(of_own_positions, None)
    compute = partial(_compute_whole, module, state, layout, window, kwargs)
    attend = compute if state.mode is None else partial(state.mode.attend, compute=compute)
    # Contiguous, as transformers' own attention functions give it: some models take views of it.
    return attend(query, key, value, sinks).contiguous(), None


def _compute_whole(
    module: nn.Module,
    state: SharedAttention,
    layout: SequenceLayout,
    window: int | None,
    kwargs: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
) -> Tensor:
    """The base attention over whole sequences: [B, S, H, D]."""
    own = cast(nn.Module, _LocalHeads(module, state.config, query.size(1) // key.size(1)))
    arguments, mask = dict(kwargs), None
    if state.base in FLASH:
        if "flash" not in layout.kept:
            layout.kept["flash"] = build_flash_arguments(layout, query.device)
        arguments |= layout.kept["flash"]
    else:
        if ("mask", window) not in layout.kept:
            layout.kept["mask", window] = build_mask(layout, window, query.device)
        mask = layout.kept["mask", window]
    if sinks_H is not None:
        arguments["s_aux"] = sinks_H
    base = ALL_ATTENTION_FUNCTIONS[state.base]
    out: Tensor = base(own, query, key, value, mask, is_causal=True, sliding_window=window, **arguments)[0]
    return out


class _LocalHeads:
    """An attention module as the base attention sees it: its own config, and the heads that were handed over."""

    def __init__(self, module: nn.Module, config: PreTrainedConfig, num_key_value_groups: int) -> None:
        self._module, self.config, self.num_key_value_groups = module, config, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


AttentionInterface.register(ATTENTION_FUNCTION, attention_forward)
AttentionMaskInterface.register(ATTENTION_FUNCTION, attention_mask)
