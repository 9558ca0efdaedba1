"""Transports of accelerators, as far as memory of the host can stand in for a device's."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.reshard.blocks import replicated
from moesaic.reshard.connect import choose_transport, connect_transport
from moesaic.reshard.device_transports import NcclTransport, SharedTransport
from moesaic.reshard.layout import Held, SourceLayout
from moesaic.reshard.run import run_plan
from moesaic.reshard.sinks import TensorSink
from moesaic.reshard.transfers import plan_transfers
from moesaic.reshard.transports import GlooTransport, PeerFailed
from tests.dist.test_reshard import assert_equal
from tests.dist.test_reshard_run import SHAPE, small_plan, small_sink, small_source, small_weights
from tests.reshard_engines import whole


def run_shared(process: int) -> None:
    """As processes of one accelerator would: here on shared memory of the host."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    store = dist.PrefixStore("reshard", dist.distributed_c10d._get_default_store())
    with mock.patch("moesaic.reshard.connect.describe_place", lambda device: "npu/host/0"):
        transport = connect_transport(store, process, 4, torch.device("cpu"), 20, name="shared")
    assert type(transport) is SharedTransport
    sink, view = small_sink(process), small_plan().messages_of(process)
    for _ in range(2):
        report = run_plan(view, transport, small_source(process), sink, max_in_flight_bytes=1200)
        assert report.bytes_received == sum(message.num_bytes for message in view.receives)
        assert_equal(sink.tensors if sink else {}, small_weights() if sink else {})
    transport._timeout_s = 0.5
    if process == 1:  # its last message never comes: nobody waits for ever
        view = dataclasses.replace(view, sends=view.sends[:-1])
    with pytest.raises(PeerFailed, match="is gone or late"):
        run_plan(view, transport, small_source(process), sink, max_in_flight_bytes=1200)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")


def test_processes_of_one_device_hand_out_their_buffers(run_ranks: Any) -> None:
    run_ranks(run_shared, 4)


NODE_A, NODE_B = ("cuda/a/0", "cuda/a/1"), ("cuda/b/0", "cuda/b/1")


@pytest.mark.parametrize(
    ("places", "has_nccl", "chosen"),
    [
        (("cpu", "cpu"), True, GlooTransport),
        ((*NODE_A, "cpu"), True, GlooTransport),
        ((NODE_A[0], NODE_A[0]), True, SharedTransport),
        (NODE_A, True, NcclTransport),
        ((*NODE_A, *NODE_A), True, NcclTransport),  # each device's trainer and engine
        (("cuda/a/0", "cuda/b/0"), True, NcclTransport),
        (NODE_B, False, GlooTransport),
        (("npu/a/0", "npu/a/1"), True, GlooTransport),
        (("npu/a/0", "cuda/a/0"), True, GlooTransport),
    ],
)
def test_the_devices_of_all_choose_the_transport(places: tuple[str, ...], has_nccl: bool, chosen: type) -> None:
    assert choose_transport(places, has_nccl=has_nccl) is chosen


def connect_late(process: int) -> str:
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    transport = connect_transport(store, process, 2, torch.device("cpu"), 20)
    assert type(transport) is GlooTransport
    transport.close()
    with pytest.raises(ValueError, match=r"process=2: must be 0 to num_processes - 1 = 1"):
        connect_transport(store, 2, 2, torch.device("cpu"), 20)
    if process == 0:
        with pytest.raises(PeerFailed, match="not all of 2 processes came to 'second' within 0.2 s; missing: .1."):
            connect_transport(store, 0, 2, torch.device("cpu"), 0.2, name="second")
    return type(transport).__name__


def test_processes_without_accelerators_meet_over_gloo(run_ranks: Any) -> None:
    assert run_ranks(connect_late, 2) == ["GlooTransport"] * 2


class SlowToMeet:
    """As NCCL's groups do, in the host's memory: a pair's first message holds both until both are there."""

    def __init__(self, store: dist.Store, process: int) -> None:
        self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("slow", store), process, 3, timedelta(seconds=3))
        self.met: set[int] = set()

    def send(self, buffers: list[Tensor], process: int, tag: int) -> Joined:
        self.meet(process)
        return Joined(self.group.send(buffers, process, 1))

    def recv(self, buffers: list[Tensor], process: int, tag: int) -> Joined:
        self.meet(process)
        return Joined(self.group.recv(buffers, process, 1))

    def meet(self, process: int) -> None:
        if process not in self.met:
            sent = self.group.send([torch.zeros(1)], process, 0)
            self.group.recv([torch.zeros(1)], process, 0).wait()
            sent.wait()
            self.met.add(process)

    def abort(self) -> None:
        self.group = None


class Joined:
    def __init__(self, work: dist.Work) -> None:
        self.thread = Thread(target=work.wait)
        self.thread.start()

    def is_completed(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()


def run_mixed(process: int) -> None:
    """Processes 0 (a trainer) and 1 (a trainer and an engine rank) share a device, 2 (an engine rank) is elsewhere. 0
    has room for one message, the one that 1 must copy, and 1's next one is to 2, which has one of 0's to wait for."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    store = dist.PrefixStore("mixed", dist.distributed_c10d._get_default_store())
    names = [f"layers.{i}.w" for i in range(2)]
    held = [
        Held(name=name, shape=SHAPE, dtype=torch.float32, wire_dtype=torch.float32, holdings=replicated(SHAPE, [rank]))
        for rank, name in enumerate(names)
    ]
    layout = whole(dict.fromkeys(names, SHAPE))
    plan = plan_transfers(SourceLayout(num_ranks=2, tensors=tuple(held)), [layout] * 2, target_process=[1, 2])
    transport = NcclTransport.connect(store, process, 3, 5, name="mixed")
    transport._neighbours = frozenset({0: {0, 1}, 1: {0, 1}, 2: {2}}[process])
    transport._nccl = SlowToMeet(store, process)
    weights = {name: small_weights()[name] for name in names}
    source = {names[process]: weights[names[process]].clone()} if process < 2 else None
    sink = TensorSink({name: torch.full(SHAPE, torch.nan) for name in names}) if process else None
    for _ in range(2):
        limit = 2**20 if process == 1 else 4 * 8 * 96
        report = run_plan(plan.messages_of(process), transport, source, sink, max_in_flight_bytes=limit)
        assert report.bytes_received == (0, 4 * 8 * 96, 2 * 4 * 8 * 96)[process]
        if sink is not None:
            assert_equal(sink.tensors, weights)
    transport.close()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")


def test_a_transport_that_first_has_to_meet_holds_nobody_up(run_ranks: Any) -> None:
    run_ranks(run_mixed, 3)
