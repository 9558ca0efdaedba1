"""Running a plan of a reshard: late and changed buffers, processes that fail or die, what is refused, memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moesaic.ops.placements import Block
from moesaic.reshard.blocks import replicated
from moesaic.reshard.layout import Copy, Held, Holding, SourceLayout, TargetTensor
from moesaic.reshard.run import ChecksumError, run_plan
from moesaic.reshard.sinks import TensorSink
from moesaic.reshard.transfers import ReshardPlan, plan_transfers
from moesaic.reshard.transports import GlooTransport, PeerFailed, Transfer
from tests.dist.test_reshard import assert_equal
from tests.reshard_engines import whole

# ------------------------------------------------------------------------------ a small plan, and a transport to watch


NUM_TENSORS = 6
SHAPE = (8, 96)


def small_plan(max_message_bytes: int = 512, dtype: torch.dtype = torch.float32) -> ReshardPlan:
    """Trainers 0 and 1 hold four rows each of every tensor, engine ranks in processes 2 and 3 take them whole."""
    halves = (
        Holding(holders=((0, Block((0, 0), (0, 0), (4, 96))),)),
        Holding(holders=((1, Block((4, 0), (0, 0), (4, 96))),)),
    )
    names = [f"layers.{i}.w" for i in range(NUM_TENSORS)]
    held = [Held(name=name, shape=SHAPE, dtype=dtype, wire_dtype=dtype, holdings=halves) for name in names]
    layout = whole(dict.fromkeys(names, SHAPE), dtype)
    return plan_transfers(
        SourceLayout(num_ranks=2, tensors=tuple(held)), [layout] * 2, max_message_bytes=max_message_bytes
    )


def small_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.w": torch.randn(SHAPE, generator=generator).to(dtype) for i in range(NUM_TENSORS)}


def small_source(process: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor] | None:
    return {n: w[4 * process :][:4].clone() for n, w in small_weights(dtype).items()} if process < 2 else None


def small_sink(process: int) -> TensorSink | None:
    return TensorSink({name: torch.full(SHAPE, torch.nan) for name in small_weights()}) if process >= 2 else None


class Watched(GlooTransport):
    """Calls ``hook(event, buffer, number)`` for send, sent, receive and received."""

    hook: Callable[[str, Tensor, int], None]

    def start_send(self, buffer: Tensor, process: int, number: int) -> Transfer:
        self.hook("send", buffer, number)
        return Then(super().start_send(buffer, process, number), lambda: self.hook("sent", buffer, number))

    def start_receive(self, buffer: Tensor, process: int, number: int) -> Transfer:
        self.hook("receive", buffer, number)
        return Then(super().start_receive(buffer, process, number), lambda: self.hook("received", buffer, number))


@dataclass
class Then:
    transfer: Transfer
    then: Callable[[], None]

    def wait(self) -> None:
        self.transfer.wait()
        self.then()


def connect(process: int, name: str, hook: Callable[[str, Tensor, int], None] | None = None) -> GlooTransport:
    store = dist.PrefixStore("reshard", dist.distributed_c10d._get_default_store())
    if hook is None:
        return GlooTransport.connect(store, process, 4, 20, name=name)
    transport = Watched.connect(store, process, 4, 20, name=name)
    transport.hook = hook
    return transport


def run_poisoned(process: int) -> None:
    """What was sent is overwritten with NaN at once, and so is what will be received to: the ring's memory is used
    again and again."""
    num_sent = 0

    def poison(event: str, buffer: Tensor, number: int) -> None:
        nonlocal num_sent
        num_sent += event == "sent"
        if event in ("sent", "receive"):
            buffer.fill_(0xFF)

    sink = small_sink(process)
    transport = connect(process, "poison", poison)
    for verify_checksum in (False, True):
        view = small_plan().messages_of(process)
        report = run_plan(
            view, transport, small_source(process), sink, max_in_flight_bytes=1200, verify_checksum=verify_checksum
        )
        assert report.num_messages > 8 and report.peak_in_flight_bytes <= report.buffer_bytes == 1200
        if sink is not None:
            assert_equal(sink.tensors, small_weights())
            assert report.bytes_received == sum(w.nbytes for w in small_weights().values()) + (
                16 * len(view.receives) if verify_checksum else 0
            )
    assert num_sent == (2 * len(small_plan().messages_of(process).sends) if process < 2 else 0)
    transport.close()


def test_a_buffer_overwritten_after_its_transfer_reaches_nobody(run_ranks: Any) -> None:
    run_ranks(run_poisoned, 4)


def run_repeated(process: int) -> None:
    """Process 0 is trainer and engine rank, 1 an engine rank: rows that a copy repeats, a scalar, a tensor of nothing.
    Rounded to bf16 on the way, also where nothing is sent."""
    shapes = {"row": (3,), "scalar": ()}
    held = [
        Held(name=name, shape=shape, dtype=torch.float32, wire_dtype=torch.bfloat16, holdings=replicated(shape, [0]))
        for name, shape in shapes.items()
    ]
    rows = Copy(
        source="row",
        target="rows",
        shape=(4, 3),
        source_start=(0,),
        source_dims=(None, 0),
        source_steps=(1, 1),
        target_offset=0,
        target_strides=(3, 1),
    )
    layout = whole({"scalar": (), "nothing": (0, 3)})
    layout = dataclasses.replace(
        layout,
        tensors=(*layout.tensors, TargetTensor(name="rows", shape=(4, 3), dtype=torch.float32)),
        copies=(layout.copies[0], rows),
    )
    plan = plan_transfers(SourceLayout(num_ranks=1, tensors=tuple(held)), [layout] * 2, target_process=[0, 1])
    store = dist.PrefixStore("repeated", dist.distributed_c10d._get_default_store())
    transport = GlooTransport.connect(store, process, 2, 20)
    source = {"row": torch.tensor([1.001, 2.0, 3.0]), "scalar": torch.tensor(1.001)} if process == 0 else None
    sink = TensorSink({tensor.name: torch.full(tensor.shape, torch.nan) for tensor in layout.tensors})
    report = run_plan(plan.messages_of(process), transport, source, sink, verify_checksum=True)
    assert report.bytes_received == process * (plan.lower_bound(1) + 16) == process * (2 * 4 + 16)
    expected = {"scalar": torch.tensor(1.0), "nothing": torch.empty(0, 3), "rows": torch.tensor([[1.0, 2.0, 3.0]] * 4)}
    assert_equal(sink.tensors, expected)
    assert sorted(sink.closed) == sorted(expected)
    transport.close()


def test_what_a_copy_repeats_travels_once(run_ranks: Any) -> None:
    run_ranks(run_repeated, 2)


def run_corrupted(process: int) -> tuple[str, list[str], bool]:
    """One byte changes between packing and sending, in a message of trainer 1."""
    victim = small_plan().messages_of(1).sends[9]

    def corrupt(event: str, buffer: Tensor, number: int) -> None:
        if process == 1 and event == "send" and number == victim.number:
            buffer[7] ^= 1

    sink = small_sink(process)
    transport = connect(process, "corrupt", corrupt)
    view = small_plan().messages_of(process)
    with pytest.raises((ChecksumError, PeerFailed)) as caught:
        run_plan(view, transport, small_source(process), sink, max_in_flight_bytes=1200, verify_checksum=True)
    assert isinstance(caught.value, ChecksumError) == (process == 2 + victim.target_rank)
    with pytest.raises(RuntimeError, match="closed"):
        transport.agree("plan", "again")
    if process != 2 + victim.target_rank:
        return str(caught.value), [], True
    assert sink is not None
    (name,) = {piece.target.name for piece in victim.pieces}
    complete = {name: tensor for name, tensor in sink.tensors.items() if name in sink.closed}
    assert_equal(complete, {name: small_weights()[name] for name in complete})
    return str(caught.value), sink.closed, name not in sink.closed


def test_a_changed_byte_fails_all_and_completes_nothing(run_ranks: Any) -> None:
    victim = small_plan().messages_of(1).sends[9]
    results = run_ranks(run_corrupted, 4)
    for message, _, is_open in results:
        assert f"message {victim.number} from trainer rank 1 (process 1) to engine rank {victim.target_rank}" in message
        assert is_open
    assert results[2 + victim.target_rank][1]  # earlier tensors were complete


# ------------------------------------------------------------------------------------------------ one fails, all fail


class BrokenSink(TensorSink):
    """Fails when the fourth tensor is opened."""

    def open(self, name: str) -> Tensor:
        if name == "layers.3.w":
            raise OSError("no memory left for layers.3.w")
        return super().open(name)


def run_failing(process: int, culprit: int) -> tuple[str, float]:
    """The culprit, a trainer or an engine, raises in the middle. What each process says, and when."""
    start_s = time.monotonic()

    def trip(event: str, buffer: Tensor, number: int) -> None:
        if process == culprit < 2 and number > small_plan().messages_of(process).sends[9].number:
            raise OSError("no memory left in a trainer")

    sink = small_sink(process)
    if sink is not None and process == culprit:
        sink = BrokenSink(sink.tensors)
    transport = connect(process, f"failing-{culprit}", trip)
    with pytest.raises(OSError if process == culprit else PeerFailed) as caught:
        view = small_plan().messages_of(process)
        run_plan(view, transport, small_source(process), sink, max_in_flight_bytes=1200)
    assert sink is None or "layers.5.w" not in sink.closed
    with pytest.raises(RuntimeError, match="connect another under another name"):
        transport.start_receive(torch.empty(1, dtype=torch.uint8), 0, 0)
    return str(caught.value), time.monotonic() - start_s


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_process_that_raises_fails_all_with_its_message(culprit: int, run_ranks: Any) -> None:
    for process, (message, spent_s) in enumerate(run_ranks(run_failing, 4, culprit)):
        assert "no memory left" in message and (process == culprit or message.startswith(f"process {culprit}: OSError"))
        assert spent_s < 5


def live_and_die(process: int, port: int, culprit: int, moment: str) -> None:
    """As a process of its own: the culprit ends itself, by SIGKILL; the others put what they saw into the store."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    num_messages = 0

    def trip(event: str, buffer: Tensor, number: int) -> None:
        nonlocal num_messages
        num_messages += 1
        if process == culprit and moment == "mid-sync" and num_messages > 9:
            os.kill(os.getpid(), signal.SIGKILL)

    transport = Watched.connect(store, process, 4, 20, name="mortal")
    transport.hook = trip
    if process == culprit and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        run_plan(small_plan().messages_of(process), transport, small_source(process), small_sink(process))
        seen = "nothing"
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    store.set(f"seen/{process}", f"{time.monotonic() - start_s:.3f} {seen}")


@pytest.mark.parametrize(
    ("culprit", "moment"), [pytest.param(1, "mid-sync", marks=pytest.mark.slow), (3, "mid-sync"), (0, "before")]
)
def test_a_process_that_is_killed_fails_all(culprit: int, moment: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    context = multiprocessing.get_context("forkserver")
    workers = [
        context.Process(target=live_and_die, args=(process, store.port, culprit, moment), daemon=True)
        for process in range(4)
    ]
    for worker in workers:
        worker.start()
    for process in set(range(4)) - {culprit}:
        spent_s, seen = store.get(f"seen/{process}").decode().split(" ", 1)
        assert float(spent_s) < 5, (process, seen)
        assert seen.startswith("PeerFailed: ") and f"process {culprit} is gone or late" in seen, seen
    for process, worker in enumerate(workers):
        worker.join(20)
        assert worker.exitcode == (-signal.SIGKILL if process == culprit else 0)


def run_refused(process: int, fault: str) -> tuple[str, int]:
    """What each process says, and the bytes that it sent."""
    view = small_plan().messages_of(process)
    options: dict[str, Any] = {}
    source, sink = small_source(process), small_sink(process)
    if process in (1, 3):
        if fault == "plan":
            view = small_plan(max_message_bytes=600).messages_of(process)
        elif fault == "checksums":
            options["verify_checksum"] = True
        elif fault == "limit":
            options["max_in_flight_bytes"] = 100
        elif fault == "number":
            view = small_plan().messages_of(process - 1)
        elif source is not None:
            name, shard = next(iter(source.items()))
            changed = {"dtype": shard.bfloat16(), "shape": shard[:3], "larger shape": torch.zeros(SHAPE)}
            source = {**source, name: changed[fault]} if fault in changed else None
        elif sink is not None:
            name, tensor = next(iter(sink.tensors.items()))
            changed = {"dtype": tensor.bfloat16(), "shape": tensor[:3], "larger shape": torch.full((9, 96), torch.nan)}
            sink = TensorSink({**sink.tensors, name: changed[fault]}) if fault in changed else None
    transport = connect(process, f"refused-{fault}")
    with pytest.raises((ValueError, PeerFailed)) as caught:
        run_plan(view, transport, source, sink, **options)
    assert sink is None or all(tensor.isnan().all() for tensor in sink.tensors.values())
    return f"{type(caught.value).__name__}: {caught.value}", transport.bytes_sent + transport.bytes_received


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("plan", "all processes must have the same"),
        ("checksums", "checksums on"),
        ("limit", "max_in_flight_bytes: leaves 100 bytes for a message"),
        ("number", "it is of process"),
        ("dtype", "torch.bfloat16"),
        ("shape", "layers.0.w"),
        ("larger shape", "layers.0.w"),
        ("missing", "=None"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_byte(fault: str, says: str, run_ranks: Any) -> None:
    results = run_ranks(run_refused, 4, fault)
    assert any(message.startswith("ValueError") for message, _ in results)
    for message, num_bytes in results:
        assert says in message, message
        assert num_bytes == 0


def meet(process: int) -> None:
    store = dist.PrefixStore("meet", dist.distributed_c10d._get_default_store())
    GlooTransport.connect(store, process, 2, 20, name="first").close()
    with pytest.raises(ValueError, match="name='first': process . has connected under it before"):
        GlooTransport.connect(store, process, 2, 20, name="first")
    with pytest.raises(ValueError, match=r"process=2: must be 0 to num_processes - 1 = 1\."):
        GlooTransport.connect(store, 2, 2, 20)
    with pytest.raises(ValueError, match="must be host:port"):
        GlooTransport.connect("somewhere", process, 2, 20)
    if process == 0:
        with pytest.raises(PeerFailed, match=r"not all of 2 processes connected within 0\.5 s; missing: \[1\]"):
            GlooTransport.connect(store, 0, 2, 0.5, name="second")
        waiters = [thread for thread in enumerate_threads() if thread.name == "reshard-waiter"]
        for thread in waiters:
            thread.join(5)
        assert not any(thread.is_alive() for thread in waiters)
    address = None
    if process == 0:
        free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = f"127.0.0.1:{free.port}"
        del free
        store.set("address", address)
    address = address or store.get("address").decode()
    transport = GlooTransport.connect(address, process, 2, 20)
    transport.agree("value", "7")
    message, start = (
        torch.full((3,), 7 * (1 - process), dtype=torch.uint8),
        (transport.start_send, transport.start_receive),
    )
    start[process](message, 1 - process, 2**40).wait()  # a large plan's numbers are larger than gloo's tags
    assert message.tolist() == [7, 7, 7]
    if process:
        with pytest.raises(ValueError, match="process 1 has value=1, process 0 value=0"):
            first_then(transport, store, "value", "1")
    else:
        transport._store.compare_set("agree/1", "", "0:value=0")
        store.set("first", "")
        with pytest.raises(PeerFailed):
            transport.agree("value", "0")


def first_then(transport: GlooTransport, store: dist.Store, what: str, value: str) -> None:
    store.wait(["first"])
    try:
        transport.agree(what, value)
    except ValueError as error:
        transport.fail(error)
        raise


def test_processes_meet_under_a_name_once(run_ranks: Any) -> None:
    run_ranks(meet, 2)


# -------------------------------------------------------------------------------------------------------- memory


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that is made, and not a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.num_bytes = 0
        self.copied: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                self.num_bytes += tensor.untyped_storage().nbytes()
        if func is torch.ops.aten.copy_.default:
            self.copied[args[0].untyped_storage()._cdata] += args[0].nbytes
        return result


def run_counted(process: int) -> int:
    """The shards are bf16 and the wire is too; beside the ring of messages nothing is made of them, and each byte is
    copied once: to the ring on the one side, from it on the other."""
    dtype = torch.bfloat16
    transport = connect(process, "counted")
    view = small_plan(dtype=dtype, max_message_bytes=256).messages_of(process)
    sink = None if process < 2 else TensorSink({n: torch.zeros(SHAPE, dtype=dtype) for n in small_weights()})
    source = small_source(process, dtype)
    with Allocations() as allocations:
        report = run_plan(view, transport, source, sink, max_in_flight_bytes=600)
    transport.close()
    assert report.buffer_bytes == 600 and report.peak_in_flight_bytes <= 600
    assert sum(allocations.copied.values()) == report.bytes_sent + report.bytes_received > 8 * 600
    return allocations.num_bytes - report.buffer_bytes


def test_beside_the_shards_there_are_only_messages_in_flight(run_ranks: Any) -> None:
    # One-byte tensors of the two barriers are all that is made besides.
    assert all(num_bytes <= 64 for num_bytes in run_ranks(run_counted, 4))
