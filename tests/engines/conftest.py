"""Tests against a real vLLM: of a venv that has it (``make test-engines``), and of no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
# Where vLLM isn't installed nothing of this folder is even imported.
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What vLLM's own imports warn of isn't ours to mend."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
