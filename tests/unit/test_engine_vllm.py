"""The client of a vLLM server, without vLLM: threads, pauses, and what a server is called after a failed update."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moesaic.engines.base import Offer, Sampling
from moesaic.engines.server import ServerError
from moesaic.engines.states import EngineStateError
from moesaic.engines.vllm import NUM_THREADS, VllmServer
from tests.unit.fake_vllm import FakeVllm

ONE = Sampling(max_tokens=1)
MANY = NUM_THREADS + 10
OFFER: Any = Offer(
    plan=SimpleNamespace(fingerprint="a"),  # type: ignore[arg-type]
    processes=(),
    num_processes=1,
    store=("127.0.0.1", 0),
    prefix="a",
    timeout_s=5.0,
)


class Client(VllmServer):
    """Of a server whose workers trace nothing."""

    def target_layouts(self) -> tuple[()]:
        self._store: Any = dist.HashStore()
        return ()


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with FakeVllm().running() as running:
        yield running


def update(engine: VllmServer, version: int) -> None:
    engine.pause()
    engine.begin_update()
    engine.start_receive(OFFER).wait(5.0)
    engine.end_update()
    engine.reset_caches()
    engine.set_version(version)
    engine.resume()


def test_more_requests_stand_still_than_there_are_threads_and_weights_come(fake: FakeVllm) -> None:
    engine = Client.attach(fake.url, drain_timeout_s=5.0)
    fake.answer("pause", {})  # by another
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(engine.generate, [[1]] * MANY, ONE)
        fake.wait_for(NUM_THREADS)
        engine.pause("keep")
        engine.begin_update()
        engine.start_receive(OFFER).wait(5.0)
        engine.end_update()
        engine.reset_caches()
        engine.set_version(1)
        engine.resume()
        assert len(under_way.result(10)) == MANY
    engine.close()


def test_what_is_not_sent_yet_is_drained_too(fake: FakeVllm) -> None:
    """A server that is paused queues what comes: it would wait for the client, and the client for it."""
    engine = Client.attach(fake.url, drain_timeout_s=5.0)
    fake.answer("pause", {})
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(engine.generate, [[1]] * MANY, ONE)
        fake.wait_for(NUM_THREADS)
        pausing = pool.submit(engine.pause)
        while engine.state.phase == "running":
            pass
        fake.answer("resume", {})
        pausing.result(10)
        assert under_way.done() and len(under_way.result()) == MANY
    assert fake.calls[-1] == "pause"
    engine.close()


def test_a_pause_that_the_server_refuses_leaves_it_running(fake: FakeVllm) -> None:
    engine = Client.attach(fake.url)
    fake.fails = {"pause"}
    with pytest.raises(ServerError, match="no pause today"):
        engine.pause()
    assert fake.calls[-1] == "resume"
    assert engine.generate([[1]], ONE)[0][0].tokens == (7,)
    engine.close()


def test_a_server_with_half_new_weights_stays_paused_and_is_known_to_all(fake: FakeVllm) -> None:
    engine, other = Client.attach(fake.url, version=3), Client.attach(fake.url)
    assert (other.version, fake.label) == (3, "3")
    fake.fails = {"finish_weight_update"}
    with pytest.raises(ServerError, match="no finish_weight_update today"):
        update(engine, 4)
    engine.resume()
    assert "resume" not in fake.calls
    late = Client.attach(fake.url)  # of a trainer that was started again
    for each in (engine, late):
        with pytest.raises(EngineStateError, match="broken"):
            each.generate([[1]], ONE)
    fake.answer("resume", {})  # by one who doesn't know better
    with pytest.raises(ServerError, match="weights of an update that isn't finished"):
        other.generate([[1]], ONE)
    fake.fails = set()
    update(late, 4)
    assert fake.label == "4" and fake.calls[-1] == "resume"
    assert [each.generate([[1]], ONE)[0][0].weight_version for each in (late, other)] == [4, 4]
    assert Client.attach(fake.url).version == 4
    for each in (engine, other, late):
        each.close()


def test_an_answer_that_ends_early_is_a_server_error(fake: FakeVllm) -> None:
    engine = Client.attach(fake.url)
    fake.cut = {"inference/v1/generate"}
    with pytest.raises(ServerError, match="no answer"):
        engine.generate([[1]], ONE)
    engine.close()


def test_each_prompt_may_have_a_seed_of_its_own(fake: FakeVllm) -> None:
    engine = Client.attach(fake.url)
    for seed, expected in (((5, 6), (5, 6)), (7, (7, 7)), (None, (None, None))):
        engine.generate([[1], [2, 3]], Sampling(max_tokens=1, seed=seed))
        assert (fake.seeds[1,], fake.seeds[2, 3]) == expected
    engine.close()


def test_waking_does_not_resume(fake: FakeVllm) -> None:
    """vLLM goes on by itself once all of it is awake."""
    engine = Client.attach(fake.url)
    engine.pause()
    engine.sleep(2)
    engine.wake()
    assert fake.calls[-3:] == ["sleep", "wake_up", "pause"]
    engine.close()
