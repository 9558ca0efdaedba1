"""What a dispatcher is: the protocol, and the receipt that ``dispatch`` hands to ``combine``.

Shape suffixes: T tokens of this rank, K experts per token, S = T*K rows sent, R rows received, H hidden size,
P ranks of the EP group, C experts of a rank (``ceil(E/P)``; the last rank may hold fewer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Receipt:
    """What ``combine`` needs to bring results back to the tokens that ``dispatch`` sent. Nothing else is remembered.

    Attributes:
        weights_TK: [T, K] routing weights, differentiable; applied by the sender.
        order_S, inverse_S: [T*K] int64, flat (token, choice) pairs in sending order, and its inverse.
        regroup_R, ungroup_R: [R] int64, received rows (rank-major) in expert order, and its inverse; None where they
            already are (one rank, or one local expert).
        sent, received: rows to and from each rank of the group.
    """

    weights_TK: Tensor
    order_S: Tensor
    inverse_S: Tensor
    regroup_R: Tensor | None
    ungroup_R: Tensor | None
    sent: list[int]
    received: list[int]


class Dispatcher(Protocol):
    """Moves tokens to their experts and back. Both calls are collective over the EP group, in forward and backward."""

    def dispatch(
        self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_local_experts: int
    ) -> tuple[Tensor, Tensor, Receipt]:
        """Rows of all ranks that chose one of this rank's experts, grouped by expert.

        Args:
            x_TH: [T, H] floating; T may be 0 and differ between ranks.
            experts_TK: [T, K] int64, global expert ids.
            weights_TK: [T, K] floating.
            num_local_experts: experts this rank holds.

        Returns:
            rows [R, H]; offsets [num_local_experts] int32, the end of each expert's rows; the receipt.
        """

    def combine(self, y_RH: Tensor, receipt: Receipt, finish_rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Outputs ``y`` of the experts, in ``dispatch``'s order, back to their tokens, weighted and summed: [T, H].

        Args:
            finish_rows: [T*K, H] -> [T*K, H], row by row; applied on the token's own rank, before the weights. A module
                that all experts share (a norm) belongs here: its parameters then meet this rank's tokens only, and
                their gradients are reduced as every dense parameter's.
        """
