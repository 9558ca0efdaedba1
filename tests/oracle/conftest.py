"""Where the references are kept: made once a session, by whichever test needs one first."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()


@pytest.fixture(scope="session")
def reference_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")
