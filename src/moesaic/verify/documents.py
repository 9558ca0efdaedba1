"""Documents whose routes rounding can't flip, and the rows that each data-parallel index gets of them.

A token whose k-th and (k+1)-th router scores nearly tie goes to one expert on one topology and to another on the next,
and all comparisons end there. So each document is tried in one process, and a token that ties is drawn again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from moesaic.config import ParallelSizes
from moesaic.data.batch import IGNORE_INDEX, Batch, Sample
from moesaic.data.packing import Row, RowOptions, collate
from moesaic.verify.shrink import special_tokens

# The k-th and (k+1)-th score of every token are further apart than this.
MIN_ROUTE_GAP = 1e-4
MIN_TOKENS, MAX_TOKENS = 3, 14
# Enough for every rank of a laptop's worth of them; ranks beyond have padding only, and take part all the same.
MAX_DOCUMENTS = 48
ROWS_PER_BATCH = 2
DOCUMENTS_PER_PACKED_ROW = 3
NUM_TRIES = 64


class RouteGap(TorchDispatchMode):
    """Smallest distance between the k-th and the (k+1)-th score of any ``topk`` inside: of experts, or of groups.

    Scores that a mask has taken out don't compete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.smallest = float("inf")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            scores, top_k = args[0].detach().float(), args[1]
            if top_k < scores.size(-1):
                ordered = scores.sort(descending=True).values
                chosen, next_one = ordered[..., top_k - 1], ordered[..., top_k]
                gaps = (chosen - next_one)[next_one.isfinite()]
                self.smallest = min([self.smallest, *gaps.flatten().tolist()])
        return out


def count_documents(sizes: ParallelSizes, num_micro_batches: int, packing: bool) -> int:
    """How many fill the rows of all data-parallel indices that have some."""
    per_row = DOCUMENTS_PER_PACKED_ROW if packing else 1
    rows = _count_filled(sizes) * num_micro_batches * ROWS_PER_BATCH
    return min(MAX_DOCUMENTS, rows * per_row)


def build_documents(model: PreTrainedModel, count: int, seed: int, min_gap: float) -> list[Sample] | None:
    """Documents of uneven lengths, most with a prompt that carries no loss; None where too many tokens tie.

    Args:
        model: plain, in one process, with its weights.
        min_gap: between the scores of a token that is chosen and the next one.
    """
    random = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    usable = sorted(set(range(vocab_size)) - special_tokens(model.config))
    documents = []
    for _ in range(count):
        length = int(torch.randint(MIN_TOKENS, MAX_TOKENS + 1, (), generator=random))
        ids = _draw(usable, length, random)
        if _smallest_gap(model, ids) < min_gap:
            ids = _draw_one_by_one(model, usable, length, random, min_gap)
        if len(ids) < MIN_TOKENS:
            return None
        prompt = int(torch.randint(0, len(ids) - 1, (), generator=random))
        labels = [IGNORE_INDEX if t < prompt else ids[t + 1] for t in range(len(ids) - 1)] + [IGNORE_INDEX]
        documents.append(Sample(input_ids=ids, labels=labels))
    return documents


def _draw(usable: list[int], count: int, random: torch.Generator) -> list[int]:
    return [usable[i] for i in torch.randint(0, len(usable), (count,), generator=random).tolist()]


def _draw_one_by_one(
    model: PreTrainedModel, usable: list[int], length: int, random: torch.Generator, min_gap: float
) -> list[int]:
    """A later token doesn't change how earlier ones are routed: each is drawn until it doesn't tie."""
    ids: list[int] = []
    while len(ids) < length:
        tries = _draw(usable, NUM_TRIES, random)
        fitting = next((token for token in tries if _smallest_gap(model, [*ids, token]) >= min_gap), None)
        if fitting is None:
            break
        ids.append(fitting)
    return ids


@torch.no_grad()
def _smallest_gap(model: PreTrainedModel, ids: list[int]) -> float:
    with RouteGap() as gap:
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    return gap.smallest


def build_batches(
    documents: list[Sample], sizes: ParallelSizes, num_micro_batches: int, packing: bool
) -> list[list[Batch]]:
    """Per data-parallel index its micro-batches, on the CPU: whole rows, the same for all ranks of the index.

    With three indices or more the last has no document: its rows are padding.
    """
    per_row = DOCUMENTS_PER_PACKED_ROW if packing else 1
    rows: list[Row] = [tuple(range(len(documents))[i : i + per_row]) for i in range(0, len(documents), per_row)]
    options = RowOptions(
        cutoff_len=MAX_TOKENS * per_row,
        packing=packing,
        pad_token_id=0,
        pad_to_multiple_of=sizes.cp_size * sizes.tp_size,
    )
    num_filled = _count_filled(sizes)
    batches = []
    for index in range(sizes.dp_size):
        own = rows[index::num_filled] if index < num_filled else []
        own += [()] * (num_micro_batches * ROWS_PER_BATCH - len(own))
        chunks = [own[i::num_micro_batches] for i in range(num_micro_batches)]
        batches.append([collate(documents, chunk, options) for chunk in chunks])
    return batches


def _count_filled(sizes: ParallelSizes) -> int:
    """Data-parallel indices with documents. Of two both: a rank that has all tokens would need no reduction."""
    return sizes.dp_size - 1 if sizes.dp_size > 2 else sizes.dp_size
