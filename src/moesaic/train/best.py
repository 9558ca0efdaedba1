"""Which checkpoint has the lowest held-out loss, remembered in the run's folder as ``best.json``."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from moesaic.config.run_folder import checkpoint_folder, is_complete

FILE = "best.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The lowest held-out loss so far, in nats per token, and the optimizer step after which it was measured."""

    step: int
    loss: float


def load_best(output_dir: Path) -> Best | None:
    """What ``save_best`` wrote, as rank 0 sees it; None where nothing is, or where its checkpoint is gone.

    Every rank must call it.
    """
    found: list[Best | None] = [None]
    if dist.get_rank() == 0 and (output_dir / FILE).is_file():
        best = Best(**json.loads((output_dir / FILE).read_text(encoding="utf-8")))
        if is_complete(checkpoint_folder(output_dir, best.step)):
            found = [best]
        else:
            log.warning("%s names step %d, whose checkpoint is gone: begins anew", output_dir / FILE, best.step)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save_best(output_dir: Path, best: Best) -> None:
    """Remember ``best``, whose checkpoint is complete. Written by rank 0; every rank may call it."""
    if dist.get_rank() == 0:
        scratch = output_dir / f"{FILE}.tmp"
        scratch.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
        scratch.replace(output_dir / FILE)
