"""A rank's part of a micro-batch whose rows are shared by the ranks of a sequence group (cp and tp)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moesaic.data.batch import IGNORE_INDEX, NO_PLACE, Batch, find_loss_positions
from moesaic.meshes import Meshes
from moesaic.ops.sequence import SequenceLayout, number_documents, run_of


def shard_batch(batch: Batch, meshes: Meshes) -> Batch:
    """This rank's part of ``batch``, which every rank of the sequence group holds whole; without cp and tp, itself.

    Input, positions, labels and places are those of the rank's cp index (labels were shifted before, so no run needs
    its neighbour's first token); with tp its ranks share them, and their losses too: a vocabulary-parallel loss is a
    common one. Rows are padded at their end to a multiple of cp * tp. A part is returned as it is. Not collective.
    """
    cp_size, tp_size = meshes.sizes.cp_size, meshes.sizes.tp_size
    if batch.sequence is not None or cp_size * tp_size == 1:
        return batch
    batch = _pad(batch, -batch.input_ids.size(1) % (cp_size * tp_size))
    is_real = batch.real_tokens
    is_known = batch.is_real is not None or batch.attention_mask is not None
    documents = number_documents(batch.position_ids, is_real if is_known else None)
    cp_rank, own_run = meshes.data.get_local_rank("cp"), meshes.sequence.get_local_rank()
    labels = run_of(batch.labels, cp_rank, cp_size)
    return Batch(
        input_ids=run_of(batch.input_ids, cp_rank, cp_size),
        labels=labels,
        position_ids=run_of(batch.position_ids, cp_rank, cp_size),
        loss_positions=None if batch.loss_positions is None else find_loss_positions(labels),
        is_real=run_of(is_real, own_run, cp_size * tp_size),
        document_lengths=batch.document_lengths,
        places=None if batch.places is None else run_of(batch.places, cp_rank, cp_size),
        sequence=SequenceLayout(num_positions=batch.input_ids.size(1), documents_BS=documents),
    )


def _pad(batch: Batch, num_positions: int) -> Batch:
    """``num_positions`` more at the end of each row, which belong to no document."""
    if num_positions == 0:
        return batch

    def pad(tensor: Tensor, value: int) -> Tensor:
        return F.pad(tensor, (0, num_positions), value=value)

    return Batch(
        input_ids=pad(batch.input_ids, 0),
        labels=pad(batch.labels, IGNORE_INDEX),
        position_ids=pad(batch.position_ids, 0),
        loss_positions=batch.loss_positions,
        is_real=pad(batch.real_tokens, False),
        document_lengths=batch.document_lengths,
        places=None if batch.places is None else pad(batch.places, NO_PLACE),
    )
