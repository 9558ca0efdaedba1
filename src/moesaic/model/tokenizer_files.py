"""Which files of a model's folder are its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_PATTERNS = (
    "tokenizer*",  # tokenizer.json, tokenizer_config.json, tokenizer.model
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
"""Relative to the folder: what tokenizers of transformers read for text, current and older."""


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and chat templates from one folder into another, which must exist.

    What ``source`` doesn't have is left out; without any, nothing is copied.
    """
    for pattern in TOKENIZER_PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                copied = target / file.relative_to(source)
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copied)
