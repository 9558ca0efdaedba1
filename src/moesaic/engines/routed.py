"""Which experts each token visited while it was generated: heard at transformers' experts seam, engine ``hf``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.model.seam import find_experts


class RoutedExperts:
    """Keeps the chosen experts of each forward until ``take``, and what each completion's positions add up to.

    Sizes: T tokens of a forward, L MoE layers in the model's order, K experts per token.
    """

    def __init__(self, model: nn.Module) -> None:
        self._experts = find_experts(model)
        self._heard: dict[str, Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks on the experts, for as long as the context lasts."""
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in self._experts.items()]
        try:
            yield
        finally:
            self._heard = {}
            for handle in handles:
                handle.remove()

    def take(self) -> Tensor:
        """int32 ``[T, L, K]`` of the last forward, on its device.

        Raises:
            ValueError: layers that choose different numbers of experts.
        """
        heard, self._heard = self._heard, {}
        if len({ids.shape for ids in heard.values()}) > 1:
            shapes = {name: tuple(ids.shape) for name, ids in heard.items()}
            raise ValueError(f"routed experts of layers don't stack: {shapes}; make the engine without routed_experts.")
        return torch.stack([heard[name] for name in self._experts if name in heard], dim=1).int()

    def _hook(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._heard[name] = cast(Tensor, args[1])  # (hidden_states, top_k_index, top_k_weights)

        return hook


def join(pieces: Sequence[tuple[int, Tensor]], num_positions: int) -> Tensor:
    """int32 ``[num_positions, L, K]`` on the host, of (first position, ``[n, L, K]``) pieces; a later piece replaces
    positions of an earlier one (computed again), and what is beyond the end is left out."""
    size = pieces[0][1].shape[1:]
    whole = torch.full((num_positions, *size), -1, dtype=torch.int32)
    for start, piece in pieces:
        kept = piece[: max(0, num_positions - start)]
        whole[start : start + len(kept)] = kept.cpu()
    assert not (whole < 0).any(), "a position went through no forward"
    return whole
