"""A sync on several ranks: its order, what fails with whom, and the same bits by either way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from moesaic.engines.base import Engine, Offer, PauseMode, Receiving, Sampling
from moesaic.engines.hf import HfEngine
from moesaic.engines.states import EngineStateError
from moesaic.engines.sync import Agreement, SyncFailed, Transfer, WeightSync
from moesaic.engines.transfer import PlannedTransfer, StreamedTransfer
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.weights.agree import state_tensors
from tests.pool import RunRanks
from tests.unit.fake_engine import FakeEngine
from tests.unit.tiny_checkpoints import save_tiny

ORDER = ["pause drain", "begin_update", "receive", "end_update", "reset_caches", "set_version 1", "resume"]
ONE = Sampling(max_tokens=1)


class Told:
    """A transfer of nothing; ``action`` runs on each rank."""

    def __init__(self, action: Callable[[], None] = lambda: None) -> None:
        self.action = action
        self.num_failures = 0

    def run(self, engines: Sequence[Engine]) -> None:
        self.action()
        for engine in engines:
            engine.receive([])

    def fail(self) -> None:
        self.num_failures += 1


def agreement(rank: int, timeout_s: float = 20.0) -> Agreement:
    store = dist.distributed_c10d._get_default_store()
    return Agreement(store, rank, dist.get_world_size(), timeout_s=timeout_s)


def keep_the_order(rank: int) -> None:
    engines = [FakeEngine() for _ in range(2 - rank)]  # two, one, none
    sync = WeightSync(engines, Told(), agreement(rank))
    sync.sync(1)
    for engine in engines:
        assert engine.calls == ORDER
        assert (engine.version, engine.state.phase) == (1, "running")
        engine.sleep(2)
        engine.calls.clear()
    sync.sync(2, mode="keep")
    for engine in engines:
        assert engine.calls == [
            "pause keep", "wake weights", *ORDER[1:5], "set_version 2", "wake kv_cache", "resume",
        ]  # fmt: skip
        engine.generate([[1]], ONE)
        engine.pause()
    sync.sync(3)  # a paused one runs afterwards
    assert all(engine.state.phase == "running" for engine in engines)


def test_the_order_on_all_ranks(run_ranks: RunRanks) -> None:
    run_ranks(keep_the_order, 3)


def fail_everywhere(rank: int, hook: str, at: int) -> None:
    """``hook`` fails on rank ``at`` (the transfer itself on one without engine), then a whole sync succeeds."""
    engines = [FakeEngine()] if rank < 2 else []
    state = {"fails": True}

    def action() -> None:
        if rank == at == 2 and state["fails"]:
            raise RuntimeError("no transfer today")

    transfer = Told(action)
    sync = WeightSync(engines, transfer, agreement(rank))
    if rank == at and engines:
        engines[0].fails = {hook}
    start = time.monotonic()
    with pytest.raises(SyncFailed, match=rf"failed on rank {at}: RuntimeError: no {hook}.* today"):
        sync.sync(1)
    assert time.monotonic() - start < 10, "a failure is known at once"
    is_early = hook == "pause"
    assert transfer.num_failures == (not is_early)
    for engine in engines:
        assert engine.version == 0 or hook == "set_version"
        assert engine.state.phase == ("running" if is_early else "paused")
        if is_early:
            engine.generate([[1]], ONE)
        else:
            engine.resume()
            with pytest.raises(EngineStateError, match=f"the sync of version 1 failed: .* on rank {at}"):
                engine.generate([[1]], ONE)
    state["fails"] = False
    for engine in engines:
        engine.fails = set()
    sync.sync(1)
    for engine in engines:
        assert engine.generate([[1]], ONE)[0][0].weight_version == 1


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("pause", 0),
        ("begin_update", 1),
        ("receive", 0),
        ("transfer", 2),
        ("end_update", 1),
        ("reset_caches", 0),
        ("set_version", 1),
    ],
)
def test_a_failure_on_one_rank_fails_all_and_breaks_engines(run_ranks: RunRanks, hook: str, at: int) -> None:
    run_ranks(fail_everywhere, 3, hook, at)


def stay_away(rank: int) -> None:
    """Rank 2 comes late, when the others have given up: it must not think that all is well."""
    engines = [FakeEngine()]
    store = dist.distributed_c10d._get_default_store()
    sync = WeightSync(engines, Told(), agreement(rank, timeout_s=1.0 if rank < 2 else 20.0))
    dist.barrier()
    if rank == 2:
        dist.PrefixStore("weight-sync", store).wait(["sync 1: check/verdict"])
    with pytest.raises(SyncFailed, match=r"sync 1: check: no word from ranks \[2\] in 1 s"):
        sync.sync(1)
    assert (engines[0].version, engines[0].state.phase) == (0, "running")
    dist.barrier()
    WeightSync(engines, Told(), Agreement(store, rank, 3, prefix="again")).sync(1)


def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks) -> None:
    run_ranks(stay_away, 3)


class Drains(FakeEngine):
    """Its requests take a second to end."""

    def _pause(self, mode: PauseMode) -> None:
        super()._pause(mode)
        time.sleep(1.0)


def drain_slowly(rank: int) -> None:
    engines = [Drains()] if rank == 1 else []
    store = dist.distributed_c10d._get_default_store()
    WeightSync(engines, Told(), Agreement(store, rank, 2, timeout_s=0.3)).sync(1)
    assert all(engine.version == 1 for engine in engines)
    sync = WeightSync(engines, Told(), Agreement(store, rank, 2, timeout_s=0.3, prefix="keep"))
    with pytest.raises(SyncFailed, match=r"sync 1: pause: no word from ranks \[1\] in 0.3 s"):
        sync.sync(2, mode="keep")


def test_a_drain_may_take_longer_than_ranks_wait_for_one_another(run_ranks: RunRanks) -> None:
    """Its own time-out is that of the engine, which every rank learns."""
    run_ranks(drain_slowly, 2)


def mismatch(rank: int) -> None:
    engines = [FakeEngine(version=rank)]
    sync = WeightSync(engines, Told(), agreement(rank))
    with pytest.raises(
        SyncFailed, match="check failed on rank 1: ValueError: version=1: the engine has weights of version 1"
    ):
        sync.sync(1)
    assert engines[0].calls == []
    assert (engines[0].version, engines[0].state.phase) == (rank, "running")
    sync.sync(2)
    assert engines[0].version == 2


def test_a_version_that_one_engine_has_is_refused_by_all(run_ranks: RunRanks) -> None:
    run_ranks(mismatch, 2)


def test_keys_in_the_store_do_not_pile_up() -> None:
    store = dist.HashStore()
    sync = WeightSync([FakeEngine()], Told(), Agreement(store, 0, 1))
    sync.sync(1)
    count = store.num_keys()
    for version in range(2, 6):
        sync.sync(version)
    assert store.num_keys() == count


def test_a_prefix_is_used_once() -> None:
    store = dist.HashStore()
    WeightSync([FakeEngine()], Told(), Agreement(store, 0, 1)).sync(1)
    with pytest.raises(ValueError, match="prefix='weight-sync': rank 0 has agreed under it before"):
        Agreement(store, 0, 1)


def test_a_store_that_is_gone_is_a_failed_sync() -> None:
    class Gone(dist.Store):
        is_gone = False

        def add(self, key: str, amount: int) -> int:
            if self.is_gone:
                raise dist.DistStoreError("broken pipe")
            return amount

        def set(self, key: str, value: str) -> None:
            self.add(key, 1)

    store = Gone()
    engine = FakeEngine()
    sync = WeightSync([engine], Told(), Agreement(store, 0, 1))
    store.is_gone = True
    with pytest.raises(SyncFailed, match="sync 1: check: the store is gone"):
        sync.sync(1)


def fail_in_all_ways(rank: int) -> None:
    """Of two engines, one can't be aborted, nor resumed: the other hears of the failure all the same."""
    engines = [FakeEngine(), FakeEngine()]
    sync = WeightSync(engines, Told(), agreement(rank))
    engines[0].fails = {"receive", "abort_update"}
    with pytest.raises(SyncFailed, match="no receive today"):
        sync.sync(1)
    assert all("the sync of version 1 failed" in engine.state.broken for engine in engines)
    engines[0].fails = set()
    sync.sync(1)
    engines[0].fails = {"resume"}
    if rank == 1:
        engines[1].fails = {"pause"}
    with pytest.raises(RuntimeError, match="no resume today"):
        sync.sync(2)
    assert engines[1].state.phase == "running"


def test_one_engine_does_not_keep_another_from_hearing(run_ranks: RunRanks) -> None:
    run_ranks(fail_in_all_ways, 2)


def lose_the_store(rank: int) -> None:
    """One rank can't reach the store: the others don't wait for it in a collective."""
    transfer = PlannedTransfer(torch.nn.Linear(2, 2), timeout_s=20)
    agreed = agreement(rank)

    def refuse(*args: Any, **options: Any) -> None:
        raise dist.DistNetworkError("no route to host")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SyncFailed, match="no route to host"):
        if rank == 1:
            patch.setattr(dist, "TCPStore", refuse)
        WeightSync([FakeEngine()], transfer, agreed).sync(1)
    assert transfer._store is None


def test_a_store_that_one_rank_cannot_reach_fails_all(run_ranks: RunRanks) -> None:
    run_ranks(lose_the_store, 3, timeout_s=60.0)


# --- real weights


def trained(folder: Path, **sizes: Any) -> PreTrainedModel:
    return from_pretrained(folder, build_meshes(**sizes))


def change(model: PreTrainedModel, seed: int) -> None:
    """As an optimizer would: in place, the same on every rank's replicas."""
    with torch.no_grad():
        for index, tensor in enumerate(model.parameters()):
            tensor.mul_(1 + 0.01 * ((seed * 31 + index) % 7))


def whole(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor.clone()
            for name, tensor in state_tensors(model).items()
        }


def own_engine(folder: Path, **options: Any) -> HfEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return HfEngine(model, **options)


def assert_equal(engine: HfEngine, expected: dict[str, torch.Tensor]) -> None:
    mine = state_tensors(engine.model)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name


def sync_twice(rank: int, folder: Path, way: str, sizes: dict[str, int], takers: tuple[int, ...]) -> dict[str, int]:
    model = trained(folder, **sizes)
    engines = [own_engine(folder)] if rank in takers else []
    transfer: Any = (
        PlannedTransfer(model, timeout_s=20, verify_checksum=True)
        if way == "planned"
        else StreamedTransfer(model, bucket_mib=0.01)
    )
    sync = WeightSync(engines, transfer, agreement(rank))
    for version in (1, 2):
        change(model, version)
        sync.sync(version)
        expected = whole(model)
        for engine in engines:
            assert_equal(engine, expected)
            engine.sleep(2)  # the next sync wakes it
    if way == "streamed":
        return {}
    assert transfer.plan is not None and transfer.report is not None
    return {
        "received": transfer.report.bytes_received,
        "bound": transfer.plan.lower_bound(takers.index(rank)) if rank in takers else 0,
    }


class Remote(HfEngine):
    """Its rank is a process of its own, which fails before it connects."""

    in_process = False

    def _start_receive(self, offer: Offer) -> Receiving:
        def wait(_timeout_s: float) -> None:
            raise RuntimeError("no memory in the worker")

        return Receiving(sink=None, wait=wait)


def test_a_worker_that_fails_before_it_connects_says_why(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    sync = WeightSync([Remote(model)], PlannedTransfer(model, timeout_s=1.0), Agreement(dist.HashStore(), 0, 1))
    with pytest.raises(SyncFailed, match="missing: .1.*The engine says: RuntimeError: no memory in the worker"):
        sync.sync(1)


def sync_shards(rank: int, folder: Path, way: str) -> None:
    """An engine that is a parallelized model itself, laid out otherwise than the trained one."""
    model = trained(folder, ep_size=2)
    meshes = build_meshes(ep_size=4)
    other = from_pretrained(folder, meshes)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.fill_(torch.nan)
    engine = HfEngine(other, meshes=meshes)
    transfer: Transfer = (
        PlannedTransfer(model, timeout_s=20) if way == "planned" else StreamedTransfer(model, bucket_mib=0.01)
    )
    sync = WeightSync([engine], transfer, agreement(rank))
    for version in (1, 2):
        change(model, version)
        sync.sync(version)
        mine = whole(other)
        for name, tensor in whole(model).items():
            assert torch.equal(mine[name], tensor), name
    assert engine.generate([[1 + rank, 2]], ONE)[0][0].weight_version == 2


@pytest.mark.parametrize("way", ["planned", "streamed"])
def test_an_engine_of_all_ranks_gets_every_bit(run_ranks: RunRanks, tmp_path: Path, way: str) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    run_ranks(sync_shards, 4, tmp_path / "model", way)


@pytest.mark.parametrize("way", ["planned", "streamed"])
@pytest.mark.parametrize(
    ("model_type", "overrides", "sizes", "takers"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}, {"ep_size": 2}, (0, 3)),
        ("mixtral", {}, {"ep_size": 2, "mp_replicate_size": 2}, (1,)),
        ("qwen3_moe", {}, {"ep_size": 2, "tp_size": 2}, (2,)),
    ],
)
def test_engines_in_trainers_processes_get_every_bit(
    run_ranks: RunRanks,
    tmp_path: Path,
    way: str,
    model_type: str,
    overrides: dict[str, Any],
    sizes: dict[str, int],
    takers: tuple[int, ...],
) -> None:
    save_tiny(tmp_path / "model", model_type, **overrides)
    for report in run_ranks(sync_twice, 4, tmp_path / "model", way, sizes, takers):
        if report.get("bound"):
            assert report["bound"] <= report["received"] <= 1.01 * report["bound"] + 4096  # checksums, alignment


class Falls(HfEngine):
    """Its sink fails at the tenth tensor."""

    fails = True

    def _start_receive(self, offer: Offer) -> Receiving:
        receiving = super()._start_receive(offer)
        sink, count = receiving.sink, [0]
        assert sink is not None
        close = sink.close

        def fail_at_last(name: str) -> None:
            count[0] += 1
            if self.fails and count[0] == 10:
                raise RuntimeError("the engine's memory is gone")
            close(name)

        sink.close = fail_at_last  # type: ignore[method-assign]
        return receiving


def fail_midway(rank: int, folder: Path) -> None:
    model = trained(folder, ep_size=2)
    engines: list[HfEngine] = []
    if rank == 1:
        engines = [Falls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))]
    transfer: Transfer = PlannedTransfer(model, timeout_s=20)
    sync = WeightSync(engines, transfer, agreement(rank))
    start = time.monotonic()
    with pytest.raises(SyncFailed):
        sync.sync(1)
    assert time.monotonic() - start < 15
    for engine in engines:
        assert "the sync of version 1 failed" in engine.state.broken and engine.version == 0
        engine.fails = False  # type: ignore[attr-defined]
    change(model, 5)
    sync.sync(1)
    expected = whole(model)
    for engine in engines:
        assert_equal(engine, expected)


def test_an_engine_that_fails_midway_fails_all_ranks_and_recovers(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    run_ranks(fail_midway, 4, tmp_path / "model")
