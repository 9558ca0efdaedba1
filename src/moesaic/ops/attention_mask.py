"""What attention over whole sequences must not see: other documents, padding, and what lies behind a window.

Shape suffixes: B rows, S positions of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.ops import host
from moesaic.ops.sequence import PADDING, SequenceLayout


@dataclass(frozen=True, slots=True)
class Documents:
    """What the host must know of a micro-batch's documents.

    Attributes:
        lengths: of all runs of one document, or of padding, row after row.
        is_causal_enough: each row is one document with padding behind it, if at all. Causal attention then brings no
            padding to a token; what padding itself sees doesn't matter.
    """

    lengths: list[int]
    is_causal_enough: bool

    @classmethod
    def read(cls, documents_BS: Tensor) -> Documents:
        """One host synchronisation."""
        rows = [[(d, len(list(run))) for d, run in groupby(row)] for row in host.read_ints(documents_BS)]
        enough = all([document for document, _ in row] in ([0], [PADDING], [0, PADDING]) for row in rows)
        return cls([length for row in rows for _, length in row], enough)


def build_mask(layout: SequenceLayout, window: int | None, device: torch.device) -> Tensor | None:
    """[1 or B, 1, S, S] bool, True where a query (dim 2) sees a key: earlier, of its document, within the window.

    Padding sees padding of its row, so that no query sees nothing, which would make NaN. None: causal alone is right.
    """
    size = layout.num_positions
    # Where only padding behind a row's document is to be hidden, causal attention does it.
    documents = None if layout.documents_BS is None or layout.kept[Documents].is_causal_enough else layout.documents_BS
    is_windowed = window is not None and window < size
    if documents is None and not is_windowed:
        return None
    key = torch.arange(size, device=device)
    distance = key.unsqueeze(1) - key
    mask = distance >= 0
    if window is not None and is_windowed:
        mask &= distance < window
    if documents is None:
        return mask[None, None]
    return (mask & (documents.unsqueeze(2) == documents.unsqueeze(1))).unsqueeze(1)


def build_flash_arguments(layout: SequenceLayout, device: torch.device) -> dict[str, Any]:
    """How flash attention keeps documents apart: where they end in all rows, one behind the other."""
    if layout.documents_BS is None:
        return {}
    lengths = cast(Documents, layout.kept[Documents]).lengths
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
