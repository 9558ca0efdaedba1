"""Starting local ranks: a crash in one ends all and is shown last; Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this one
from moesaic.runtime import launch
sys.exit(launch(sys.argv[2:], 2, Path(sys.argv[1])))
"""

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
from moesaic.runtime import PeerFailed, init_process_group, run_rank, shutdown, start_errors

def work(mode: str) -> None:
    init_process_group(timeout_s=120)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2 and dist.get_world_size() == 2
    os.write(1, f"pid {os.getpid()} threads {os.environ['OMP_NUM_THREADS']}\\n".encode())  # one write: lines stay whole
    if mode == "tell" and dist.get_rank() == 0:
        raise PeerFailed("it failed on another rank")
    if dist.get_rank() == 1:
        if mode in ("raise", "tell"):
            time.sleep(0.3 * (mode == "tell"))  # what it closes first
            raise KeyError("the reason")
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "refuse":
            with start_errors():
                raise ValueError("cutoff_len=1: too short; set 2.\\nA second line.")
    if mode != "finish":
        dist.all_reduce(torch.ones(1))   # rank 0 waits here for a rank that never comes
        if mode == "wait":
            signal.pause()
    shutdown()

run_rank(work, sys.argv[1])
"""


@pytest.fixture
def start(tmp_path: Path):
    """Start the parent of two ranks that run RANK in ``mode``; the parent is ended with the test."""
    (tmp_path / "rank.py").write_text(RANK)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    processes = []

    def start_mode(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARENT, str(tmp_path / "logs"), str(tmp_path / "rank.py"), mode]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        processes.append(process)
        return process

    yield start_mode
    for process in processes:
        process.kill()
        process.communicate()  # waits, and closes its pipes


def read_pids(process: subprocess.Popen[str]) -> list[int]:
    """Wait until both ranks have met in a collective and said who they are."""
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[1]) for _ in range(2)]


def assert_gone(pids: list[int], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"still running: {pids}"


def test_two_ranks_finish(start) -> None:
    process = start("finish")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    cores = len(os.sched_getaffinity(0))
    assert out.count(f"threads {max(1, cores // 2)}\n") == 2
    assert err == ""


def test_a_crash_ends_all_and_is_shown_last(start) -> None:
    process = start("raise")
    pids = read_pids(process)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 1
    report = err[err.rindex("rank 1 failed") :]
    assert "in work" in report and report.rstrip().endswith("KeyError: 'the reason'")
    assert_gone(pids)


@pytest.mark.slow  # starts processes that import everything
def test_who_was_told_of_a_failure_is_not_its_cause(start) -> None:
    process = start("tell")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    report = err[err.rindex("also failed, later: rank 0") :]
    assert "rank 1 failed" in report and report.rstrip().endswith("KeyError: 'the reason'")


def test_what_a_user_has_to_change_is_shown_without_a_stack(start) -> None:
    process = start("refuse")
    pids = read_pids(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("cutoff_len=1: too short; set 2.\nA second line.\n(rank 1; its stack is in ")
    assert "Traceback" not in err and err.count("\n") == 3
    stack = json.loads(Path(err.splitlines()[-1].partition("its stack is in ")[2].rstrip(")")).read_text())
    assert "in work" in stack["message"]["extraInfo"]["py_callstack"]
    assert_gone(pids)


@pytest.mark.slow  # starts processes that import everything
def test_without_a_launcher_it_is_the_message_alone_too(tmp_path: Path) -> None:
    code = "from moesaic.runtime import *\ndef f():\n  with start_errors(): raise ValueError('set 2.')\nrun_rank(f)"
    names = ("RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, "set 2.\n")


@pytest.mark.slow  # starts processes that import everything
def test_a_killed_rank_is_named(start) -> None:
    process = start("kill")
    pids = read_pids(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.rstrip().endswith("rank 1 failed: killed by SIGKILL")
    assert_gone(pids)


def test_ctrl_c_ends_all_with_one_line(start) -> None:
    process = start("wait")
    pids = read_pids(process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: the whole foreground group gets it
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted: all 2 ranks ended\n"
    assert_gone(pids)


@pytest.mark.slow  # starts processes that import everything
def test_no_rank_outlives_a_killed_parent(start) -> None:
    process = start("wait")
    pids = read_pids(process)
    process.kill()
    process.wait()
    assert_gone(pids)
