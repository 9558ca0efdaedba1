"""Which checkpoint has the lowest held-out loss, remembered in the run's folder as ``best.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from moesaic.config.run_folder import checkpoint_folder, is_complete

FILE = "best.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The lowest held-out loss so far.

    Attributes:
        step: the optimizer step after which it was measured.
        loss: in nats per token.
        sets: names of the held-out sets it was measured on, in any order.
    """

    step: int
    loss: float
    sets: tuple[str, ...]


def load_best(output_dir: Path, sets: Iterable[str]) -> Best | None:
    """What ``save_best`` wrote, as rank 0 sees it; None where nothing is, or where its checkpoint is gone or its loss
    is that of other sets than ``sets``.

    Every rank must call it.
    """
    found: list[Best | None] = [None]
    if dist.get_rank() == 0 and (output_dir / FILE).is_file():
        best = _read(output_dir / FILE)
        if not is_complete(checkpoint_folder(output_dir, best.step)):
            log.warning("%s names step %d, whose checkpoint is gone: begins anew", output_dir / FILE, best.step)
        elif sorted(best.sets) != sorted(sets):
            log.warning("%s has the loss of %s, not of eval_dataset: begins anew", output_dir / FILE, best.sets)
        else:
            found = [best]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _read(path: Path) -> Best:
    """A file without ``sets``, as earlier runs wrote it, is of no sets that are known."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return Best(step=values["step"], loss=values["loss"], sets=tuple(values.get("sets", ())))


def save_best(output_dir: Path, best: Best) -> None:
    """Remember ``best``, whose checkpoint is complete. Written by rank 0; every rank may call it."""
    if dist.get_rank() == 0:
        scratch = output_dir / f"{FILE}.tmp"
        scratch.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
        scratch.replace(output_dir / FILE)
