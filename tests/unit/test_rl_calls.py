"""Calls of a user's functions: what hangs is given up, is limited, and holds up nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.rl import calls
from moesaic.rl.calls import LoopCalls, ThreadCalls

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Lets calls that hang go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_what_hangs_is_limited(free: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_HUNG", 3)
    threads = ThreadCalls(num_threads=2, timeout_s=0.05)
    called = []

    def hang() -> None:
        called.append(1)
        free.wait()

    outcomes = threads.run([hang] * 8)
    assert threads.num_hung >= 3 and len(called) <= 4
    assert {outcome.failure for outcome in outcomes} == {"timeout"}
    assert "not called: 3 earlier calls still hang" in outcomes[-1].message
    assert threads.run([lambda: 1])[0].failure == "timeout", "nor is any other, while they do"
    free.set()
    while threads.num_hung:
        time.sleep(0.001)
    assert threads.run([lambda: 1])[0].value == 1


def test_exits_of_a_function_do_not_end_the_run() -> None:
    assert [outcome.failure for outcome in ThreadCalls(num_threads=2, timeout_s=5).run([sys.exit, lambda: 1])] == [
        "exception",
        None,
    ]


def test_a_coroutine_that_blocks_the_loop_is_given_up(free: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.1)

    async def blocks() -> float:
        free.wait()
        return 1.0

    async def fine() -> float:
        return 2.0

    loop = LoopCalls(timeout_s=0.1)
    assert loop.run([fine, blocks])[1].failure == "timeout"
    assert [outcome.value for outcome in loop.run([fine, fine])] == [2.0, 2.0], "on another loop"
    loop.close()


def test_threads_of_coroutines_are_limited_and_are_used_again(
    free: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_THREADS", 2)
    called = []

    async def hang() -> None:
        await asyncio.to_thread(lambda: called.append(1) or free.wait())

    async def fine() -> float:
        return await asyncio.to_thread(lambda: 1.0)

    loop = LoopCalls(timeout_s=0.1)
    assert {outcome.failure for outcome in loop.run([hang] * 5)} == {"timeout"}
    assert len(called) == 2, "the others wait, until they are given up"
    free.set()
    assert [outcome.value for outcome in loop.run([fine] * 5)] == [1.0] * 5
    loop.close()


def test_a_hanging_function_does_not_hold_the_end_of_the_run() -> None:
    """Nor does one that hangs in a thread of the event loop's: those are waited for, as a rule."""
    code = (
        "import asyncio, threading\nfrom moesaic.rl.calls import LoopCalls, ThreadCalls\n"
        "async def hang(): await asyncio.to_thread(threading.Event().wait)\n"
        "outcomes = ThreadCalls(num_threads=2, timeout_s=0.05).run([threading.Event().wait, lambda: hang()])\n"
        "outcomes += LoopCalls(timeout_s=0.05).run([hang])\n"
        "print([outcome.failure for outcome in outcomes])"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": "src:."})
    assert (done.returncode, done.stdout) == (0, "['timeout', 'timeout', 'timeout']\n"), done.stderr
