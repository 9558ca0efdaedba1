"""One weight sync, from trained shards into engines: the order of its steps, and what happens when one fails.

    pause (drain or keep), wake weights, begin_update, transfer, end_update, reset_caches, set_version, wake kv_cache,
    resume

Every trainer rank runs it, with the engines whose objects live in its process (none, where the rank only sends). After
each step all ranks agree through a store: what failed on one fails on all, at once or after the time-out. From
``begin_update`` on, every engine is then broken until a whole sync has succeeded; before, they go on as they were. No
engine gets the new version before all of them have the weights and no old caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from moesaic.engines.base import Engine, PauseMode

OK = "ok "  # what a verdict begins with where all is well


class SyncFailed(RuntimeError):
    """A sync failed, on this rank or another: every rank raises it, naming the rank, the step and what went wrong."""


class Agreement:
    """Ranks that must all succeed, or all fail: through a store, so that a dead rank is a time-out and poisons nothing.

    Args:
        store: of all ranks; its keys are put under ``prefix``, which nothing else may use.
        timeout_s: how long a rank waits, after each step, for the slowest: more than engines take to trace their
            loaders in the first sync. While they drain, it waits longer by what they may take.

    Raises:
        ValueError: the prefix was used before.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, timeout_s: float = 60.0, prefix: str = "weight-sync"
    ) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._used: str | None = None
        if self._store.add(f"joined/{rank}", 1) > 1:
            raise ValueError(
                f"prefix={prefix!r}: rank {rank} has agreed under it before, and would take verdicts of then for those "
                "of now; give each agreement a prefix of its own, the same on all ranks."
            )

    def confirm(self, step: str, error: BaseException | None, *, value: float = 0.0, longer_by_s: float = 0.0) -> float:
        """Return when every rank has confirmed ``step``, a name that never repeats, without an error.

        Args:
            longer_by_s: than ``timeout_s`` this step may take; the same on all ranks.

        Returns:
            The largest ``value`` that a rank gave: the same on all ranks.

        Raises:
            SyncFailed: a rank has an error, or didn't come in time; on all ranks that come. Or the store is gone.
        """
        try:
            verdict = self._find_verdict(step, error, value, self._timeout_s + longer_by_s)
        except RuntimeError as lost:
            raise SyncFailed(f"{step}: the store is gone, and its process with it: {lost}") from (error or lost)
        if not verdict.startswith(OK):
            raise SyncFailed(verdict) from error
        return float(verdict.removeprefix(OK))

    def _find_verdict(self, step: str, error: BaseException | None, value: float, timeout_s: float) -> str:
        self._store.set(f"{step}/{self._rank}", str(value))
        if error is None:
            if self._store.add(f"{step}/arrived", 1) == self._world_size:
                values = self._store.multi_get([f"{step}/{rank}" for rank in range(self._world_size)])
                self._decide(step, f"{OK}{max(map(float, values))}")
        else:
            self._decide(step, f"{step} failed on rank {self._rank}: {type(error).__name__}: {error}")
        try:
            self._store.wait([f"{step}/verdict"], timedelta(seconds=timeout_s))
        except RuntimeError:  # what torch raises after the time-out
            missing = [rank for rank in range(self._world_size) if not self._store.check([f"{step}/{rank}"])]
            self._decide(step, f"{step}: no word from ranks {missing} in {timeout_s:g} s")
        verdict = self._store.get(f"{step}/verdict").decode()
        if verdict.startswith(OK):
            self._forget(step)
        return verdict

    def _decide(self, step: str, verdict: str) -> None:
        """The first verdict stands: a rank that comes late finds that the others have given up."""
        self._store.compare_set(f"{step}/verdict", "", verdict)

    def _forget(self, step: str) -> None:
        """Delete the keys of the step before: all ranks are beyond it."""
        if self._used is not None:
            self._store.delete_key(f"{self._used}/{self._rank}")
            for key in ("arrived", "verdict") if self._rank == 0 else ():
                self._store.delete_key(f"{self._used}/{key}")
        self._used = step


class Transfer(Protocol):
    """How the bytes move, on this rank: between ``begin_update`` and ``end_update`` of all engines."""

    def run(self, engines: Sequence[Engine]) -> None:
        """Send what this rank must; put what arrives into ``engines``, those with objects in this process. All ranks
        call it together; where it fails on one, it must fail on the others, at the latest after a time-out."""
        ...

    def fail(self) -> None:
        """The sync failed, here or elsewhere: drop connections, that others may have given up. On all ranks."""
        ...


class WeightSync:
    """Brings the trained weights into engines, again and again. Every rank makes one, with the same ``transfer``.

    Args:
        engines: those with objects in this process; may be empty, and must not be on every rank.
    """

    def __init__(self, engines: Sequence[Engine], transfer: Transfer, agreement: Agreement) -> None:
        self._engines = tuple(engines)
        self._transfer = transfer
        self._agreement = agreement
        self._number = 0

    def sync(self, version: int, *, mode: PauseMode = "drain") -> None:
        """One whole sync; what sleeps is awake afterwards, and what was paused runs. Every rank must call it.

        Args:
            version: of the weights that come; above the engines' (or the same again, where one is broken).
            mode: whether requests in flight are awaited, or stand still and go on with the new weights.

        Raises:
            SyncFailed: on all ranks. Engines are broken if it failed after ``begin_update`` had begun on any.
        """
        self._number += 1
        paused: list[Engine] = []
        try:
            draining_s = sum(engine.drain_timeout_s for engine in self._engines) if mode == "drain" else 0.0
            draining_s = self._together("check", lambda engine: engine.state.check_version(version), value=draining_s)
            self._together("pause", lambda engine: _pause(engine, mode, paused), longer_by_s=draining_s)
        except BaseException:
            with ExitStack() as undo:  # each, also where another one's raises
                for engine in paused:
                    undo.callback(engine.resume)
            raise
        try:
            self._together("wake weights", lambda engine: engine.wake(("weights",)))
            self._together("begin_update", lambda engine: engine.begin_update())
            self._agree("transfer", lambda: self._transfer.run(self._engines))
            self._together("end_update", lambda engine: engine.end_update())
            self._together("reset_caches", lambda engine: engine.reset_caches())
            self._together("set_version", lambda engine: engine.set_version(version))
            self._together("wake kv_cache", lambda engine: engine.wake(("kv_cache",)))
            self._together("resume", lambda engine: engine.resume())
        except BaseException as failure:
            for engine in self._engines:
                engine.fail(f"the sync of version {version} failed: {failure}")
            self._transfer.fail()
            raise

    def _together(
        self, step: str, action: Callable[[Engine], None], *, value: float = 0.0, longer_by_s: float = 0.0
    ) -> float:
        def act() -> None:
            for engine in self._engines:
                action(engine)

        return self._agree(step, act, value=value, longer_by_s=longer_by_s)

    def _agree(self, step: str, action: Callable[[], None], *, value: float = 0.0, longer_by_s: float = 0.0) -> float:
        error: BaseException | None = None
        try:
            action()
        except BaseException as problem:  # raised again below, once the other ranks know of it
            error = problem
        try:
            return self._agreement.confirm(f"sync {self._number}: {step}", error, value=value, longer_by_s=longer_by_s)
        except SyncFailed:
            if error is not None and not isinstance(error, Exception):  # Ctrl-C stays what it is
                raise error from None
            raise


def _pause(engine: Engine, mode: PauseMode, paused: list[Engine]) -> None:
    """Unless it is paused; ``paused`` gets those that weren't."""
    if engine.state.phase == "running":
        engine.pause(mode)
        paused.append(engine)
