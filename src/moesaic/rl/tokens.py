"""A step's tables on the device, and what of them belongs to the tokens of a micro-batch.

Shape suffixes: B trajectories of the step, T tokens after the prompt of the longest of them; R rows and n positions of
a micro-batch, K tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.data.batch import Batch
from moesaic.meshes import Meshes
from moesaic.rl.forward import TopK
from moesaic.rl.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One micro-batch, as a loss sees it; where the mask is 0, columns are 0 too, whatever the experience has there.

    Attributes:
        logits: [R, n, V], of this rank's columns of the vocabulary.
        labels: [R, n], -100 where there is none.
        columns: [R, n] fp32, by name.
        mask: [R, n] bool: tokens that are trained on.
        sequence_mean: gives every token the detached mean [R, n] over the trained tokens of its trajectory, wherever
            they lie. Every rank of a cp group must call.
        teacher_ids, teacher_logprobs: [R, n, K] of a teacher's likeliest tokens.
    """

    logits: Tensor
    labels: Tensor
    columns: Mapping[str, Tensor]
    mask: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    teacher_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Flat tables, with one place more for positions without a label: all zeros there.

    Attributes:
        columns: by name, [B * T + 1], 0 where the mask is.
        mask: [B * T + 1] bool.
        counts: [B + 1]: trained tokens of each trajectory; the last is of no trajectory.
        num_tokens: T.
        cp_group: whose ranks share trajectories; None where one rank has all tokens of those it has.
        topk: of a teacher; stays on the host.
    """

    columns: Mapping[str, Tensor]
    mask: Tensor
    counts: Tensor
    num_tokens: int
    cp_group: dist.ProcessGroup | None
    topk: TopK | None

    @staticmethod
    def build(
        meshes: Meshes, experience: Experience, mask_BT: Tensor, names: Sequence[str], topk: TopK | None
    ) -> Tables:
        """Of the columns ``names`` of the experience. Not collective."""
        assert not (mask_BT & ~experience.mask_BT).any(), "the mask has tokens that the model didn't write"
        device = torch.device(meshes.data.device_type)
        columns = {name: torch.where(mask_BT, experience.columns[name], 0.0) for name in names}
        return Tables(
            columns={name: flat(column).to(device) for name, column in columns.items()},
            mask=flat(mask_BT).to(device),
            counts=flat(mask_BT.sum(dim=1)).to(device),
            num_tokens=experience.num_tokens,
            cp_group=meshes.data["cp"].get_group() if meshes.sizes.cp_size > 1 else None,
            topk=topk,
        )

    def at(self, logits: Tensor, batch: Batch) -> tuple[Tokens, Tensor]:
        """A micro-batch's tokens, and the places [R, n] where they stand."""
        places = batch.kept_places
        places = torch.where(places < 0, self.mask.numel() - 1, places)
        mask = self.mask[places]
        ids, logprobs = self._topk_at(batch)
        tokens = Tokens(
            logits=logits,
            labels=batch.kept_labels,
            columns={name: column[places] for name, column in self.columns.items()},
            mask=mask,
            sequence_mean=self._sequence_mean(places, mask),
            teacher_ids=ids,
            teacher_logprobs=logprobs,
        )
        return tokens, places

    def _sequence_mean(self, places: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        trajectories = places // self.num_tokens  # what has no place is of the one behind the last

        def mean(values: Tensor) -> Tensor:
            # As rows of the step's table: index_add_ would add in another order each time, on devices.
            table = torch.zeros(self.mask.numel(), device=values.device)
            table[places] = torch.where(mask, values.detach().float(), 0.0)
            sums = flat(table[:-1].view(-1, self.num_tokens).sum(dim=1))
            if self.cp_group is not None:
                dist.all_reduce(sums, group=self.cp_group)
            return (sums / self.counts.clamp(min=1))[trajectories]

        return mean

    def _topk_at(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """From the host, where all of a step's are: a micro-batch's rows alone go to the device."""
        if self.topk is None:
            return None, None
        places = batch.kept_places.cpu()
        rows = torch.where(places < 0, -1, self.topk.rows_BT.flatten()[places.clamp(min=0)])
        has_row = (rows >= 0)[..., None]
        rows = rows.clamp(min=0)
        ids = torch.where(has_row, self.topk.ids_MK[rows].long(), 0)
        logprobs = torch.where(has_row, self.topk.logprobs_MK[rows], 0.0)
        return ids.to(batch.labels.device), logprobs.to(batch.labels.device)


def flat(table: Tensor) -> Tensor:
    """With one place more at its end: 0."""
    return torch.cat([table.flatten(), table.new_zeros(1)])
