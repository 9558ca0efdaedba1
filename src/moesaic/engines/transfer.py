"""Two ways in which trained weights get into engines: planned, shard to shard; and as a stream of whole tensors.

Planned, each byte goes once from a rank that holds it to an engine rank that needs it. Streamed, whole tensors are
gathered and handed to each engine: simple, and more bytes; what planned transfers are measured against.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.engines.base import Engine, Offer, Receiving
from moesaic.reshard.blocks import describe_source
from moesaic.reshard.connect import connect_transport
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.resolve import resolve_layout
from moesaic.reshard.run import RunReport, local_shards, run_plan
from moesaic.reshard.transfers import ProcessView, ReshardPlan, plan_transfers
from moesaic.reshard.transports import GlooTransport
from moesaic.runtime import current_device
from moesaic.weights.agree import state_tensors
from moesaic.weights.expert_names import ExpertNames
from moesaic.weights.export import file_dtypes, find_layout
from moesaic.weights.stream import stream_hf_tensors

T = TypeVar("T")
REASON_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One engine, as its process describes it to the others: for each of its ranks, a digest of the layout."""

    in_process: bool
    digests: tuple[str, ...]


class PlannedTransfer:
    """Every rank of the trained model makes one, and runs it through ``WeightSync``. Planned once, on the first run.

    At most one engine rank may live in a trainer's process (``in_process`` engines); others are processes of their own.

    Args:
        model: the trained one, on all ranks of the default process group (or alone, where there is none).
        dtype: what weights are rounded to on their way, as in ``export_hf``.
        store_host: of rank 0, as the other ranks and the engines' processes reach it.
        timeout_s: for connecting, and for each message.
        verify_checksum: both sides compute and compare checksums.

    Attributes:
        plan: None before the first run.
        report: of this rank's part of the last run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        store_host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        verify_checksum: bool = False,
    ) -> None:
        self.plan: ReshardPlan | None = None
        self.report: RunReport | None = None
        self._model, self._dtype = model, dtype
        self._store_host, self._timeout_s = store_host, timeout_s
        self._verify_checksum = verify_checksum
        self._store: dist.TCPStore | None = None
        self._address = (store_host, 0)
        self._processes: tuple[tuple[int, ...], ...] = ()
        self._view: ProcessView | None = None
        self._transport: GlooTransport | None = None
        self._num_failures = 0

    def run(self, engines: Sequence[Engine]) -> None:
        """See ``Transfer``. Connected on the first run, and again after a failure."""
        if self.plan is None:
            self.plan = self._make_plan(engines)
        plan, name = self.plan, f"planned/{self._num_failures}"
        receiving = []
        for engine, processes in zip(engines, self._processes, strict=True):
            offer = Offer(
                plan=plan,
                processes=processes,
                num_processes=plan.num_processes,
                store=self._address,
                prefix=name,
                timeout_s=self._timeout_s,
                verify_checksum=self._verify_checksum,
            )
            receiving.append(engine.start_receive(offer))
        try:
            self._run(plan, receiving, name)
        except Exception as error:
            reasons = [reason for each in receiving if (reason := _reason(each)) is not None]
            if reasons:
                raise RuntimeError(f"{error} The engine says: {'; '.join(reasons)}") from error
            raise
        for each in receiving:
            each.wait(self._timeout_s)

    def _run(self, plan: ReshardPlan, receiving: Sequence[Receiving], name: str) -> None:
        """This rank's part."""
        sinks = [each.sink for each in receiving if each.sink is not None]
        assert len(sinks) <= 1, "the plan has one engine rank in a process"
        if self._transport is None:
            assert self._store is not None
            self._transport = connect_transport(
                self._store, _rank(), plan.num_processes, _find_device(self._model), self._timeout_s, name=name
            )
        if self._view is None:
            self._view = plan.messages_of(_rank())
        self.report = run_plan(
            self._view,
            self._transport,
            local_shards(self._model),
            sinks[0] if sinks else None,
            verify_checksum=self._verify_checksum,
        )

    def fail(self) -> None:
        """See ``Transfer``."""
        self._num_failures += 1
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _make_plan(self, engines: Sequence[Engine]) -> ReshardPlan:
        """Every rank tells the others its engines' layouts, in the trained model's names; then each plans the same
        alone."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self._store is None:
            self._open_store()
        own: dict[str, TargetLayout] = {}
        found = _gather(lambda: self._describe(engines, own))
        layouts = _share(own, [[digest for each in of_rank for digest in each.digests] for of_rank in found])
        next_process = world_size
        targets: list[TargetLayout] = []
        target_process: list[int] = []
        for rank, of_rank in enumerate(found):
            processes = []
            for each in of_rank:
                count = len(each.digests)
                if each.in_process and count > 1:
                    raise ValueError(f"an engine in rank {rank}'s process has {count} ranks; one is possible.")
                places = (rank,) * count if each.in_process else tuple(range(next_process, next_process + count))
                next_process += 0 if each.in_process else count
                processes.append(places)
                target_process += places
                targets += [layouts[digest] for digest in each.digests]
            if rank == _rank():
                self._processes = tuple(processes)
        source = describe_source(self._model, dtype=self._dtype)
        return plan_transfers(source, targets, source_process=range(world_size), target_process=target_process)

    def _describe(self, engines: Sequence[Engine], own: dict[str, TargetLayout]) -> list[_Found]:
        """The engines of this process; ``own`` gets their layouts, by digest. These are resolved here: with experts one
        by one, as files have them, they are tens of times larger, and every rank would resolve them."""
        known: dict[TargetLayout, str] = {}
        found = []
        for engine in engines:
            digests = []
            for layout in engine.target_layouts():
                if layout not in known:
                    resolved = self._resolve(layout) if engine.names == "files" else layout
                    # Of the values: what pickle makes of equal ones may differ.
                    known[layout] = hashlib.sha256(repr(resolved).encode()).hexdigest()
                    own[known[layout]] = resolved
                digests.append(known[layout])
            found.append(_Found(in_process=engine.in_process, digests=tuple(digests)))
        return found

    def _resolve(self, layout: TargetLayout) -> TargetLayout:
        """From keys of files to the trained model's tensors."""
        state = state_tensors(self._model)
        return resolve_layout(layout, *find_layout(self._model, state), file_dtypes(self._model, state, self._dtype))

    def _open_store(self) -> None:
        """A store of this transfer's own, served by rank 0. On all ranks, or on none: one that can't reach it
        (``store_host`` is its own machine) fails them all."""
        store: dist.TCPStore | None = None

        def open_store(port: int) -> dist.TCPStore:
            timeout = timedelta(seconds=self._timeout_s)
            is_master = _rank() == 0
            return dist.TCPStore(self._store_host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)

        def serve() -> int:
            nonlocal store
            store = open_store(0) if _rank() == 0 else None
            return 0 if store is None else store.port

        def connect() -> None:
            nonlocal store
            store = open_store(port) if store is None else store

        port = _gather(serve)[0]
        _gather(connect)
        self._store, self._address = store, (self._store_host, port)


class StreamedTransfer:
    """Every rank of the trained model makes one, and runs it through ``WeightSync``.

    Args:
        model: the trained one.
        bucket_mib: what a rank holds beside its shards, about; and what an engine gets at a time.
        dtype: what weights are cast to, as in ``export_hf``.
        experts: how experts are named, where an engine doesn't take them as in the files.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bucket_mib: float = 512,
        *,
        dtype: torch.dtype | None = None,
        experts: ExpertNames | None = None,
    ) -> None:
        self._model, self._bucket_mib = model, bucket_mib
        self._dtype, self._experts = dtype, experts

    def run(self, engines: Sequence[Engine]) -> None:
        """See ``Transfer``."""
        takers = [rank for rank, count in enumerate(_gather(lambda: len(engines))) if count]
        dst = takers[0] if len(takers) == 1 and dist.is_initialized() else None
        # Half the memory is the stream's, half the bucket's that is being filled.
        stream = stream_hf_tensors(self._model, self._bucket_mib / 2, dtype=self._dtype, experts=self._experts, dst=dst)
        with closing(stream):
            for bucket in _fill_buckets(stream, int(self._bucket_mib * 2**19)):
                for engine in engines:
                    engine.receive(bucket)

    def fail(self) -> None:
        """See ``Transfer``; nothing is kept between runs."""


def _fill_buckets(stream: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in stream:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _share(own: Mapping[str, TargetLayout], digests: Sequence[Sequence[str]]) -> dict[str, TargetLayout]:
    """All ranks' layouts by digest, on all ranks: each is sent once, by the first rank that has it.

    Args:
        own: this rank's.
        digests: of each rank's.
    """
    if not dist.is_initialized():
        return dict(own)
    shared: dict[str, TargetLayout] = {}
    for rank, of_rank in enumerate(digests):
        new = [digest for digest in dict.fromkeys(of_rank) if digest not in shared]
        if new:
            sent: list[Any] = [[own[digest] for digest in new] if rank == dist.get_rank() else None]
            dist.broadcast_object_list(sent, src=rank)
            shared |= zip(new, sent[0], strict=True)
    return shared


def _gather(make: Callable[[], T]) -> list[T]:
    """What each rank of the default group makes; where it fails on one, it fails on all."""
    made: T | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as problem:  # raised below, when the other ranks know of it
        error = problem
    if dist.is_initialized():
        all_made: list[tuple[T | None, str | None]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(all_made, (made, None if error is None else f"{type(error).__name__}: {error}"))
    else:
        all_made = [(made, None)]
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(all_made) if text is not None]
    if failed:
        raise RuntimeError(f"describing engines failed on {'; '.join(failed)}")
    return [each for each, _ in all_made]  # type: ignore[misc]


def _reason(receiving: Receiving) -> str | None:
    """Why an engine's ranks failed, where they say so soon: others see only that they don't come, or are gone."""
    try:
        receiving.wait(REASON_TIMEOUT_S)
    except TimeoutError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _find_device(model: PreTrainedModel) -> torch.device:
    """Where the model computes: shards that are kept on the host go through it on their way."""
    meshes = {each.device_mesh.device_type for each in state_tensors(model).values() if isinstance(each, DTensor)}
    if meshes:
        return torch.device("cpu") if meshes == {"cpu"} else current_device()
    return next(iter(state_tensors(model).values())).device


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
