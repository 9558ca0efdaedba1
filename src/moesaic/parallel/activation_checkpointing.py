"""Activation checkpointing of whole blocks in which the recomputation never routes again.

A router run twice can choose other experts (another summation order, a tie), and then the recomputed activations belong
to other tokens than the saved ones. So the results of two operators are kept instead of recomputed: the chosen top-k,
and what the exchanges returned (tokens and counts), which also means that nothing is sent a second time.

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
from transformers.modeling_layers import GradientCheckpointingLayer

from moesaic.parallel.experts import ExpertLoad, expert_parallel, find_expert_modules

# What is kept, and whether as a copy: routers normalise the top-k weights in place, which must not reach the kept ones.
_COPIED = {torch.ops.aten.topk.default: True, torch.ops._c10d_functional.all_to_all_single.default: False}

Kept = defaultdict[Any, deque[Any]]


class _Keep(TorchDispatchMode):
    """Forward: remember each kept operator's results, in order."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _COPIED:
            copy = Tensor.clone if _COPIED[func] else Tensor.detach
            self._kept[func].append(tree_map_only(Tensor, copy, out))
        return out


class _Replay(TorchDispatchMode):
    """Recomputation: hand out what was remembered, in the same order; everything else runs."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COPIED:
            return func(*args, **(kwargs or {}))
        assert self._kept[func], f"{func} was called more often than in forward, or backward ran twice"
        return tree_map_only(Tensor, Tensor.detach, self._kept[func].popleft())


def apply_activation_checkpointing(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Recompute each block in backward, keeping its routing and its exchanged tokens. In place.

    Args:
        blocks: transformers' ``GradientCheckpointingLayer``s.

    Raises:
        ValueError: a block has no checkpointing seam.
    """
    loads = [expert_parallel(module).load for module in find_expert_modules(model).values()]
    recompute = functools.partial(checkpoint, use_reentrant=False, context_fn=functools.partial(_contexts, loads))
    for block in blocks:
        if not isinstance(block, GradientCheckpointingLayer):
            raise ValueError(
                f"activation_checkpointing=true: {type(block).__name__} is not a GradientCheckpointingLayer of "
                "transformers. Set activation_checkpointing=false for this model."
            )
        layer = cast(Any, block)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = recompute


def _contexts(loads: list[ExpertLoad]) -> tuple[Any, Any]:
    """Contexts of one block's forward and recomputation, as ``checkpoint`` asks for them."""
    kept: Kept = defaultdict(deque)
    return _Keep(kept), _recomputing(kept, loads)


@contextlib.contextmanager
def _recomputing(kept: Kept, loads: list[ExpertLoad]) -> Iterator[None]:
    # A recomputed forward must not count its tokens a second time.
    for load in loads:
        load.paused = True
    try:
        with _Replay(kept):
            yield
    finally:
        for load in loads:
            load.paused = False
