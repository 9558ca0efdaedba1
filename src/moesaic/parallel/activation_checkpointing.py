"""Activation checkpointing of whole blocks in which the recomputation never routes again.

A router run twice can choose other experts (another summation order, a tie), and then the recomputed activations belong
to other tokens than the saved ones. So the results of some operators are kept instead of recomputed: the chosen top-k,
the exchanged counts, and the split sizes that the host read from them. What was sent to the experts and back is kept
too, so that nothing is sent a second time; or it isn't, and the same rows go the same ways again: that costs two
exchanges a layer, and saves K*T*H numbers on each of their two ends.

torch's selective checkpointing could keep them, but it replays a region operator by operator, and a block holds nested
FSDP units whose gathers run inside the region in one pass and ahead of it, prefetched, in the other. The two modes here
look at the kept operators only.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from moesaic.parallel.experts import ExpertLoad, expert_parallel, find_expert_modules

_TOPK = torch.ops.aten.topk.default
_EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
_HOST_READ = torch.ops.moesaic.copy_to_host.default

# Families whose routers take maxima of scores with noise.
CHOOSE_WITHOUT_TOPK = frozenset({"phimoe"})

Kept = defaultdict[Any, deque[Any]]


def _is_kept(func: Any, args: Any, keeps_tokens: bool) -> bool:
    if func is _EXCHANGE:
        return keeps_tokens or not args[0].is_floating_point()  # counts are integers
    return func is _TOPK or func is _HOST_READ


class _Keep(TorchDispatchMode):
    """Forward: remember each kept operator's results, in order."""

    def __init__(self, kept: Kept, keeps_tokens: bool) -> None:
        super().__init__()
        self._kept, self._keeps_tokens = kept, keeps_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args, self._keeps_tokens):
            # A copy of top-k: routers normalise its weights in place, which must not reach the kept ones.
            self._kept[func].append(tree_map_only(Tensor, Tensor.clone if func is _TOPK else Tensor.detach, out))
        return out


class _Replay(TorchDispatchMode):
    """Recomputation: hand out what was remembered, in the same order; everything else runs."""

    def __init__(self, kept: Kept, keeps_tokens: bool) -> None:
        super().__init__()
        self._kept, self._keeps_tokens = kept, keeps_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args, self._keeps_tokens):
            return func(*args, **(kwargs or {}))
        assert self._kept[func], f"{func} was called more often than in forward, or backward ran twice"
        return tree_map_only(Tensor, Tensor.detach, self._kept[func].popleft())


def apply_activation_checkpointing(model: nn.Module, blocks: Iterable[nn.Module], keeps_tokens: bool = True) -> None:
    """Recompute each block in backward, keeping its routing. In place.

    Args:
        blocks: transformers' ``GradientCheckpointingLayer``s.
        keeps_tokens: keep what was sent to experts and back, too; otherwise it is sent again in backward, where every
            rank of an EP group must then recompute the same blocks in the same order (as backward does).

    Raises:
        ValueError: a block has no checkpointing seam, or the family's router would choose anew.
    """
    model_type = model.config.model_type if isinstance(model, PreTrainedModel) else None
    if model_type in CHOOSE_WITHOUT_TOPK:
        raise ValueError(
            f"activation_checkpointing=true: the routers of model_type {model_type!r} choose without a top-k, so the "
            "recomputation couldn't keep their choice. Set activation_checkpointing=false for this model."
        )
    loads = [expert_parallel(module).load for module in find_expert_modules(model).values()]
    contexts = functools.partial(_contexts, loads, keeps_tokens)
    recompute = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    for block in blocks:
        if not isinstance(block, GradientCheckpointingLayer):
            raise ValueError(
                f"activation_checkpointing=true: {type(block).__name__} is not a GradientCheckpointingLayer of "
                "transformers. Set activation_checkpointing=false for this model."
            )
        layer = cast(Any, block)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = recompute


def _contexts(loads: list[ExpertLoad], keeps_tokens: bool) -> tuple[Any, Any]:
    """Contexts of one block's forward and recomputation, as ``checkpoint`` asks for them."""
    kept: Kept = defaultdict(deque)
    return _Keep(kept, keeps_tokens), _recomputing(_Replay(kept, keeps_tokens), loads)


@contextlib.contextmanager
def _recomputing(replay: _Replay, loads: list[ExpertLoad]) -> Iterator[None]:
    # A recomputed forward must not count its tokens a second time.
    for load in loads:
        load.paused = True
    try:
        with replay:
            yield
    finally:
        for load in loads:
            load.paused = False
