"""Tests against a real SGLang on the CPU, of an environment of its own (``make test-sglang``), and of no other."""

from __future__ import annotations

import os

# The interpreter that has SGLang. Where none is named, nothing of this folder is even imported.
SGLANG_PYTHON = os.environ.get("SGLANG_PYTHON", "")
collect_ignore_glob = [] if SGLANG_PYTHON else ["test_*.py"]
