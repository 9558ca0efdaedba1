"""The reference dispatcher: PyTorch operators and standard all-to-all. Every other one is tested against it.

Shape suffixes: see ``dispatch/base.py``.

One layer on 2 ranks with 4 experts (chunk 2: experts 0, 1 on rank 0 and 2, 3 on rank 1), rank 0 with 2 tokens, top-2:

    experts_TK  [[3, 0], [0, 1]]       flat pairs  3 0 0 1
    order_S     [1, 2, 3, 0]           rows sent   t0->e0 t1->e0 t1->e1 | t0->e3
    counts_PC   [[2, 1], [0, 1]]       sent        [3, 1]
    received rows lie by source rank, then expert; ``regroup`` sorts them by expert, keeping the rank order inside each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dispatch.base import Receipt
from moesaic.ops import host
from moesaic.ops.all_to_all import all_to_all_counts, all_to_all_rows
from moesaic.ops.permute import invert, reorder_rows, repeat_rows, weighted_sum


class EagerDispatcher:
    """Exchanges K rows per token: 1 count exchange, 2 data exchanges forward, 2 backward, 1 host read per layer."""

    def __init__(self, group: dist.ProcessGroup, chunk_size: int) -> None:
        self._group = group
        self._size = group.size()
        self._chunk_size = chunk_size

    def dispatch(
        self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_local_experts: int
    ) -> tuple[Tensor, Tensor, Receipt]:
        """See ``Dispatcher.dispatch``."""
        experts_S, top_k = experts_TK.reshape(-1), experts_TK.size(1)
        order_S = torch.argsort(experts_S, stable=True)
        inverse_S = invert(order_S)
        counts_PC = _count(experts_S, self._size * self._chunk_size).view(self._size, self._chunk_size)
        if self._size == 1:
            arrived_PC, sent, received = counts_PC, [experts_S.numel()], [experts_S.numel()]
        else:
            arrived_PC, sent, received = self._exchange_counts(counts_PC)

        rows_SH = repeat_rows(x_TH, order_S, inverse_S, top_k)
        rows_RH = self._exchange_rows(rows_SH, received, sent)
        regroup_R = self._expert_order(arrived_PC, sum(received))
        ungroup_R = None if regroup_R is None else invert(regroup_R)
        if regroup_R is not None and ungroup_R is not None:
            rows_RH = reorder_rows(rows_RH, regroup_R, ungroup_R)
        offsets_C = arrived_PC.sum(dim=0).cumsum(dim=0)[:num_local_experts].to(torch.int32)
        return rows_RH, offsets_C, Receipt(weights_TK, order_S, inverse_S, regroup_R, ungroup_R, sent, received)

    def combine(self, y_RH: Tensor, receipt: Receipt, finish_rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """See ``Dispatcher.combine``."""
        if receipt.regroup_R is not None and receipt.ungroup_R is not None:
            y_RH = reorder_rows(y_RH, receipt.ungroup_R, receipt.regroup_R)
        rows_SH = self._exchange_rows(y_RH, receipt.sent, receipt.received)
        if finish_rows is not None:
            rows_SH = finish_rows(rows_SH)
        return weighted_sum(rows_SH, receipt.weights_TK, receipt.order_S, receipt.inverse_S)

    def _exchange_counts(self, counts_PC: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Rows per (source rank, local expert) that will arrive, and the split sizes: the layer's one host read."""
        arrived_PC = all_to_all_counts(counts_PC, self._group)
        sent, received = host.read_ints(torch.stack([counts_PC.sum(dim=1), arrived_PC.sum(dim=1)]))
        return arrived_PC, sent, received

    def _exchange_rows(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return rows if self._size == 1 else all_to_all_rows(rows, received, sent, self._group)

    def _expert_order(self, arrived_PC: Tensor, num_rows: int) -> Tensor | None:
        """Order that sorts received rows by local expert, or None where rank order already is expert order."""
        if self._size == 1 or self._chunk_size == 1:
            return None
        local_expert = torch.arange(self._chunk_size, device=arrived_PC.device).repeat(self._size)
        expert_R = local_expert.repeat_interleave(arrived_PC.reshape(-1), output_size=num_rows)
        return torch.argsort(expert_R, stable=True)


def _count(experts_S: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert: [num_experts] int64. Not bincount, which reads its maximum to the host."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts_S.device)
    return counts.scatter_add_(0, experts_S, torch.ones_like(experts_S))
