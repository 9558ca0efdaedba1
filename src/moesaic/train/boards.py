"""Where curves go, beside ``metrics.jsonl``: TensorBoard, Weights & Biases. On rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

WANDB_ID = "wandb_id.txt"


class Board(Protocol):
    """Takes points of curves."""

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """One point per curve, at optimizer step ``step``; names like ``train/loss``."""
        ...

    def close(self) -> None:
        """Everything is written when this returns."""
        ...


class TensorBoard:
    """Event files in ``folder/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """See ``Board``."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See ``Board``."""
        self._writer.close()


class WandbBoard:
    """A run of Weights & Biases. Project, name, mode (``offline``) and key are read by it from its own environment
    variables (``WANDB_PROJECT``, ``WANDB_MODE``, ...).

    Its id is kept in ``folder/wandb_id.txt``, and a resumed run goes on under it.

    Args:
        config: the recipe, to be shown beside the curves.
        is_resumed: the run goes on from a checkpoint.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], is_resumed: bool) -> None:
        import wandb

        file = folder / WANDB_ID
        known = file.read_text(encoding="utf-8").strip() if is_resumed and file.is_file() else None
        self._run = wandb.init(
            dir=str(folder), config=dict(config), id=known, resume=None if known is None else "allow"
        )
        file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """See ``Board``."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See ``Board``."""
        self._run.finish()


def build_boards(names: Sequence[str], folder: Path, config: Mapping[str, Any], is_resumed: bool) -> list[Board]:
    """The boards that ``report_to`` names, open. An optional package is imported only if it is named."""
    boards: list[Board] = []
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            boards.append(TensorBoard(folder))
        else:
            assert name == "wandb", name
            boards.append(WandbBoard(folder, config, is_resumed))
    return boards
