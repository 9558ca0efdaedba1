"""The pool that every multi-process test stands on: order, isolation, failures that show, recovery."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.pool import RankFailed, RunRanks


def rank_and_sum(rank: int, value: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor(value + rank)
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total


def environment_and_state(rank: int) -> tuple[int, int, str, float]:
    return os.getpid(), torch.get_num_threads(), os.environ["WORLD_SIZE"], torch.rand(()).item()


def fail_on(rank: int, failing_rank: int) -> None:
    if rank == failing_rank:
        raise ValueError(f"rank {rank} doesn't like this")
    dist.barrier()


def hang_on(rank: int, hanging_rank: int) -> None:
    if rank == hanging_rank:
        wait_for_ever()


def wait_for_ever() -> None:
    signal.pause()


def die_on(rank: int, dying_rank: int) -> None:
    if rank == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn(rank: int) -> None:
    warnings.warn("careful", UserWarning, stacklevel=2)


def sum_over_mesh(rank: int, are_others_first: bool) -> float:
    """Sum of a DTensor sharded along one axis of a (2, 2) mesh; other groups may take the first names of the job."""
    if are_others_first:
        dist.new_group([0, 3])
        dist.new_group([1, 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    total = (x * 2).sum()
    assert isinstance(total, DTensor)
    return total.full_tensor().item()


def count_open_files(rank: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()]).sum().full_tensor()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("world_size", [4, 1, 2, 8])
def test_results_come_in_the_order_of_ranks_from_a_group_of_that_size(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(rank_and_sum, world_size, 10)
    expected = 10 * world_size + sum(range(world_size))
    assert [(rank, size, total.item()) for rank, size, total in results] == [
        (rank, world_size, expected) for rank in range(world_size)
    ]


def test_workers_live_on_and_start_each_job_from_the_same_state(run_ranks: RunRanks) -> None:
    first, second = run_ranks(environment_and_state, 2), run_ranks(environment_and_state, 2)
    assert first == second
    assert len({pid for pid, *_ in first} | {os.getpid()}) == 3
    assert {(num_threads, world) for _, num_threads, world, _ in first} == {(1, "2")}


def test_tensors_travel_by_value_with_their_bits(run_ranks: RunRanks) -> None:
    x = torch.tensor([1.0, float("inf"), 1e-45, float("nan")], dtype=torch.float32)
    for echo in run_ranks(return_argument, 2, {"x": x.bfloat16(), "y": x}):
        torch.testing.assert_close(echo, {"x": x.bfloat16(), "y": x}, rtol=0, atol=0, equal_nan=True)


def return_argument(rank: int, argument: object) -> object:
    return argument


def test_a_failing_rank_ends_the_call_with_its_traceback_last_and_the_next_call_works(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_on, 4, 2, timeout_s=30)  # ranks 0, 1 and 3 wait in a barrier
    assert caught.value.rank == 2
    assert "rank 2 of 4 failed in tests.dist.test_pool.fail_on" in str(caught.value)
    assert str(caught.value).rstrip().endswith("ValueError: rank 2 doesn't like this")
    assert [rank for rank, *_ in run_ranks(rank_and_sum, 4, 0)] == [0, 1, 2, 3]


def test_a_hanging_rank_is_shown_where_it_hangs(run_ranks: RunRanks) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match="no answer from ranks .*1.* of 2 after 1 s") as caught:
        run_ranks(hang_on, 2, 1, timeout_s=1.0)
    assert time.monotonic() - started < 15
    assert "in wait_for_ever" in caught.value.report
    assert run_ranks(return_argument, 2, "again") == ["again", "again"]


def test_a_rank_that_dies_is_named(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailed, match="rank 1's process ended with exit code -9"):
        run_ranks(die_on, 2, 1, timeout_s=30)


def test_warnings_are_errors_in_workers(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailed, match="UserWarning: careful"):
        run_ranks(warn, 1)


def test_an_equal_mesh_of_an_earlier_job_leaves_no_trace(run_ranks: RunRanks) -> None:
    # Without forget_meshes, a cached mesh of the first job is used; its group names are by then others', or nobody's.
    for are_others_first in (False, True, False):
        assert run_ranks(sum_over_mesh, 4, are_others_first) == [56.0] * 4


def test_jobs_leave_no_sockets_behind(run_ranks: RunRanks) -> None:
    first = run_ranks(count_open_files, 4)
    for _ in range(3):
        last = run_ranks(count_open_files, 4)
    assert last == first


def test_more_ranks_than_the_pool_may_have_are_refused(run_ranks: RunRanks) -> None:
    with pytest.raises(ValueError, match="world_size=9"):
        run_ranks(return_argument, 9, None)


PARENT = """
import os, signal, sys
from tests.pool import WorkerPool

def hang(rank, folder):
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{folder}/{rank}", f"{folder}/pid-{rank}")
    signal.pause()

if __name__ == "__main__":
    WorkerPool(preloaded_modules=["torch.distributed"]).run(hang, 2, sys.argv[1])
"""


def test_workers_end_when_the_session_is_killed(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    try:
        assert wait_until(lambda: all(file.exists() for file in files), limit_s=60)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(file.read_text()) for file in files]
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), limit_s=10)


def wait_until(is_true, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()
