"""Where a value model's head comes from: ``score`` of a sequence or token classifier of one label, or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from moesaic.model.value_head import value_head_name
from moesaic.weights.files import read_headers
from moesaic.weights.quantized import Stored

# What transformers' generic classifiers call their head.
SCORE = "score"
PARTS = ("weight", "bias")


def find_value_head(folder: str | Path, *, is_required: bool) -> tuple[str, ...]:
    """Which of ``weight`` and ``bias`` a folder's files have of a classifier's head; from the headers alone.

    Raises:
        ValueError: the head is of several labels; or there is none, where ``is_required``.
    """
    headers = read_headers(Path(folder))
    found = {part: headers[f"{SCORE}.{part}"].shape for part in PARTS if f"{SCORE}.{part}" in headers}
    if "weight" not in found and (found or is_required):
        raise ValueError(
            f"model={str(folder)!r} has no {SCORE}.weight: it is no classifier of one label, and scores nothing. Give "
            "a folder saved by transformers' AutoModelForSequenceClassification with num_labels=1."
        )
    if any(shape[0] != 1 for shape in found.values()):
        raise ValueError(
            f"model={str(folder)!r}: {SCORE}.weight is {list(found['weight'])}, of {found['weight'][0]} labels; a "
            "value is one number. Give a classifier with num_labels=1."
        )
    return tuple(found)


def place_value_head(stored: Mapping[str, Stored], model: nn.Module) -> tuple[dict[str, Stored], frozenset[str]]:
    """Of a value model: the files' tensors with the classifier's head in the place of the vocabulary's; and the
    parameters that the files have nothing for. Of another model: all as it is."""
    head = value_head_name(model)
    if head is None:
        return dict(stored), frozenset()
    left_out = {f"{name}.{part}" for name in (head, SCORE) for part in PARTS}
    placed = {key: each for key, each in stored.items() if key not in left_out}
    found = {part: stored[f"{SCORE}.{part}"] for part in PARTS if f"{SCORE}.{part}" in stored}
    placed |= {f"{head}.{part}": each for part, each in found.items()}
    own = [name for name, _ in model.get_submodule(head).named_parameters()]
    return placed, frozenset(f"{head}.{part}" for part in own if part not in found)
