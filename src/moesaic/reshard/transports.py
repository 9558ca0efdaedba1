"""How messages of a reshard travel between processes; each transport owns its connections.

A transport joins processes that share no default process group: trainer ranks and an engine's workers. It has

    data       start_send, start_receive: tensors of bytes, matched by number between two processes
    agreement  agree: a barrier that also says whether all processes have one value, through the store that they met in
    failure    fail: leave a note in the store and close every connection, which ends the peers' waits at once

A process that dies leaves no note: the peer that waits for it sees its connection end, says who it was in a note of its
own and closes too, and so on, so that all fail within moments; one that hangs is given up after ``timeout_s``. A
transport that failed is never used again: connect another, under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.runtime import PeerFailed

# How often a wait looks whether another process has failed.
NOTE_POLL_S = 0.5
# Gloo's tags are 32-bit. Messages of two processes that are under way together have numbers much closer than this.
NUM_TAGS = 2**31 - 2


class Transfer(Protocol):
    """One message under way."""

    def wait(self) -> None:
        """Return once the buffer may be used: what came is in it, or what it held is sent.

        Raises:
            PeerFailed: the other process failed, or the time is up.
        """


class Transport(Protocol):
    """What ``run_plan`` needs. Any failure makes it useless; ``fail`` then closes it."""

    @property
    def process(self) -> int:
        """This process's number."""

    @property
    def num_processes(self) -> int:
        """How many there are."""

    @property
    def device(self) -> torch.device:
        """Where buffers must lie."""

    @property
    def bytes_sent(self) -> int:
        """In messages, since it was connected."""

    @property
    def bytes_received(self) -> int:
        """In messages, since it was connected."""

    def agree(self, what: str, value: str) -> None:
        """A barrier; every process must call it.

        Raises:
            ValueError: another process's value is not this one's.
            PeerFailed: another process failed.
        """

    def prepare(self, processes: Iterable[int]) -> None:
        """Connect to all ``processes`` that messages will go to or come from, which call it too, with this one among
        theirs. Before any message: to start one then waits for nobody."""

    def start_send(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to send flat bytes [N] to ``process``; they must not change before the transfer is done."""

    def start_receive(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to receive flat bytes [N] from ``process``; in the order in which it sends them."""

    def fail(self, error: BaseException) -> None:
        """Let the others know, and close. It raises nothing, so that ``error`` is what is seen."""

    def close(self) -> None:
        """Leave; when all have agreed that the work is done."""


class GlooTransport:
    """Messages over TCP, from and to host memory, in a gloo group that isn't the default one.

    Every process connects to every other: fine for hundreds of processes, one socket for each pair.
    """

    def __init__(self, store: dist.Store, process: int, num_processes: int, timeout_s: float) -> None:
        self._store = store
        self._process, self._num_processes, self._timeout_s = process, num_processes, timeout_s
        self._group: Any = None  # a ProcessGroupGloo; torch's stubs don't know its send and recv
        # Kept here, not in the transfers, because a work keeps the connections open that ``fail`` must close.
        self._works: dict[int, dist.Work] = {}
        self._waiter = _Waiter()
        self._num_started = self._num_agreed = 0
        self._bytes_sent = self._bytes_received = 0

    @classmethod
    def connect(
        cls,
        store: dist.Store | str,
        process: int,
        num_processes: int,
        timeout_s: float = 60.0,
        *,
        name: str = "reshard",
    ) -> Self:
        """Meet the other processes. Every one must call it, with the same store, ``num_processes`` and ``name``.

        Args:
            store: where they meet: a store, or ``host:port``, at which process 0 then serves one.
            timeout_s: how long to wait for the others, now and in every transfer.
            name: of this connection. One that was used before is refused: two connections would mix.

        Raises:
            ValueError: ``process`` or ``name`` don't fit.
            PeerFailed: not all came in time; the message names those that didn't.
        """
        if not 0 <= process < num_processes:
            raise ValueError(f"process={process}: must be 0 to num_processes - 1 = {num_processes - 1}.")
        if isinstance(store, str):
            store = open_store(store, process == 0, timeout_s)
        store = dist.PrefixStore(name, store)
        if store.add(f"joined/{process}", 1) > 1:
            raise ValueError(
                f"name={name!r}: process {process} has connected under it before; a connection that failed or was "
                "closed is not used again: give the next one another name, the same on all processes."
            )
        transport = cls(store, process, num_processes, timeout_s)
        try:
            transport._connect()
            transport._meet()  # so that none leaves, by a failure, while others still connect to it
        except BaseException as error:
            transport.fail(error)
            raise
        return transport

    def _connect(self) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        try:
            # Lazily made connections would spare those that nobody uses, but two processes that make one at the same
            # moment can wait for each other for ever (seen with torch 2.13).
            self._group = dist.ProcessGroupGloo(self._store, self._process, self._num_processes, timeout)
        except RuntimeError as error:
            missing = [peer for peer in range(self._num_processes) if not self._store.check([f"joined/{peer}"])]
            raise PeerFailed(
                f"process {self._process}: not all of {self._num_processes} processes connected within "
                f"{self._timeout_s:g} s; missing: {missing or 'none, but their connections failed'}."
            ) from error

    @property
    def process(self) -> int:
        """This process's number."""
        return self._process

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return self._num_processes

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def bytes_sent(self) -> int:
        """In messages, since it was connected."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """In messages, since it was connected."""
        return self._bytes_received

    def agree(self, what: str, value: str) -> None:
        """A barrier; every process must call it. See ``Transport``."""
        key = f"agree/{self._num_agreed}"
        self._num_agreed += 1
        mine = f"{self._process}:{what}={value}"
        try:
            first = self._store.compare_set(key, "", mine).decode()
        except RuntimeError as error:
            raise self._failure(None, what, error) from error
        owner, _, theirs = first.partition(":")
        if theirs != f"{what}={value}":
            raise ValueError(
                f"process {self._process} has {what}={value}, process {owner} {theirs}: all processes must have the "
                "same; make the plan on each from the same layouts."
            )
        self._meet()
        if self._process == 0:
            self._store.delete_key(key)

    def prepare(self, processes: Iterable[int]) -> None:
        """All are connected since ``connect``."""

    def start_send(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to send flat bytes [N] to ``process``; they must not change before the transfer is done."""
        self._bytes_sent += buffer.nbytes
        return self._start(buffer, process, 1 + number % NUM_TAGS, is_send=True)

    def start_receive(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to receive flat bytes [N] from ``process``."""
        self._bytes_received += buffer.nbytes
        return self._start(buffer, process, 1 + number % NUM_TAGS, is_send=False)

    def fail(self, error: BaseException) -> None:
        """Leave a note for the others unless one is there, and close."""
        try:
            self._store.compare_set("failure", "", f"process {self._process}: {type(error).__name__}: {error}")
        except RuntimeError as lost:
            # The store went with the process that served it: peers only see that this one's connections end.
            error.add_note(f"the other processes could not be told why: {lost}")
        self.close()

    def close(self) -> None:
        """End all connections; transfers under way fail, here and on the other side."""
        self._works.clear()
        self._group = None
        self._waiter.stop()

    def _look(self) -> None:
        if find_note(self._store) is not None:
            raise InterruptedError("another process failed")

    def _meet(self) -> None:
        """A barrier by messages, in which each process knows whom it waits for."""
        step = 1
        while step < self._num_processes:  # each round, a process hears of twice as many
            after, before = (self._process + step) % self._num_processes, (self._process - step) % self._num_processes
            sent = self._start(torch.zeros(1, dtype=torch.uint8), after, 0, is_send=True)
            received = self._start(torch.zeros(1, dtype=torch.uint8), before, 0, is_send=False)
            received.wait()
            sent.wait()
            step *= 2

    def _start(self, buffer: Tensor, process: int, tag: int, *, is_send: bool) -> Transfer:
        group = self._open_group()
        what = f"{'sending to' if is_send else 'receiving from'} process {process}"
        try:
            work = group.send([buffer], process, tag) if is_send else group.recv([buffer], process, tag)
        except RuntimeError as error:
            del group  # else the error's frames keep its connections open
            raise self._failure(process, what, error) from error
        self._num_started += 1
        self._works[self._num_started] = work
        key = self._num_started

        def wait() -> None:
            self._open_group()
            try:
                self._waiter.wait(self._works.pop(key), self._look)
            except (RuntimeError, OSError) as error:
                raise self._failure(process, what, error) from error

        return Waiting(wait)

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("this transport is closed; connect another under another name.")
        return self._group

    def _failure(self, process: int | None, what: str, error: Exception) -> PeerFailed:
        try:
            note = find_note(self._store)
        except RuntimeError:
            note = None  # the store is gone too
        if note is None:
            lost = "a process" if process is None else f"process {process}"
            first_line = str(error).strip().split("\n")[0]
            note = f"{lost} is gone or late, seen by process {self._process} when {what}: {first_line}"
        return PeerFailed(note)


class Waiting:
    """A transfer whose wait is a function."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """See ``Transfer``."""
        self._wait()


class _Waiter:
    """Waits for gloo's works in a thread of its own, because nothing can end such a wait from outside: gloo sometimes
    (torch 2.13: once in 100 deaths) doesn't tell a transfer that was just posted of a connection that has just ended.
    The caller looks for the others' notes meanwhile."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[dist.Work, SimpleQueue[str | None]] | None] = SimpleQueue()
        Thread(target=_wait_in_turn, args=(self._requests,), daemon=True, name="reshard-waiter").start()

    def wait(self, work: dist.Work, look: Callable[[], None]) -> None:
        """Until ``work`` is done, or ``look``, called every now and then, raises."""
        answer: SimpleQueue[str | None] = SimpleQueue()
        self._requests.put((work, answer))
        del work  # the thread has it, and lets go of it as soon as it has ended
        while True:
            with suppress(Empty):
                error = answer.get(timeout=NOTE_POLL_S)
                break
            look()
        if error is not None:
            raise RuntimeError(error)

    def stop(self) -> None:
        """End the thread, once the wait that it is in has ended."""
        self._requests.put(None)


def _wait_in_turn(requests: SimpleQueue[tuple[dist.Work, SimpleQueue[str | None]] | None]) -> None:
    while (request := requests.get()) is not None:
        work, answer = request
        error = None
        try:
            work.wait()
        except RuntimeError as problem:
            error = str(problem)
        del work, request
        answer.put(error)


def find_note(store: dist.Store) -> str | None:
    """Why the first process failed, ``None`` where none has.

    Raises:
        RuntimeError: the store can't be reached: the process that served it is gone.
    """
    return store.get("failure").decode() if store.check(["failure"]) else None


def open_store(address: str, is_master: bool, timeout_s: float) -> dist.TCPStore:
    """The store at ``host:port``, which ``is_master`` serves."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"store={address!r}: must be host:port, such as 10.0.0.1:29400.")
    return dist.TCPStore(
        host, int(port), is_master=is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
