"""Calls of code that isn't ours, each with a time-out: whatever it does, the run goes on.

Synchronous calls run in daemon threads. One that doesn't return in time is given up: its thread is left to itself and
another takes its place. Example, two threads, five calls, of which call 1 hangs::

    thread a    0 2 3
    thread b    1 ......     given up
    thread c        4

What can't be given up is a call that never lets go of the interpreter: a regular expression that backtracks without
end, a power of huge integers. Such work belongs into a process of its own, as ``MathVerifier`` has it. Nor is it ours
what a call begins: an executor of its own, with a thread that hangs, holds the end of the process.

Coroutines run side by side on an event loop in a thread of its own, which stays: clients that are bound to it may be
kept between calls. What they hand to threads (``asyncio.to_thread``) hangs in daemon threads, too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from moesaic.rl.user_code import describe_error

FailureKind = Literal["exception", "timeout", "not_a_number", "not_finite", "wrong_length"]

MAX_HUNG = 32
"""Given-up calls that may still be running; while it is reached, no call is made, and each counts as timed out."""
MAX_CONCURRENT = 64
"""Coroutines that run side by side."""
MAX_THREADS = MAX_CONCURRENT + MAX_HUNG
"""Of an event loop, for what its coroutines hand to threads."""
GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a call: its value, or, with a ``failure``, why there is none."""

    value: Any = None
    failure: FailureKind | None = None
    message: str = ""


@dataclass(slots=True)
class _Batch:
    """The calls of one ``ThreadCalls.run``. Everything here is changed under the caller's condition."""

    calls: Sequence[Callable[[], Any]]
    outcomes: list[Outcome | None]
    num_taken: int = 0
    began: dict[int, float] = field(default_factory=dict)  # of calls that are running


class ThreadCalls:
    """Makes synchronous calls, ``num_threads`` at a time, ``timeout_s`` for each. Used by one thread at a time."""

    def __init__(self, *, num_threads: int, timeout_s: float) -> None:
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._changed = threading.Condition()
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """Calls that were given up and still run."""
        return self._num_hung

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """What came of each, in order. Raises nothing that a call raises."""
        batch = _Batch(calls, [None] * len(calls))
        with self._changed:
            self._start(batch, min(self._num_threads, len(calls)))
            while None in batch.outcomes:
                self._give_up_late(batch)
                next_end = min(batch.began.values(), default=time.monotonic()) + self._timeout_s
                if None in batch.outcomes:
                    self._changed.wait(max(0.0, next_end - time.monotonic()))
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def _start(self, batch: _Batch, num_threads: int) -> None:
        if self._num_hung >= MAX_HUNG:
            text = f"not called: {self._num_hung} earlier calls still hang"
            for number in range(batch.num_taken, len(batch.calls)):
                batch.outcomes[number] = Outcome(failure="timeout", message=text)
            batch.num_taken = len(batch.calls)
            return
        for _ in range(num_threads):
            threading.Thread(target=self._work, args=(batch,), daemon=True, name="moesaic-call").start()

    def _give_up_late(self, batch: _Batch) -> None:
        now = time.monotonic()
        for number, began in list(batch.began.items()):
            if now - began >= self._timeout_s:
                del batch.began[number]
                batch.outcomes[number] = _timed_out(self._timeout_s)
                self._num_hung += 1
                self._start(batch, 1)

    def _work(self, batch: _Batch) -> None:
        while True:
            with self._changed:
                if batch.num_taken == len(batch.calls):
                    return
                number = batch.num_taken
                batch.num_taken += 1
                batch.began[number] = time.monotonic()
            outcome = _attempt(batch.calls[number])
            with self._changed:
                if batch.outcomes[number] is not None:  # given up; another thread has taken this one's place
                    self._num_hung -= 1
                    return
                batch.outcomes[number] = outcome
                del batch.began[number]
                self._changed.notify_all()


class LoopCalls:
    """Calls coroutine functions, ``MAX_CONCURRENT`` at a time, ``timeout_s`` for each, on a loop that stays."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = _DaemonThreads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Outcome]:
        """What came of each, in order. Raises nothing that a call raises."""
        outcomes: list[Outcome | None] = [None] * len(calls)
        if self._loop is None:
            self._loop = _build_loop(self._threads)
            self._thread = threading.Thread(target=_turn, args=(self._loop,), daemon=True, name="moesaic-loop")
            self._thread.start()
        done = asyncio.run_coroutine_threadsafe(self._all(calls, outcomes), self._loop)
        num_rounds = -(-len(calls) // MAX_CONCURRENT)
        try:
            done.result(num_rounds * self._timeout_s + GRACE_S)
        except futures.TimeoutError:  # something blocks the loop, or doesn't let itself be cancelled
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = self._thread = None
        return [outcome or _timed_out(self._timeout_s) for outcome in list(outcomes)]

    def close(self) -> None:
        """End the loop."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
        self._loop = self._thread = None

    async def _all(self, calls: Sequence[Callable[[], Awaitable[Any]]], outcomes: list[Outcome | None]) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(number: int) -> None:
            async with free:
                try:
                    outcomes[number] = Outcome(value=await asyncio.wait_for(calls[number](), self._timeout_s))
                except TimeoutError:
                    outcomes[number] = _timed_out(self._timeout_s)
                except BaseException as error:  # CancelledError isn't an Exception
                    outcomes[number] = Outcome(failure="exception", message=describe_error(error))

        await asyncio.gather(*(one(number) for number in range(len(calls))))


class _DaemonThreads(futures.ThreadPoolExecutor):
    """An executor whose threads nobody waits for at the end of the process; threads of the usual ones are waited for,
    and one that hangs would never let it end. (asyncio takes none but a ``ThreadPoolExecutor`` as its default.)"""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # which it doesn't use
        self._lock = threading.Lock()
        self._calls: deque[tuple[futures.Future[Any], Callable[[], Any]]] = deque()
        self._num_threads = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        with self._lock:
            self._calls.append((future, partial(fn, *args, **kwargs)))
            if self._num_threads < MAX_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, daemon=True, name="moesaic-call").start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._num_threads -= 1
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # the coroutine's to see
                future.set_exception(error)


def _build_loop(threads: _DaemonThreads) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(threads)
    return loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _attempt(call: Callable[[], Any]) -> Outcome:
    try:
        value = call()
        if isinstance(value, Coroutine):  # of a function that doesn't say that it is one
            with asyncio.Runner(loop_factory=lambda: _build_loop(_DaemonThreads())) as runner:
                value = runner.run(value)
        return Outcome(value=value)
    except TimeoutError as error:
        return Outcome(failure="timeout", message=describe_error(error))
    except BaseException as error:  # SystemExit too: it is the run's to end
        return Outcome(failure="exception", message=describe_error(error))


def _timed_out(timeout_s: float) -> Outcome:
    return Outcome(failure="timeout", message=f"no answer within {timeout_s:g} s")
