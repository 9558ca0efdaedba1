"""Run a plan: pack, send, receive, unpack, with no more bytes in flight than allowed.

    check    what this process gives and takes fits the plan; all processes have the same plan; nothing sent before
    local    pieces that never leave the process; constants
    messages in the plan's order: packed into a ring of memory, posted while the ring has room, waited for in order
    finish   all processes agree that they are done

Each process posts its messages in the order of their numbers and waits for its oldest first. Of all messages that
aren't done, the one with the lowest number can then always be posted on both sides: nothing waits for ever.

A failure on one process fails all, and closes the transport. A tensor of the target is closed, which is when an engine
may use it, only when every element of it has arrived and, where asked for, each message's checksum was right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.reshard.layout import Message, Shape
from moesaic.reshard.packing import CHECKSUM_BYTES, Ring, align, has_checksum, pack, put_checksum, unpack
from moesaic.reshard.sinks import Openings, Sink, TensorSink, check_target
from moesaic.reshard.transfers import ProcessView
from moesaic.reshard.transports import Transfer, Transport
from moesaic.weights.agree import state_tensors

DEFAULT_IN_FLIGHT_BYTES = 32 * 2**20


class ChecksumError(RuntimeError):
    """A message is not what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one process did in a run. Bytes in flight are those of messages posted and not done, on this process."""

    num_messages: int
    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    peak_in_flight_bytes: int
    buffer_bytes: int


@torch.no_grad()
def local_shards(model: nn.Module) -> dict[str, Tensor]:
    """The calling rank's part of each parameter and persistent buffer, under its name in the plan; no copies."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in state_tensors(model).items()
    }


@torch.no_grad()
def run_plan(
    view: ProcessView,
    transport: Transport,
    source: Mapping[str, Tensor] | None,
    target: Sink | None,
    *,
    max_in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
    verify_checksum: bool = False,
) -> RunReport:
    """Do this process's part of a plan. Every process of the plan must call it, with the same plan and options.

    Args:
        view: this process's part of the plan.
        transport: connected to the plan's other processes; closed here if anything fails.
        source: name -> local tensor of this trainer rank, on any device: what lies on the host is packed there and only
            the messages in flight are on the transport's device. None where no trainer rank lives here. Its shapes and
            dtypes are compared with the plan's; which rows of a tensor a rank holds can't be seen in them.
        target: of this engine rank. None where none lives here.
        max_in_flight_bytes: limit of the memory for messages in this process, beside shards and target.
        verify_checksum: send a checksum with every message and compare before anything of it is unpacked. It is of the
            bytes on their way, packed to received; ``packing.checksum`` says what it may miss.

    Raises:
        ValueError: the view doesn't fit the transport, the source or the limit, or the plans differ; before any byte of
            a tensor is sent.
        ChecksumError: a message changed on its way.
        PeerFailed: another process failed; the message says which, where known, and why.
        whatever ``target`` raises.
    """
    try:
        return _Run(view, transport, source, target, max_in_flight_bytes, verify_checksum).run()
    except BaseException as error:  # also Ctrl-C: the others must not wait for this process
        transport.fail(error)
        raise


class _Run:
    """One call of ``run_plan``."""

    def __init__(
        self,
        view: ProcessView,
        transport: Transport,
        source: Mapping[str, Tensor] | None,
        target: Sink | None,
        max_in_flight_bytes: int,
        verify_checksum: bool,
    ) -> None:
        self.view, self.transport, self.verify_checksum = view, transport, verify_checksum
        self.source = {} if source is None else source
        self.extra_bytes = CHECKSUM_BYTES if verify_checksum else 0
        self.messages = sorted([*view.sends, *view.receives], key=lambda message: message.number)
        _check(view, transport, source, target, max_in_flight_bytes - self.extra_bytes)
        sizes = [message.num_bytes + self.extra_bytes for message in self.messages]
        self.ring = Ring(min(max_in_flight_bytes, sum(map(align, sizes))), transport.device)
        self.openings = None if target is None else Openings(view, self.source, target, max_in_flight_bytes)
        self.pending: deque[tuple[Message, Tensor, Transfer]] = deque()
        self.peak_in_flight_bytes = 0

    def run(self) -> RunReport:
        """All of it, in order."""
        sent, received = self.transport.bytes_sent, self.transport.bytes_received
        # The limit may differ between processes; what is on the wire may not.
        options = f"{self.view.fingerprint}, checksums {'on' if self.verify_checksum else 'off'}"
        self.transport.agree("plan", options)
        self.transport.prepare(sorted(set(map(self._peer, self.messages))))
        if self.openings is not None:
            self.openings.make_unreceived()
        for message in self.messages:
            self._post(message)
        while self.pending:
            self._finish_oldest()
        if self.openings is not None:
            self.openings.assert_all_closed()
        if self.transport.device.type != "cpu":
            torch.accelerator.current_stream(self.transport.device).synchronize()  # what was unpacked is there
        self.transport.agree("outcome", "done")
        return RunReport(
            num_messages=len(self.messages),
            bytes_sent=self.transport.bytes_sent - sent,
            bytes_received=self.transport.bytes_received - received,
            bytes_copied=sum(piece.num_bytes for piece in self.view.local),
            peak_in_flight_bytes=self.peak_in_flight_bytes,
            buffer_bytes=self.ring.memory.nbytes,
        )

    def _post(self, message: Message) -> None:
        size = message.num_bytes + self.extra_bytes
        while (buffer := self.ring.take(size)) is None:
            self._finish_oldest()
        self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, self.ring.bytes_taken)
        if self._is_send(message):
            pack(message, self.source, buffer)
            if self.verify_checksum:
                put_checksum(buffer)
            transfer = self.transport.start_send(buffer, self._peer(message), message.number)
        else:
            transfer = self.transport.start_receive(buffer, self._peer(message), message.number)
        self.pending.append((message, buffer, transfer))

    def _finish_oldest(self) -> None:
        message, buffer, transfer = self.pending.popleft()
        transfer.wait()
        if not self._is_send(message):
            if self.verify_checksum and not has_checksum(buffer):
                raise ChecksumError(
                    f"message {message.number} from trainer rank {message.source_rank} (process "
                    f"{self._peer(message)}) to engine rank {message.target_rank} (process "
                    f"{self.view.process}) changed on its way; nothing of it was used."
                )
            assert self.openings is not None
            for piece, part in unpack(message, buffer):
                self.openings.write(piece, part)
        self.ring.free_oldest()

    def _is_send(self, message: Message) -> bool:
        return self.view.source_process[message.source_rank] == self.view.process

    def _peer(self, message: Message) -> int:
        """The process at the other end."""
        ends = self.view.source_process[message.source_rank], self.view.target_process[message.target_rank]
        return ends[1] if self._is_send(message) else ends[0]


def _check(
    view: ProcessView,
    transport: Transport,
    source: Mapping[str, Tensor] | None,
    target: Sink | None,
    max_message_bytes: int,
) -> None:
    """What this process was given fits its part of the plan."""
    if (view.process, view.num_processes) != (transport.process, transport.num_processes):
        raise ValueError(
            f"view: it is of process {view.process} of {view.num_processes}, the transport of process "
            f"{transport.process} of {transport.num_processes}: they must be the same."
        )
    largest = max((message.num_bytes for message in (*view.sends, *view.receives)), default=0)
    if largest > max_message_bytes:
        raise ValueError(
            f"max_in_flight_bytes: leaves {max_message_bytes} bytes for a message, and the plan's largest has "
            f"{largest}: raise it, or plan with a smaller max_message_bytes."
        )
    if view.source_shards and source is None:
        raise ValueError(f"source=None: trainer rank {view.source_rank} lives in process {view.process} and must give.")
    for name, shape, dtype in view.source_shards:
        _check_source(name, shape, dtype, source or {})
    if view.tensors and target is None:
        raise ValueError(f"target=None: engine rank {view.target_rank} lives in process {view.process} and must take.")
    if isinstance(target, TensorSink):
        for described in view.tensors:
            if described.name not in target.tensors:
                raise ValueError(f"target: {described.name} is missing; plan from the engine's layout.")
            check_target(target.tensors[described.name], described)


def _check_source(name: str, shape: Shape, dtype: torch.dtype, source: Mapping[str, Tensor]) -> None:
    if name not in source:
        raise ValueError(f"source: {name} is missing; plan from this model's layout.")
    shard = source[name]
    if (tuple(shard.shape), shard.dtype) != (shape, dtype):
        raise ValueError(
            f"source: {name} is {tuple(shard.shape)} {shard.dtype} on this rank, in the plan it is {shape} {dtype}: "
            "the model isn't sharded or stored as when the plan was made; plan again, from this model."
        )
