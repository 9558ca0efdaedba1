"""Set-up of every test: quiet, offline, one thread per process; the shared pool; the time that each folder may take."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

# Before torch, transformers or datasets are imported, here and (inherited) in the pool's workers.
HF_HOME = tempfile.mkdtemp(prefix="moesaic-tests-hf-")
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HOME=HF_HOME,
)

from tests.pool import RunRanks, WorkerPool  # noqa: E402  (the environment comes first)

# Seconds of wall clock that a folder may take on 2 quiet cores: together under 11 minutes, on a slower hour 12. Printed
# beside what was measured; a folder that is over is marked, not failed: a busy machine must not turn a good change red.
BUDGET_S = {
    "tests": 15,
    "tests/unit": 70,
    "tests/dist": 340,
    "tests/oracle": 220,
    "tests/engines": 360,
    "tests/sglang": 240,
}

POOL = pytest.StashKey[WorkerPool]()


class FolderTimes:
    """Adds up what each folder's tests take, set-up and tear-down included, and prints it beside the budget."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.num_tests: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = str(Path(report.nodeid.split("::")[0]).parent)
        self.spent_s[folder] += report.duration
        self.num_tests[folder] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per folder")
        for folder in sorted(self.spent_s):
            budget_s = BUDGET_S.get(folder)
            over = "  OVER ITS BUDGET" if budget_s is not None and self.spent_s[folder] > budget_s else ""
            of_budget = "no budget: give it one in tests/conftest.py" if budget_s is None else f"of {budget_s:>4} s"
            terminalreporter.write_line(
                f"{folder:<16}{self.num_tests[folder]:>5} tests {self.spent_s[folder]:>7.1f} s {of_budget}{over}"
            )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[POOL] = WorkerPool(warning_filters=config.getini("filterwarnings"))
    config.pluginmanager.register(FolderTimes(), "folder-times")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOL].close()
    shutil.rmtree(HF_HOME, ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the pool's imports run beside the first tests, where any test needs the pool."""
    if any("run_ranks" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)):
        session.config.stash[POOL].preload()


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """``run_ranks(fn, world_size, *args, timeout_s=120) -> [result of rank 0, ...]``, see ``tests/pool.py``."""
    return request.config.stash[POOL].run


@pytest.fixture(scope="session")
def reference_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``load_reference`` keeps references: made once a session, by whichever test needs one first."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return tmp_path_factory.mktemp("references")
