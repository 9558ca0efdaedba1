"""The SGLang adapter against a server with its routes, fields and refusals: requests, weights in all ways, failures."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.engines.base import Sampling
from moesaic.engines.server import ServerError
from moesaic.engines.sglang import SglangServer, Way
from moesaic.engines.sglang_requests import RoutedLayers
from moesaic.engines.sglang_server import SglangOptions
from moesaic.engines.states import EngineStateError
from tests.unit.fake_sglang import NUM_LAYERS, OWN_END, TOP_K, FakeSglang, fake_sglang

WAYS: tuple[Way, ...] = ("group", "body", "folder")
EXPERT = "model.layers.0.mlp.experts.{}.down_proj.weight"


def make_weights() -> dict[str, Tensor]:
    """Of three dtypes, of odd sizes, and two that share storage."""
    torch.manual_seed(0)
    experts = torch.randn(2, 3, 5).bfloat16()
    return {
        EXPERT.format(0): experts[0],
        "model.norm.weight": torch.randn(7),
        EXPERT.format(1): experts[1],
        "model.empty.weight": torch.empty(0, 3),
        "model.scalar": torch.tensor([3], dtype=torch.int64),
    }


SOURCES = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in make_weights().items()}


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    with fake_sglang() as fake:
        yield fake


def attach(server: FakeSglang, **others: Any) -> SglangServer:
    return SglangServer.attach(server.url, others.pop("sources", SOURCES), **{"timeout_s": 10.0, **others})


def await_call(server: FakeSglang, route: str) -> None:
    """Return when the last request is one for ``route``."""
    deadline = time.monotonic() + 10
    while server.names()[-1] != route:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def update(engine: SglangServer, weights: dict[str, Tensor], version: int) -> None:
    """A whole one, in two buckets that are overwritten once they are taken."""
    engine.pause()
    engine.begin_update()
    items = [(name, tensor.clone()) for name, tensor in weights.items()]
    for bucket in (items[:2], items[2:]):
        engine.receive(bucket)
        for _, tensor in bucket:
            tensor.fill_(99)
    engine.end_update()
    engine.reset_caches()
    engine.set_version(version)
    engine.resume()


def test_tokens_and_raw_logprobs(server: FakeSglang) -> None:
    engine = attach(server, version=3)
    first, second = engine.generate([[1, 2], [9]], Sampling(max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, n=2))
    assert [each.tokens for each in (*first, *second)] == [(3, 4, 5)] * 2 + [(10, 11, 12)] * 2
    assert first[0].logprobs == (-0.3, -0.4, -0.5)
    assert {each.finish_reason for each in first} == {"length"}
    assert {each.weight_version for each in (*first, *second)} == {3}
    sent = server.calls[-1][1]["sampling_params"][0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["n"]) == (0.5, 4, 0.9, 1)
    assert sent["ignore_eos"] and "sampling_seed" not in sent
    assert attach(server).generate([[1]], Sampling(max_tokens=1, temperature=0))[0][0].tokens == (2,)
    assert server.calls[-1][1]["sampling_params"][0]["top_k"] == -1


def test_stops_only_where_it_is_told(server: FakeSglang) -> None:
    """The model's own end of text ends a completion only where it is listed, and the server knows no such rule."""
    engine = attach(server)
    (one,) = engine.generate([[7]], Sampling(max_tokens=20, stop_token_ids=(12,)))[0]
    assert one.tokens == (8, OWN_END, 10, 11, 12) and one.finish_reason == "stop"
    assert one.logprobs == (-0.8, -0.9, -1.0, -1.1, -1.2)
    (one,) = engine.generate([[7]], Sampling(max_tokens=20, stop_token_ids=(12, OWN_END)))[0]
    assert one.tokens == (8, OWN_END) and one.finish_reason == "stop"
    (one,) = engine.generate([[7]], Sampling(max_tokens=2, stop_token_ids=(12,)))[0]
    assert one.tokens == (8, OWN_END) and one.finish_reason == "length"
    (one,) = engine.generate([[*range(1, 50), *range(50), 8]], Sampling(max_tokens=20, stop_token_ids=(12,)))[0]
    assert one.tokens == (OWN_END,) and one.finish_reason == "length"  # nothing longer is taken


def test_one_that_ended_goes_on_beside_none_that_did(server: FakeSglang) -> None:
    """What goes on from the model's own end of text keeps its place among the others."""
    engine = attach(server)
    answers = engine.generate([[7], [20], [8]], Sampling(max_tokens=4, stop_token_ids=(40,)))
    assert [each.tokens for (each,) in answers] == [(8, 9, 10, 11), (21, 22, 23, 24), (9, 10, 11, 12)]


def test_seeds_are_refused_or_each_its_own(server: FakeSglang) -> None:
    with pytest.raises(ValueError, match="ignores seeds"):
        attach(server).generate([[1]], Sampling(max_tokens=1, seed=3))
    attach(server).generate([[1]], Sampling(max_tokens=1, temperature=0, seed=3))
    server.info["enable_deterministic_inference"] = True
    engine = attach(server)

    def seeds(seed: int | tuple[int, ...] | None) -> list[int]:
        engine.generate([[1], [1]], Sampling(max_tokens=1, n=2, seed=seed))
        return [each["sampling_seed"] for each in server.calls[-1][1]["sampling_params"]]

    assert seeds(3) == seeds(3) and len(set(seeds(3))) == 4
    assert len(set(seeds(3) + seeds(4) + seeds(None) + seeds(None))) == 16
    assert all(0 <= each < 2**63 for each in seeds(2**63 - 1))
    assert seeds((3, 4)) == [*seeds((9, 3))[2:], *seeds((4, 9))[:2]] and len(set(seeds((3, 4)))) == 4
    with pytest.raises(ValueError, match="3 seeds for 2 prompts: give one for each, or one in all"):
        seeds((1, 2, 3))


def test_routed_experts(server: FakeSglang) -> None:
    routed = RoutedLayers(moe=(0, 2), num_layers=NUM_LAYERS, top_k=TOP_K)
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        attach(server, routed=routed)
    server.info["enable_return_routed_experts"] = True
    (one,) = attach(server, routed=routed).generate([[1, 2]], Sampling(max_tokens=3))[0]
    expected = torch.arange(4 * NUM_LAYERS * TOP_K, dtype=torch.int32).view(4, NUM_LAYERS, TOP_K)[:, [0, 2]]
    assert one.routed_experts is not None and torch.equal(one.routed_experts, expected)
    with pytest.raises(ServerError, match="24 numbers came"):
        attach(server, routed=RoutedLayers(moe=(0,), num_layers=5, top_k=TOP_K)).generate(
            [[1, 2]], Sampling(max_tokens=3)
        )


def test_an_unfit_server_is_refused(server: FakeSglang) -> None:
    server.has_raw_logprobs = False
    with pytest.raises(ServerError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        attach(server)
    server.has_raw_logprobs = True
    server.info["dp_size"] = 2
    with pytest.raises(ValueError, match="dp_size=2"):
        attach(server)
    del server.info["dp_size"]
    with pytest.raises(ServerError, match=r"doesn't say its 'dp_size'.*0\.5\.23"):
        attach(server)


@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_bitwise_twice(server: FakeSglang, way: Way, tmp_path: Path) -> None:
    engine = attach(server, way=way, folder=tmp_path)
    weights = make_weights()
    for version in (1, 2):
        weights = {name: tensor + 1 for name, tensor in weights.items()}
        update(engine, weights, version)
        arrived = {name: tensor for name, tensor in server.weights.items() if tensor.numel()}
        assert arrived.keys() == {name for name, tensor in weights.items() if tensor.numel()}
        for name, tensor in arrived.items():
            assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name]), name
        assert engine.generate([[1]], Sampling(max_tokens=1))[0][0].weight_version == version
    assert len(list(tmp_path.iterdir())) == (1 if way == "folder" else 0)  # of the last update only
    engine.close()


def test_order_of_an_update(server: FakeSglang) -> None:
    engine = attach(server, way="body")
    server.calls.clear()
    update(engine, make_weights(), 1)
    tensors = ["update_weights_from_tensor"] * 2
    assert server.names() == [
        "pause_generation",
        "update_weight_version",
        "begin_weight_update",
        *tensors,
        "end_weight_update",
        "flush_cache",
        "update_weight_version",
        "continue_generation",
    ]
    labels = [body["new_version"] for route, body in server.calls if route == "update_weight_version"]
    assert labels == ["incomplete", "1"]
    bodies = dict(server.calls)
    assert bodies["pause_generation"] == {"mode": "retract"}
    assert bodies["flush_cache"] == {"timeout": "0"}


def test_drain_waits_keep_does_not(server: FakeSglang) -> None:
    engine = attach(server)
    server.may_generate.clear()
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(engine.generate([[1]], Sampling(max_tokens=1))))
    call.start()
    await_call(server, "generate")
    engine.pause("keep")
    assert server.names()[-1] == "pause_generation" and not answers
    engine.resume()
    call.join()
    server.may_generate.clear()
    server.calls.append(("", {}))
    call = threading.Thread(target=lambda: answers.append(engine.generate([[1]], Sampling(max_tokens=1))))
    call.start()
    await_call(server, "generate")
    threading.Timer(0.05, server.may_generate.set).start()
    engine.pause("drain")
    assert len(answers) == 2 and server.names()[-1] == "pause_generation"
    call.join()


@pytest.mark.parametrize("way", ["group", "body"])
def test_a_refused_bucket_fails_soon_and_the_next_update_works(server: FakeSglang, way: Way) -> None:
    """The server says no with an answer; a broadcast that nobody takes part in must not be waited for."""
    engine = attach(server, way=way, timeout_s=5.0)
    route = {"group": "update_weights_from_distributed", "body": "update_weights_from_tensor"}[way]
    engine.pause()
    engine.begin_update()
    server.fails[route] = "Failed to update parameter online: no such layer"
    with pytest.raises(ServerError, match="no such layer"):
        engine.receive(list(make_weights().items()))
    assert not server.has_session
    assert engine.state.broken
    engine.resume()
    with pytest.raises(EngineStateError, match="no such layer"):
        engine.generate([[1]], Sampling(max_tokens=1))
    server.fails.clear()
    update(engine, make_weights(), 1)
    assert torch.equal(server.weights["model.norm.weight"], make_weights()["model.norm.weight"])
    engine.close()


def test_a_server_with_half_new_weights_is_known_to_all(server: FakeSglang) -> None:
    """Also one that was started without weights: it answers nothing before a whole update."""
    engine, other = attach(server, version=3), attach(server)
    assert other.version == 3
    engine.pause()
    engine.begin_update()
    late = attach(server, timeout_s=5.0)  # of a trainer that was started again; the server is paused
    assert not server.has_session, "an update of another would be refused"
    late.pause()
    late.resume()
    with pytest.raises(EngineStateError, match="never finished"):
        late.generate([[1]], Sampling(max_tokens=1))
    server.may_generate.set()  # by one who doesn't know better
    with pytest.raises(ServerError, match="weights of an update that isn't finished"):
        other.generate([[1]], Sampling(max_tokens=1))
    server.may_generate.clear()
    server.has_raw_logprobs = False
    with pytest.raises(ServerError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        update(late, make_weights(), 4)
    server.has_raw_logprobs = True
    late.resume()
    assert late.generate([[1]], Sampling(max_tokens=1))[0][0].weight_version == 4
    assert attach(server).version == 4


def test_outside_of_an_update_the_server_refuses(server: FakeSglang) -> None:
    engine = attach(server, way="group", timeout_s=5.0)
    engine.pause()
    engine.begin_update()
    server.has_session = False
    with pytest.raises(ServerError, match="must run between"):
        engine.receive(list(make_weights().items()))


@pytest.mark.parametrize(
    ("route", "step"),
    [
        ("pause_generation", lambda engine: engine.pause()),
        ("begin_weight_update", lambda engine: (engine.pause(), engine.begin_update())),
        ("init_weights_update_group", lambda engine: (engine.pause(), engine.begin_update())),
        ("update_weight_version", lambda engine: update(engine, make_weights(), 1)),
        ("end_weight_update", lambda engine: update(engine, make_weights(), 1)),
        ("flush_cache", lambda engine: update(engine, make_weights(), 1)),
        ("continue_generation", lambda engine: update(engine, make_weights(), 1)),
    ],
)
def test_every_refusal_raises(server: FakeSglang, route: str, step: Any) -> None:
    engine = attach(server)
    server.fails[route] = "not today"
    with pytest.raises(ServerError, match="not today"):
        step(engine)
    server.fails.clear()
    engine.close()


def test_success_false_in_a_good_answer_raises(server: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attach(server)
    refusal = (200, {"success": False, "message": "not today"})
    monkeypatch.setattr(FakeSglang, "_pause_generation", lambda self, mode: refusal)
    with pytest.raises(ServerError, match="not today"):
        engine.pause()


def test_stacked_experts_are_refused(server: FakeSglang) -> None:
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    sources = {**SOURCES, stacked: ((2, 4, 3), torch.float32)}
    with pytest.raises(ValueError, match=r"gate_up_proj.*one by one"):
        attach(server, sources=sources)
    server.model_type = "gpt_oss"
    attach(server, sources=sources)
    server.model_type = "qwen3_moe"
    engine = attach(server)
    engine.pause()
    engine.begin_update()
    with pytest.raises(ValueError, match="experts must come one by one"):
        engine.receive([(stacked, torch.zeros(2, 4, 3))])
    engine.close()


def test_an_incomplete_update_is_refused(server: FakeSglang) -> None:
    engine = attach(server, way="body")
    for bucket, message in (
        ([("model.norm.weight", torch.zeros(6))], r"\(6,\) came"),
        ([("model.norm.weight", torch.zeros(7))] * 2, "came twice"),
    ):
        engine.pause()
        engine.begin_update()
        with pytest.raises(ValueError, match=message):
            engine.receive(bucket)
        engine.resume()
    engine.pause()
    engine.begin_update()
    engine.receive([("model.norm.weight", torch.zeros(7))])
    with pytest.raises(ValueError, match="and 3 more didn't come"):
        engine.end_update()


def test_sleep_and_wake(server: FakeSglang) -> None:
    with pytest.raises(ValueError, match="--enable-memory-saver"):
        attach(server).sleep()
    server.info["enable_memory_saver"] = True
    engine = attach(server, way="body")
    with pytest.raises(ValueError, match="--enable-weights-cpu-backup"):
        engine.sleep(1)
    assert not engine.state.broken
    engine.sleep(2)
    assert server.asleep == {"weights", "kv_cache"} and not server.may_generate.is_set()
    engine.wake(("weights",))
    assert server.asleep == {"kv_cache"} and not server.may_generate.is_set()
    update(engine, make_weights(), 1)
    assert not server.may_generate.is_set()  # its caches are still asleep
    engine.wake()
    assert not server.asleep and server.may_generate.is_set()
    assert engine.generate([[1]], Sampling(max_tokens=1))[0][0].weight_version == 1


def test_what_cannot_be_done_says_so(server: FakeSglang) -> None:
    engine = attach(server)
    with pytest.raises(ValueError, match="StreamedTransfer"):
        engine.target_layouts()
    with pytest.raises(ValueError, match="give folder"):
        attach(server, way="folder")
    with pytest.raises(ServerError, match="longer than the model's context"):
        engine.generate([[1] * 200], Sampling(max_tokens=1))
    engine.health()
    server.fails["server_info"] = "gone"
    with pytest.raises(ServerError, match="gone"):
        engine.health()


def test_options() -> None:
    options = SglangOptions(model="ckpt", tp_size=2, seeds=True, max_model_len=64, args=("--device", "cpu"))
    command = options.command("127.0.0.1", 30000)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "ckpt"]
    assert command[command.index("--tp-size") + 1] == "2" and "--enable-deterministic-inference" in command
    assert "--enable-memory-saver" not in command and command[-2:] == ["--device", "cpu"]
    assert command[0] == sys.executable and replace(options, python="its/python").command("", 1)[0] == "its/python"
    assert options.variables()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
