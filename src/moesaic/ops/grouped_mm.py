"""Grouped matmuls over rows sorted by expert.

Shape suffixes: R rows, sorted by local expert; C local experts; N output size; H input size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x_RH: Tensor, weight_CNH: Tensor, offsets_C: Tensor) -> Tensor:
    """``x[start(e):offsets[e]] @ weight[e].T`` for each local expert e; a group may be empty, and so may ``x``.

    Args:
        x_RH: [R, H], R = offsets[-1].
        weight_CNH: [C, N, H], same dtype.
        offsets_C: [C] int32, end of each expert's rows.

    Returns:
        [R, N]. An expert without rows gets a zero gradient, not None.
    """
    return F.grouped_mm(x_RH, weight_CNH.transpose(-2, -1), offs=offsets_C)
