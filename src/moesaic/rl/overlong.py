"""What a completion costs that comes near the longest there may be. Shape suffix: B trajectories."""

from __future__ import annotations

from torch import Tensor


def overlong_penalties(lengths_B: Tensor, *, max_tokens: int, buffer_len: int, factor: float) -> Tensor:
    """[B] fp32, to be added to the rewards: 0 up to ``max_tokens - buffer_len`` tokens, then falling evenly to
    ``-factor`` at ``max_tokens``, and no further (DAPO, 2503.14476, equation 13).

    Args:
        lengths_B: tokens of each completion.
        max_tokens: of a completion, at most.
        buffer_len: the last so many cost.
        factor: the whole penalty.
    """
    assert 0 < buffer_len <= max_tokens, (buffer_len, max_tokens)
    over_B = (lengths_B - (max_tokens - buffer_len)) / buffer_len
    return -factor * over_B.clamp(0, 1).float()
