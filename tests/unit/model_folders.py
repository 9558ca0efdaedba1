"""Model folders that pass every check of a recipe and that nothing can load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_model_folder(folder: Path, config: Mapping[str, object]) -> None:
    """``config.json``, and empty files under the names of weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
