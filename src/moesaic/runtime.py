"""Processes and devices: start local ranks, join the process group, leave it cleanly, seeds.

The only file that reads or writes environment variables and names a device's collective library. Importing it doesn't
import torch: the command line asks who this process is before it checks a recipe.

A rank is told who it is by its launcher (``torchrun``, or ``launch`` below, which is the same agent) through ``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. Without them a process is a world of one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

if TYPE_CHECKING:
    import torch

Params = ParamSpec("Params")


class PeerFailed(RuntimeError):
    """Raised by a process that was well, because another one failed, died or did not answer in time. Of several ranks'
    errors the launcher shows another before this: the one that failed says why."""


class StartError(ValueError):
    """What a user has to change, found only after the processes had started. It is shown without its stack, which the
    rank's error file has. Raised by ``start_errors``."""


# Device type -> process-group backend. A device from outside the tree (npu) brings a torch plug-in that registers it.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl"}
# For ranks that compute on the CPU; an accelerator does not notice. A gathered block is new memory each time: huge
# pages make touching it cheap, and giving everything over 2 MiB back at once keeps the heap from filling with holes
# (2.3 instead of 2.8 GiB a rank after 5 steps of the quickstart). oneDNN keeps a compiled kernel for each matmul shape
# that it met, 1,024 of them, and the experts' row counts are new shapes in every step.
CPU_SETTINGS = MappingProxyType(
    {
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2 * 2**20),
        "MALLOC_ARENA_MAX": "2",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
)
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# Ranks get this long to end after a SIGTERM, then SIGKILL: with detection (0.1 s) well inside the promised 30 s.
STOP_TIMEOUT_S = 10
# A rank that ends because of another leaves so much later: the first to leave ends all, and the cause must be written.
PEER_GRACE_S = 3


# ---------------------------------------------------------------------------------------------------------- devices


def device_type() -> str:
    """``cuda``, ``xpu``, ``npu``, ...: the accelerator that this torch can use, or ``cpu`` without one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def backend(kind: str) -> str:
    """Process-group backend for tensors of device type ``kind``; CPU tensors always go through gloo as well.

    Example: ``cpu`` -> ``gloo``; ``xpu`` -> ``cpu:gloo,xpu:xccl``.
    """
    if kind not in BACKENDS:
        raise ValueError(f"device type {kind!r}: no collective backend is known for it; known: {sorted(BACKENDS)}.")
    return BACKENDS[kind] if kind == "cpu" else f"cpu:gloo,{kind}:{BACKENDS[kind]}"


def current_device() -> torch.device:
    """The device of this rank: accelerator ``local_rank()``, or the CPU."""
    import torch

    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank())


# ------------------------------------------------------------------------------------------------- who is this rank


def under_launcher() -> bool:
    """Whether a launcher started this process as one rank of several (it then says so in ``RANK`` and ``WORLD_SIZE``).

    ``srun`` sets neither: run ``srun torchrun ...`` (one agent a node), or export both from ``SLURM_PROCID`` and
    ``SLURM_NTASKS``, with ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size_from_launcher() -> int:
    """Number of ranks that the launcher started; 1 without a launcher. Needs no process group."""
    return int(os.environ["WORLD_SIZE"]) if under_launcher() else 1


def rank_from_launcher() -> int:
    """This process's rank as the launcher numbered it; 0 without a launcher. Needs no process group."""
    return int(os.environ["RANK"]) if under_launcher() else 0


def local_rank() -> int:
    """Index of this rank on its node, which is the index of its accelerator; 0 without a launcher."""
    if not under_launcher():
        return 0
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("LOCAL_RANK is not set but RANK is: a launcher must set RANK, WORLD_SIZE and LOCAL_RANK.")
    return int(os.environ["LOCAL_RANK"])


# ---------------------------------------------------------------------------------------------------- process group


def init_process_group(timeout_s: float = 600.0) -> torch.device:
    """Join the default process group and make this rank's device current. Every rank must call it.

    Args:
        timeout_s: seconds after which a collective that some rank didn't join fails.

    Returns:
        This rank's device.
    """
    import torch
    import torch.distributed as dist

    device = current_device()
    options: dict[str, Any] = {"backend": backend(device.type), "timeout": timedelta(seconds=timeout_s)}
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        options["device_id"] = device
    if not under_launcher():
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return device


def shutdown() -> None:
    """Leave the process group together: barrier, then destroy. Every rank must call it; not after an error.

    gloo aborts the process ("terminate called without an active exception") whose peer left first, hence the barrier.
    After an error other ranks may be inside another collective: don't call it then, leave through ``run_rank``.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- start and run ranks


def run_rank(fn: Callable[Params, None], *args: Params.args, **kwargs: Params.kwargs) -> None:
    """Run ``fn`` as this process's rank. With peers, an error ends the process at once, kept for the launcher to show.

    The error is written to the launcher's error file *before* anything of the process group goes away: a peer that
    then fails on the closed connection writes later, so the oldest file is the cause. The process leaves without a
    barrier and without destructors, because its peers may wait in a collective that this rank will never join.

    A process without peers raises as usual; of a ``StartError`` it shows the message alone, as the launcher does.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    if is_child_of_launch():
        _end_with_parent()
    try:
        record(fn)(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:
        is_bare = isinstance(error, StartError)
        if world_size_from_launcher() == 1:
            _forget_process_group()
            if is_bare:
                raise SystemExit(str(error)) from error
            raise
        if isinstance(error, KeyboardInterrupt):
            _leave(EXIT_INTERRUPTED, "interrupted" if rank_from_launcher() == 0 else "")
        if isinstance(error, PeerFailed):
            time.sleep(PEER_GRACE_S)
        # launch() shows the rank that failed first, and only that one.
        report = str(error) if is_bare else traceback.format_exc()
        _leave(EXIT_FAILED, "" if is_child_of_launch() else report)


@contextmanager
def start_errors() -> Iterator[None]:
    """A ``ValueError`` inside is about what a run was given, not about the program: it becomes a ``StartError``.

    Raises:
        StartError: with the message of the ValueError, which is its cause.
    """
    try:
        yield
    except ValueError as error:
        raise StartError(str(error)) from error


def launch(command: Sequence[str], nproc: int, log_dir: Path) -> int:
    """Start ``nproc`` local ranks, each ``python <command>``, through torch's elastic agent; wait until all have ended.

    One rank that fails ends all; its traceback is printed last, under ``rank N failed``. Ctrl-C ends all and prints one
    line. The ranks run in sessions of their own, so that a Ctrl-C in the terminal reaches this process only.

    Args:
        command: arguments of this Python, e.g. ``("-m", "moesaic.cli", "train", "recipe.yaml")``. The program must run
            its work through ``run_rank``.
        nproc: number of ranks.
        log_dir: folder for the ranks' error files; made where it is missing.

    Returns:
        Exit code: 0; 1 where a rank failed; 130 after Ctrl-C; 128 + n after signal n.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run_id = f"moesaic-{uuid.uuid4().hex[:8]}"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: the agent takes a free one
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
        # SIGINT is left out: as KeyboardInterrupt it makes the agent send its ranks SIGTERM, which ends them silently.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        shutdown_timeout=STOP_TIMEOUT_S,
    )
    for name, value in CPU_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    _quiet_agent()
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        print(_failure_report(error, log_dir, run_id), file=sys.stderr, flush=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"interrupted: all {nproc} ranks ended", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except SignalException as error:
        print(f"stopped by {error.sigval.name}: all {nproc} ranks ended", file=sys.stderr, flush=True)
        return 128 + error.sigval
    for folder in log_dir.glob(f"{run_id}_*"):
        shutil.rmtree(folder)  # no error files in it
    return 0


def child_environment(values: Mapping[str, str]) -> dict[str, str]:
    """The environment for a server that isn't a rank: this process's, without what a launcher told this rank, and with
    ``values``."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)} | dict(values)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """``values`` in this process's environment, for a library that is told in no other way; then as it was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_alone(command: Sequence[str]) -> None:
    """Run ``python <command>`` in a process of its own, without peers, and wait for it: as from a plain shell.

    Raises:
        StartError: it failed; with what it wrote to stderr.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    for name, value in CPU_SETTINGS.items():
        environment.setdefault(name, value)
    done = subprocess.run([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        raise StartError(f"{' '.join(command)}: killed, most likely for want of memory. {done.stderr.strip()}")
    if done.returncode:
        raise StartError(done.stderr.strip() or f"{' '.join(command)}: exit code {done.returncode}")


def free_memory_bytes(kind: str) -> int:
    """Memory that device type ``kind`` could still give: of the host (``cpu``), or of this rank's accelerator."""
    if kind == "cpu":
        facts = Path("/proc/meminfo")
        if facts.is_file():
            line = next(line for line in facts.read_text().splitlines() if line.startswith("MemAvailable:"))
            return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import torch

    return int(torch.get_device_module(kind).mem_get_info()[0])


def count_local_devices() -> int:
    """How many ranks this machine has room for: its accelerators, or without any as many as 8, or its processors."""
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return max(8, os.cpu_count() or 1)


def is_child_of_launch() -> bool:
    """Whether ``launch`` started this process: then the process that called it waits, and says how it went."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("moesaic-")


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launching process dies, however it dies: no rank is left behind (Linux)."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal.SIGTERM)


def _forget_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(code: int, message: str) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _quiet_agent() -> None:
    """Keep the agent's own log lines (which process gets which signal) off the terminal: ``launch`` reports instead."""
    import logging

    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def _failure_report(error: Any, log_dir: Path, run_id: str) -> str:
    """What made the run fail: a rank killed from outside if there is one, else the rank whose error file is oldest;
    of those that say another rank failed, only where there are no others.

    A rank that dies by SIGKILL (out of memory) or SIGSEGV writes no file, while its peers' broken connections do.
    """
    consequences = {-signal.SIGTERM, -signal.SIGABRT}
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and failure.exitcode not in consequences and not Path(failure.error_file).exists():
            return f"rank {rank} failed: killed by {signal.Signals(-failure.exitcode).name}"
    files = sorted(log_dir.glob(f"{run_id}_*/attempt_0/*/error.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        rank, failure = error.get_first_failure()
        return f"rank {rank} failed: exit code {failure.exitcode}, no traceback was recorded"
    messages = {file: json.loads(file.read_text())["message"] for file in files}
    names = {file: message["message"].partition(": ")[0] for file, message in messages.items()}
    files.sort(key=lambda file: names[file] == PeerFailed.__name__)  # they stay in order otherwise
    cause = files[0]
    rank = int(cause.parent.name)
    if names[cause] == StartError.__name__:  # its peers only waited for it, or found the same
        return f"{messages[cause]['message'].partition(': ')[2]}\n(rank {rank}; its stack is in {cause})"
    trace = messages[cause]["extraInfo"]["py_callstack"]
    later = ", ".join(file.parent.name for file in files[1:])
    others = f"also failed, later: rank {later}; see {cause.parents[1]}\n" if later else ""
    return f"{others}rank {rank} failed\n{trace}"


# --------------------------------------------------------------------------------------------------- reproducibility


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (CPU and accelerator) of this process."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_determinism() -> None:
    """Make torch choose deterministic kernels, and raise where an operator has none. Call before the first kernel."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
