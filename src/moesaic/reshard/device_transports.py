"""Messages between accelerators: shared memory within one device, NCCL between two. Agreement stays on the host.

Written for torch 2.13 and not run yet on any accelerator; what ``SharedTransport`` does was run on memory of the host.

Buffers lie on ``device``, and every step is on its current stream: packing, the transfer's own stream waiting for it,
``wait`` ordering what follows (unpacking, packing the same memory anew) behind the transfer. ``wait`` also holds the
host until the transfer is done, so that a failure is seen here and not by NCCL's watchdog, which ends the process.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.reshard.transports import NOTE_POLL_S, GlooTransport, Transfer, Waiting
from moesaic.runtime import BACKENDS

POLL_S = 0.0005


def describe_place(device: torch.device) -> str:
    """Where buffers of ``device`` lie, so that two processes can tell whether they share it. Example:
    ``cuda/node-3/<the device's uuid>``; ``cpu`` for memory of the host."""
    if device.type == "cpu":
        return "cpu"
    uuid = torch.get_device_module(device).get_device_properties(device).uuid
    return f"{device.type}/{socket.gethostname()}/{uuid}"


class SharedTransport(GlooTransport):
    """Processes on one device: the sender hands out its buffer (CUDA IPC), the receiver copies from it.

    Handles go through the store, and the sender's buffer is free again when the receiver says that it has copied. The
    handles are pickles: whoever can write to the store can run code here. Not with torch's expandable segments, whose
    memory can't be handed out.
    """

    def __init__(self, store: dist.Store, process: int, num_processes: int, timeout_s: float) -> None:
        super().__init__(store, process, num_processes, timeout_s)
        self._device = torch.device("cpu")
        self._num_shared: Counter[tuple[int, int]] = Counter()

    @classmethod
    def connect_device(
        cls,
        store: dist.Store | str,
        process: int,
        num_processes: int,
        device: torch.device,
        timeout_s: float = 60.0,
        *,
        name: str = "reshard",
    ) -> Self:
        """As ``connect``, with the device that this process's buffers lie on.

        Raises:
            ValueError: besides, ``device`` isn't one for this transport.
        """
        transport = cls.connect(store, process, num_processes, timeout_s, name=name)
        transport._device = device
        try:
            transport._connect_devices()
        except BaseException as error:
            transport.fail(error)
            raise
        return transport

    def _connect_devices(self) -> None:
        """Nothing more: handles go through the store."""

    @property
    def device(self) -> torch.device:
        """Where buffers must lie."""
        return self._device

    def start_send(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Hand out ``buffer``, once all is in it that the current stream was given before."""
        self._bytes_sent += buffer.nbytes
        key = self._next_key(self._process, process)
        self._synchronize()
        self._store.set(key, bytes(ForkingPickler.dumps(buffer)).hex())

        def wait() -> None:
            self._poll(lambda: self._store.check([f"{key}/taken"]), process, f"sending to process {process}")
            self._store.delete_key(f"{key}/taken")

        return Waiting(wait)

    def start_receive(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """The copy itself is made when it is waited for: its sender waits for nothing else before."""
        self._bytes_received += buffer.nbytes
        key = self._next_key(process, self._process)

        def wait() -> None:
            self._poll(lambda: self._store.check([key]), process, f"receiving from process {process}")
            shared = pickle.loads(bytes.fromhex(self._store.get(key).decode()))
            buffer.copy_(shared)
            self._synchronize()
            del shared  # before the sender is told: it may free the memory then
            self._store.delete_key(key)
            self._store.set(f"{key}/taken", "")

        return Waiting(wait)

    def _next_key(self, sender: int, receiver: int) -> str:
        self._num_shared[sender, receiver] += 1
        return f"shared/{sender}/{receiver}/{self._num_shared[sender, receiver]}"

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()

    def _poll(self, is_done: Callable[[], bool], process: int, what: str) -> None:
        """Hold the host until ``is_done``; fail with the others, or when the time is up."""
        deadline = time.monotonic() + self._timeout_s
        next_look = time.monotonic() + NOTE_POLL_S
        try:
            while not is_done():
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError(f"no answer within {self._timeout_s:g} s")
                if now > next_look:
                    self._look()
                    next_look = now + NOTE_POLL_S
                time.sleep(POLL_S)
        except (RuntimeError, OSError) as error:
            raise self._failure(process, what, error) from error


class NcclTransport(SharedTransport):
    """NCCL between two devices, ``SharedTransport``'s way within one: NCCL refuses a pair that shares a device.

    Each pair of processes that exchange messages has a communicator, and that takes memory of both devices.
    """

    _nccl: Any = None  # a ProcessGroupNCCL; torch's stubs don't know its send and recv
    _neighbours: frozenset[int] = frozenset()
    _prepared: frozenset[int] = frozenset()

    def _connect_devices(self) -> None:
        if not dist.is_nccl_available() or BACKENDS.get(self._device.type) != "nccl":
            raise ValueError(f"device={self._device}: NCCL needs one of its devices and a torch built with it.")
        self._store.set(f"device/{self._process}", describe_place(self._device))
        places = [self._store.get(f"device/{peer}").decode() for peer in range(self._num_processes)]
        own = places[self._process]
        self._neighbours = frozenset(peer for peer, other in enumerate(places) if other == own)
        options = dist.ProcessGroupNCCL.Options()
        # Later than this transport gives up: the watchdog's answer to a time-out is to end the process.
        options._timeout = timedelta(seconds=4 * self._timeout_s)
        nccl_store = dist.PrefixStore("nccl", self._store)
        self._nccl = dist.ProcessGroupNCCL(nccl_store, self._process, self._num_processes, options)

    def prepare(self, processes: Iterable[int]) -> None:
        """Make the communicators of pairs, one after the other, in one order of all pairs.

        A pair's first message makes it, and holds the host until the other is there too. Amid other messages that could
        wait for ever: the other may first need this host to copy what it shares.
        """
        new = set(processes) - self._neighbours - self._prepared
        for peer in sorted(new, key=lambda peer: (abs(peer - self._process), min(peer, self._process))):
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._start_nccl(byte, peer, is_send=self._process < peer).wait()
        self._prepared |= new

    def start_send(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to send; on the device behind all that its current stream was given before."""
        if process in self._neighbours:
            return super().start_send(buffer, process, number)
        self._bytes_sent += buffer.nbytes
        return self._start_nccl(buffer, process, is_send=True)

    def start_receive(self, buffer: Tensor, process: int, number: int) -> Transfer:
        """Begin to receive; NCCL knows no numbers: messages of two processes pair in the order of posting."""
        if process in self._neighbours:
            return super().start_receive(buffer, process, number)
        self._bytes_received += buffer.nbytes
        return self._start_nccl(buffer, process, is_send=False)

    def close(self) -> None:
        """End all connections; kernels that wait for a peer are ended too."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        super().close()

    def _start_nccl(self, buffer: Tensor, process: int, *, is_send: bool) -> Transfer:
        if self._nccl is None:
            raise RuntimeError("this transport is closed; connect another under another name.")
        what = f"{'sending to' if is_send else 'receiving from'} process {process}"
        with torch.accelerator.device_index(self._device.index):
            work = (self._nccl.send if is_send else self._nccl.recv)([buffer], process, 0)

        def wait() -> None:
            self._poll(work.is_completed, process, what)
            work.wait()  # the current stream behind the transfer's

        return Waiting(wait)
