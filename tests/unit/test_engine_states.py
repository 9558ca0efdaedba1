"""What an engine may do when: the state machine against a small model of it, and each refusal's message."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace

import pytest

from moesaic.engines.base import Sampling
from moesaic.engines.states import EngineStateError
from tests.unit.fake_engine import FakeEngine

ONE = Sampling(max_tokens=1)


@dataclass(frozen=True)
class Model:
    """The state machine said again, as a table: where an update has come to, and three switches."""

    place: str = "run"
    weights: bool = True
    cache: bool = True
    good: bool = True
    version: int = 0

    def after(self, call: str) -> Model | None:
        """None where the call is refused."""
        stops = self.place in ("run", "stop")
        if call == "generate":
            return self if (self.place, self.weights, self.cache, self.good) == ("run", True, True, True) else None
        if call == "receive":
            return self if self.place == "fill" else None
        if call == "reset_caches":
            places = {"run": "run", "stop": "stop", "full": "clean"}
            return replace(self, place=places[self.place]) if self.place in places else None
        if call == "begin_update":
            return replace(self, place="fill") if self.place == "stop" and self.weights else None
        if call.startswith("sleep"):
            good = self.good and call == "sleep 1"
            return replace(self, weights=False, cache=False, good=good) if stops and self.weights else None
        if call == "wake weights":
            return replace(self, weights=True) if stops else None
        if call == "wake kv_cache":
            return replace(self, cache=True) if stops and self.weights else None
        if call == "set_version":
            new = replace(self, place="stop", good=True, version=self.version + 1)
            return new if self.place == "clean" else None
        moves = {"pause": ("run", "stop"), "resume": ("stop", "run"), "end_update": ("fill", "full")}
        start, end = moves[call]
        return replace(self, place=end) if self.place == start else None

    def after_failure(self, call: str) -> Model:
        """The hook of an allowed call raised."""
        quiet = call in ("generate", "pause", "resume") or (call == "reset_caches" and self.place != "full")
        return self if quiet else replace(self, place="run" if self.place == "run" else "stop", good=False)


def do(engine: FakeEngine, call: str) -> None:
    name, _, detail = call.partition(" ")
    if name == "generate":
        engine.generate([[1]], ONE)
    elif name == "receive":
        engine.receive([])
    elif name == "sleep":
        engine.sleep(int(detail))
    elif name == "wake":
        engine.wake((detail,))  # type: ignore[arg-type]
    elif name == "set_version":
        engine.set_version(engine.version + 1)
    else:
        {
            "pause": engine.pause,
            "resume": engine.resume,
            "begin_update": engine.begin_update,
            "end_update": engine.end_update,
            "reset_caches": engine.reset_caches,
        }[name]()


CALLS = (
    "generate", "pause", "resume", "begin_update", "receive", "end_update", "reset_caches", "set_version", "sleep 1",
    "sleep 2", "wake weights", "wake kv_cache",
)  # fmt: skip


def seen(engine: FakeEngine) -> Model:
    phases = {"running": "run", "paused": "stop", "updating": "fill", "loaded": "full", "cleared": "clean"}
    state = engine.state
    asleep = state.asleep
    return Model(
        phases[state.phase], "weights" not in asleep, "kv_cache" not in asleep, not state.broken, state.version
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_do_what_a_small_model_of_the_machine_does(seed: int) -> None:
    noise = random.Random(seed)
    engine, model, num_allowed = FakeEngine(), Model(), 0
    for _ in range(400):
        possible = [call for call in CALLS if model.after(call) is not None]
        call = noise.choice(CALLS if noise.random() < 0.5 else possible)
        is_failing = noise.random() < 0.05
        engine.fails = {call.split(" ")[0]} if is_failing else set()
        num_hooks = len(engine.calls)
        expected = model.after(call)
        if expected is None:
            with pytest.raises(EngineStateError, match=call.split(" ")[0]) as refusal:
                do(engine, call)
            assert engine.state.text in str(refusal.value)
            assert len(engine.calls) == num_hooks, "a refused call reached the engine"
        else:
            num_allowed += 1
            try:
                do(engine, call)
            except RuntimeError as error:
                assert is_failing and "today" in str(error)
                expected = model.after_failure(call)
            model = expected
        assert seen(engine) == model, call
    assert num_allowed > 150


def whole_update(engine: FakeEngine, version: int) -> None:
    for call in ("pause", "begin_update", "receive", "end_update", "reset_caches"):
        do(engine, call)
    engine.set_version(version)
    engine.resume()


def test_a_version_moves_at_the_end_and_never_back() -> None:
    engine = FakeEngine(version=3)
    whole_update(engine, 5)
    assert engine.version == 5
    for version in (5, 4):
        with pytest.raises(ValueError, match=f"version={version}: the engine has weights of version 5"):
            whole_update(engine, version)
        assert (engine.version, engine.state.phase) == (5, "cleared")
        engine.fail("another rank gave up")
        engine.resume()
    whole_update(engine, 5)  # the same again: what it had is no longer whole
    assert engine.generate([[1]], ONE)[0][0].weight_version == 5


def test_a_failed_update_leaves_it_broken_until_a_whole_one() -> None:
    engine = FakeEngine()
    engine.pause()
    engine.begin_update()
    engine.fails = {"receive"}
    with pytest.raises(RuntimeError, match="no receive today"):
        engine.receive([])
    assert engine.calls[-1] == "abort_update"
    engine.fails = set()
    engine.resume()
    with pytest.raises(
        EngineStateError, match=r"generate refused; the engine is running, version 0, broken: .*whole update"
    ):
        engine.generate([[1]], ONE)
    with pytest.raises(EngineStateError, match="broken: RuntimeError: no receive today"):
        engine.health()
    whole_update(engine, 1)
    assert engine.generate([[1]], ONE)[0][0].weight_version == 1
    engine.health()


def test_a_failed_abort_is_told_and_hides_nothing() -> None:
    engine = FakeEngine()
    engine.pause()
    engine.begin_update()
    engine.fails = {"receive", "abort_update"}
    with pytest.raises(RuntimeError, match="no receive today"):
        engine.receive([])
    assert "no receive today; and it could not be aborted: RuntimeError: no abort_update" in engine.state.broken
    engine.resume()
    assert "resume" not in engine.calls, "half-new weights would answer others"
    engine.fails = set()
    whole_update(engine, 1)
    assert engine.calls[-1] == "resume"


def test_sleep_with_requests_in_flight_is_refused_and_drained_by_pause() -> None:
    engine = FakeEngine()
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(10)

    engine.during = wait
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate([[1]], ONE)))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(EngineStateError, match=r"sleep refused; .*: 1 requests are in flight: call pause"):
        engine.sleep()
    with pytest.raises(EngineStateError, match=r"reset_caches refused; .*in flight"):
        engine.reset_caches()
    threading.Timer(0.05, go_on.set).start()
    engine.pause("drain")
    assert answers and engine.state.num_in_flight == 0
    engine.sleep()
    thread.join()
    with pytest.raises(EngineStateError, match="weights and kv_cache asleep"):
        engine.begin_update()


def test_pause_that_cannot_drain_in_time_lets_the_engine_run_on() -> None:
    engine = FakeEngine(drain_timeout_s=0.05)
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(10)

    engine.during = wait
    thread = threading.Thread(target=lambda: engine.generate([[1]], ONE))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(TimeoutError, match="1 calls of generate in flight after 0.05 s"):
        engine.pause()
    assert (engine.state.phase, engine.state.num_in_flight) == ("running", 1)
    assert "pause drain" not in engine.calls, "what is in flight would never end"
    engine.pause("keep")
    go_on.set()
    thread.join()
    assert engine.state.num_in_flight == 0


def test_only_what_is_asleep_is_woken() -> None:
    engine = FakeEngine()
    engine.wake()
    assert engine.calls == []
    engine.sleep(2)
    engine.wake(("weights",))
    engine.wake()
    assert engine.calls == ["sleep 2", "wake weights", "wake kv_cache"]
    with pytest.raises(EngineStateError, match=r"dropped by sleep\(2\); only a whole update"):
        engine.generate([[1]], ONE)


def test_close_is_for_good() -> None:
    engine = FakeEngine()
    engine.close()
    engine.close()
    assert engine.calls == ["close"]
    for call in CALLS:
        with pytest.raises(EngineStateError, match="it is closed"):
            do(engine, call)
    with pytest.raises(EngineStateError, match="the engine is closed, version 0"):
        engine.health()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda engine: engine.sleep(3), "level=3: 1 "),
        (lambda engine: engine.wake(("weights", "disk")), "tags="),
        (lambda engine: engine.wake(()), "tags="),
        (lambda engine: engine.pause("stop"), "mode='stop': drain or keep"),
        (lambda engine: engine.generate([], ONE), "prompts: 0 of them"),
        (lambda engine: engine.generate([[1], []], ONE), "at least one token"),
        (
            lambda engine: Sampling(max_tokens=0, temperature=-1.0, top_p=0.0),
            "max_tokens=0.*temperature=-1.0.*top_p=0.0",
        ),
        (lambda engine: Sampling(max_tokens=1, n=0, top_k=-1, seed=-1, stop_token_ids=(-1,)), "top_k.*n=0.*seed.*stop"),
        (lambda engine: Sampling(max_tokens=1, temperature=float("nan")), "temperature=nan"),
    ],
)
def test_bad_arguments_are_named(action: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action(FakeEngine())  # type: ignore[operator]
