"""Losses as sums over tokens; the caller divides by a global count.

Shape suffixes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.batch import IGNORE_INDEX


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of the labels: 0-D fp32, differentiable.

    Args:
        logits_BSV: [B, S, V], any floating dtype; computed on in fp32.
        labels_BS: [B, S] int64, the target **of** each position (already shifted); -100 counts nothing.
    """
    return F.cross_entropy(
        logits_BSV.float().flatten(0, -2), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def count_loss_tokens(labels_BS: Tensor) -> Tensor:
    """How many labels count: 0-D int64."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
