"""The disk layouts of every family. Not collected by default: ``pytest tests/families/layouts.py``; a handful of them
is in tests/unit/test_weights_layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.configs import MODEL_TYPES
from tests.unit.test_weights_layouts import check_layouts

# transformers has no language model of it.
WITHOUT_CLASS = frozenset({"openai_privacy_filter"})


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in WITHOUT_CLASS])
def test_layouts(model_type: str, tmp_path: Path) -> None:
    check_layouts(model_type, tmp_path)
