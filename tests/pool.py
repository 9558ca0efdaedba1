"""One pool of gloo workers for the whole test session.

A test asks for the fixture ``run_ranks`` and hands it a module-level function ``fn(rank, *args)``:

    results = run_ranks(sum_over_ranks, 4, 10)      # results[r] is what rank r returned

The function runs on ranks 0..world_size-1 inside a default process group (gloo) of exactly that size. Starting a worker
means forking a process that has imported torch and transformers already; workers then live on, so that a call costs
milliseconds. Between two calls a worker forgets whatever was made of process groups and meshes, and seeds start afresh.

Arguments and results are pickled, tensors by value: no shared memory, no file descriptors. Warnings are errors in
workers as in pytest. A rank that raises, dies or does not return in time ends the call with ``RankFailed``; its
traceback, or where it hangs, comes last in the message. The whole pool is then killed, since the other ranks may wait
in a collective for ever, and the next call starts a new one.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

MAX_WORKERS = 8
# What every worker imports sooner or later; imported once, in the process that the workers are forked from.
PRELOADED_MODULES = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
# How long, after the first report of a failure, others may still report theirs.
GRACE_S = 0.3

R = TypeVar("R")


class RunRanks(Protocol):
    """The type of the fixture ``run_ranks``."""

    def __call__(self, fn: Callable[..., R], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[R]: ...


class RankFailed(AssertionError):
    """A rank raised, died or hung.

    Attributes:
        rank: the rank that was first to report.
        report: that rank's traceback, how it died, or the stacks of the ranks that hang.
    """

    def __init__(self, summary: str, rank: int, report: str) -> None:
        super().__init__(f"{summary}\n\n{report}")
        self.rank = rank
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is sent, with the pickled ``(fn, args)`` behind it. ``number`` never repeats within a session."""

    number: int
    rank: int
    world_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running worker as the parent sees it; its rank is its place in the pool's list."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: Path  # faulthandler writes here: on a crash, and when the parent asks (SIGUSR1)


class WorkerPool:
    """Up to ``MAX_WORKERS`` workers, started when a call needs them."""

    def __init__(
        self, warning_filters: Sequence[str] = ("error",), preloaded_modules: Sequence[str] = PRELOADED_MODULES
    ) -> None:
        self._warning_filters = tuple(warning_filters)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded_modules))
        self._workers: list[Worker] = []
        self._num_jobs = 0
        self._num_started = 0
        self._store: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="moesaic-pool-")

    def preload(self) -> None:
        """Start importing what workers share, in the background."""
        from multiprocessing import forkserver

        forkserver.ensure_running()

    def run(self, fn: Callable[..., R], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[R]:
        """Run ``fn(rank, *args)`` on ranks 0..world_size-1 and return their results in the order of ranks.

        Raises:
            RankFailed: a rank raised, died, or had not returned after ``timeout_s`` seconds.
            ValueError: more ranks than the pool may have.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORKERS} workers.")
        payload = pickle.dumps((fn, args))
        try:
            self._start(world_size)
            self._num_jobs += 1
            for rank, worker in enumerate(self._workers[:world_size]):
                job = Job(number=self._num_jobs, rank=rank, world_size=world_size, timeout_s=timeout_s)
                worker.connection.send_bytes(pickle.dumps(job))
                worker.connection.send_bytes(payload)
            replies = self._collect(f"{fn.__module__}.{fn.__qualname__}", world_size, timeout_s)
        except BaseException:
            # The state of the ranks is unknown (also after Ctrl-C): the next call starts new ones.
            self.kill()
            raise
        return [pickle.loads(reply) for reply in replies]

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    def close(self) -> None:
        """End all workers and remove the pool's files."""
        self.kill()
        self._folder.cleanup()

    def _start(self, world_size: int) -> None:
        import torch.distributed as dist

        if self._store is None:
            # Port 0: the system picks a free one. The parent serves the store, so it outlives any worker.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            self._num_started += 1
            stacks = Path(self._folder.name) / f"stacks-{self._num_started}"
            process = self._context.Process(
                target=worker_main, args=(theirs, self._store.port, stacks, self._warning_filters), daemon=True
            )
            process.start()
            theirs.close()  # else the end of the worker would go unnoticed
            self._workers.append(Worker(process=process, connection=ours, stacks=stacks))

    def _collect(self, name: str, world_size: int, timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        replies: dict[int, bytes] = {}
        failures: dict[int, str] = {}
        while ranks:
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    is_ok, reply = connection.recv_bytes() == b"ok", connection.recv_bytes()
                except (EOFError, ConnectionResetError):
                    is_ok, reply = False, self._death_report(rank).encode()
                if is_ok:
                    replies[rank] = reply
                else:
                    failures[rank] = reply.decode()
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            first = next(iter(failures))
            others = f" (also failed: {sorted(set(failures) - {first})})" if len(failures) > 1 else ""
            raise RankFailed(f"rank {first} of {world_size} failed in {name}{others}", first, failures[first])
        if ranks:
            hanging = sorted(ranks.values())
            summary = f"{name}: no answer from ranks {hanging} of {world_size} after {timeout_s:g} s"
            raise RankFailed(summary, hanging[0], self._stacks_of(hanging))
        return [replies[rank] for rank in range(world_size)]

    def _death_report(self, rank: int) -> str:
        worker = self._workers[rank]
        worker.process.join(timeout=5)
        return f"rank {rank}'s process ended with exit code {worker.process.exitcode}\n{read_text(worker.stacks)}"

    def _stacks_of(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank].process.pid or 0, signal.SIGUSR1)
        limit = time.monotonic() + 2
        while time.monotonic() < limit and not all(read_text(self._workers[rank].stacks) for rank in ranks):
            wait([self._workers[rank].connection for rank in ranks], timeout=0.02)
        wait([self._workers[rank].connection for rank in ranks], timeout=0.1)  # let the last one finish its writing
        return "\n".join(f"rank {rank} is here:\n{read_text(self._workers[rank].stacks)}" for rank in ranks)


def read_text(path: Path) -> str:
    """What the file holds; nothing where a worker ended before it made it."""
    return path.read_text() if path.exists() else ""


def worker_main(connection: Connection, store_port: int, stacks: Path, warning_filters: tuple[str, ...]) -> None:
    """A worker's life: run one job after another until the parent ends it, or is gone."""
    import torch
    import torch.distributed as dist
    from _pytest.config import apply_warning_filters
    from transformers.utils.logging import disable_progress_bar

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills this process
    threading.Thread(target=exit_with_parent, daemon=True).start()
    stacks_file = stacks.open("w")
    faulthandler.enable(stacks_file)
    faulthandler.register(signal.SIGUSR1, stacks_file)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    apply_warning_filters(warning_filters, [])
    torch.set_num_threads(1)
    disable_progress_bar()  # and with it tqdm's semaphores, which a killed worker would leave behind
    gc.freeze()  # all that the fork brought along: collections between jobs then look at the jobs' own objects alone
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        job = pickle.loads(connection.recv_bytes())
        payload = connection.recv_bytes()
        try:
            status, reply = b"ok", run_job(job, payload, store)
        except (
            BaseException
        ) as error:  # whatever ends the function, pytest's own outcomes included, is this rank's answer
            status, reply = b"failed", "".join(traceback.format_exception(error)).encode()
        sys.stdout.flush()
        connection.send_bytes(status)
        connection.send_bytes(reply)


def exit_with_parent() -> None:
    """End this worker when the test session ends, however it ends; also while the main thread hangs in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def run_job(job: Job, payload: bytes, store: Any) -> bytes:
    """Run one job within its own process group, and leave nothing of it behind."""
    import numpy as np
    import torch
    import torch.distributed as dist

    # What torchrun would set, for code that reads it.
    os.environ.update(RANK=f"{job.rank}", LOCAL_RANK=f"{job.rank}")
    os.environ.update(WORLD_SIZE=f"{job.world_size}", LOCAL_WORLD_SIZE=f"{job.world_size}")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job-{job.number}", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s + 60),  # the parent is first to lose patience, and shows the stacks
    )
    fn, args = pickle.loads(payload)
    reply = pickle.dumps(fn(job.rank, *args))
    del fn, args
    if dist.is_initialized():  # a test of shutting down may have done it itself
        dist.barrier()  # gloo aborts where a rank leaves while others still talk to it
        dist.destroy_process_group()
    forget_meshes()
    return reply


def forget_meshes() -> None:
    """Drop what torch keeps of meshes beyond their process groups.

    DTensor's caches hold output specs, with their mesh, by an equality of meshes that ignores process groups. Names of
    groups start afresh with each default group, so an equal mesh of an earlier job would name other ranks' groups.
    """
    import torch.distributed.tensor._random as dtensor_random
    from torch.distributed.tensor import _redistribute as dtensor_redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    dtensor_redistribute._gen_transform_infos.cache_clear()
    dtensor_redistribute.clear_redistribute_planner_cache()
    dtensor_random._rng_tracker = None
    gc.collect()  # process groups in reference cycles hold sockets and threads
