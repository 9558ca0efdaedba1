"""Sequences that several ranks share: who holds which tokens, and what every rank knows of the whole.

The ranks of one ``sequence`` group (cp and tp of the data view; tp innermost) train on the same rows. Rank i of n holds
the i-th of n equal runs of positions between the blocks; where attention is split by tp, the ranks of one cp index
gather their runs, and compute on all positions of that index for their own heads.

Example, 8 positions, cp 2, tp 2: runs 01 | 23 | 45 | 67 for (cp 0, tp 0), (cp 0, tp 1), (cp 1, tp 0), (cp 1, tp 1);
attention of cp 0 sees 0123 before, and all eight after, the exchange of heads for positions over cp.

Shape suffixes: B rows, S positions of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

PADDING = -1
"""Number of the document to which padding belongs."""


class SequenceLayout:
    """The whole rows of a micro-batch that was cut; the same on every rank of the group.

    It travels through transformers' forward as a keyword, beside a rank's own inputs, and reaches attention there. No
    dataclass: FSDP, which casts a unit's inputs, would pass each block a copy, without what others have kept.

    Attributes:
        num_positions: S, of the whole sequence.
        documents_BS: [B, S] int64, number of each token's document within its row, ``PADDING`` for padding; None where
            each row is one document without padding, which causal attention alone gets right.
        kept: what layers derived from it (masks), for the micro-batch's other layers; not copied with it.
    """

    def __init__(self, *, num_positions: int, documents_BS: Tensor | None) -> None:
        self.num_positions = num_positions
        self.documents_BS = documents_BS
        self.kept: dict[Hashable, Any] = {}

    def to(self, device: torch.device | str) -> SequenceLayout:
        """The same layout on ``device``."""
        if self.documents_BS is None:
            return self
        return SequenceLayout(num_positions=self.num_positions, documents_BS=self.documents_BS.to(device))


def number_documents(position_ids_BS: Tensor, is_real_BS: Tensor | None) -> Tensor | None:
    """``documents_BS`` of whole rows: a document begins where positions restart at 0, and with a row's first token.

    Padding never begins one, whatever its positions are. Only 2-D ids say where documents begin: ids of several axes
    (mRoPE) restart at every image. Reads whether there is anything to number: on the host for tensors that lie there.
    """
    assert position_ids_BS.ndim == 2, f"{position_ids_BS.ndim}-D position ids don't say where documents begin"
    begins = position_ids_BS == 0
    begins[:, 0] = True
    if is_real_BS is not None:
        begins &= is_real_BS
    documents = (begins.cumsum(dim=1) - 1).clamp(min=0)  # positions behind padding may run on from it
    if is_real_BS is not None:
        documents = documents.masked_fill(~is_real_BS, PADDING)
    return documents if bool((documents != 0).any()) else None


def run_of(tensor: Tensor, index: int, num_runs: int, dim: int = -1) -> Tensor:
    """The ``index``-th of ``num_runs`` equal runs of ``tensor`` along ``dim``, which they must divide; a view."""
    size, rest = divmod(tensor.size(dim), num_runs)
    assert rest == 0, f"{tensor.size(dim)} positions in {num_runs} runs"
    return tensor.narrow(dim, index * size, size)
