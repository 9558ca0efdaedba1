"""A real SGLang server on the CPU: its tokens and log-probabilities are transformers', also after updates in all ways.

Its packages for accelerators are stubs (``stubs/sitecustomize.py``): its scheduler, loaders and routes are tested, not
a set-up that SGLang supports.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moesaic.engines.base import Completion, Sampling
from moesaic.engines.server import Routes, ServerError
from moesaic.engines.sglang import SglangServer, Way
from moesaic.engines.sglang_server import SglangOptions
from moesaic.engines.states import EngineStateError
from moesaic.weights import stream_hf_tensors
from tests.sglang.conftest import SGLANG_PYTHON

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]
GREEDY = Sampling(max_tokens=12, temperature=0)
# Of log-probabilities, fp32: 1.5e-6 was seen; the rest is for another order of sums.
TOLERANCE = 1e-5
CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch")
VARIABLES = (
    ("PYTHONPATH", str(Path(__file__).parent / "stubs")),
    ("SGLANG_USE_CPU_ENGINE", "1"),
    ("TORCH_COMPILE_DISABLE", "1"),
)


def make_model() -> PreTrainedModel:
    """A random model."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(model, 0.1)
    return model.eval()


@torch.no_grad()
def perturb(model: PreTrainedModel, scale: float = 0.03) -> None:
    """As if it had been trained a little."""
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """fp32 ``[T, V]``: of what comes after each token."""
    return torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0].float(), dim=-1)


def likeliest(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """By transformers, without a cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logprobs(model, tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def distinct(tokens: Sequence[int]) -> list[int]:
    """In the order in which they come first."""
    return list(dict.fromkeys(tokens))


def require_equal(model: PreTrainedModel, prompt: Sequence[int], ours: Completion, first: int = 0) -> None:
    """Its log-probabilities are the model's own, from token ``first`` on."""
    expected = logprobs(model, [*prompt, *ours.tokens])
    for place in range(first, len(ours.tokens)):
        assert abs(expected[len(prompt) - 1 + place, ours.tokens[place]] - ours.logprobs[place]) < TOLERANCE


def update(engine: SglangServer, model: PreTrainedModel) -> None:
    """One whole update; the engine is paused before and after."""
    engine.begin_update()
    items = list(stream_hf_tensors(model, experts="per_expert"))
    for start in range(0, len(items), 20):
        engine.receive(items[start : start + 20])
    engine.end_update()
    engine.reset_caches()
    engine.set_version(engine.version + 1)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def tp_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def model(tp_size: int) -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def engine(tp_size: int, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("sglang")
    # A token on its way, so that the model's own end of text is met.
    model.config.eos_token_id = distinct(likeliest(model, PROMPTS[0], 12))[1]
    model.save_pretrained(folder / "model")
    sources = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stream_hf_tensors(model)}
    options = SglangOptions(
        model=str(folder / "model"),
        dtype="float32",
        tp_size=tp_size,
        max_num_seqs=16,
        python=SGLANG_PYTHON,
        args=(*CPU, "--max-total-tokens", "4096"),
        # Which cores each worker takes; without it there may be no more workers than NUMA nodes.
        environment=(*VARIABLES, ("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" * tp_size))),
    )
    engine = SglangServer.start(options, sources, log=folder / "log.txt", timeout_s=20.0)
    yield engine
    engine.close()


def with_way(engine: SglangServer, way: Way, folder: Path) -> SglangServer:
    """Another client of the same server."""
    assert engine.process is not None
    sources = engine._sources
    return SglangServer.attach(
        engine.process.url, sources, way=way, folder=folder, version=engine.version, timeout_s=20.0
    )


def test_tokens_before_any_update(engine: SglangServer, model: PreTrainedModel) -> None:
    for prompt, (ours,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert ours.tokens == likeliest(model, prompt, 12) and ours.finish_reason == "length"
        require_equal(model, prompt, ours)
    sampling = Sampling(max_tokens=8, temperature=0.7, top_k=50, top_p=0.9, n=3)
    for prompt, answers in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
        assert len({each.tokens for each in answers}) > 1
        for ours in answers:
            require_equal(model, prompt, ours)
    with pytest.raises(ValueError, match="ignores seeds"):
        engine.generate(PROMPTS, Sampling(max_tokens=1, seed=1))
    with pytest.raises(ServerError, match="longer than the model's context"):
        engine.generate([[1] * 1000], GREEDY)


def test_stop_tokens(engine: SglangServer, model: PreTrainedModel) -> None:
    """The model's own end of text is passed where it isn't listed, and each stop token is its completion's last."""
    expected = likeliest(model, PROMPTS[0], 12)
    _, own_end, later = distinct(expected)[:3]
    assert own_end == model.config.eos_token_id
    for stops, last in (((later,), later), ((later, own_end), own_end)):
        (ours,) = engine.generate(PROMPTS[:1], Sampling(max_tokens=12, temperature=0, stop_token_ids=stops))[0]
        assert ours.tokens == expected[: expected.index(last) + 1] and ours.finish_reason == "stop"
        require_equal(model, PROMPTS[0], ours)


@pytest.mark.parametrize("way", ["group", "body", "folder"])
def test_updates(engine: SglangServer, model: PreTrainedModel, way: Way, tmp_path: Path) -> None:
    """Twice, over one connection; the prompts are those of before, so that stale caches would be seen."""
    client = with_way(engine, way, tmp_path)
    for _ in range(2):
        perturb(model)
        client.pause()
        update(client, model)
        client.resume()
        for prompt, (ours,) in zip(PROMPTS, client.generate(PROMPTS, GREEDY), strict=True):
            assert ours.tokens == likeliest(model, prompt, 12) and ours.weight_version == client.version
            require_equal(model, prompt, ours)
    client.health()
    client.close()
    engine.pause()
    update(engine, model)  # so that both clients know the version
    engine.resume()


def test_what_stands_still_goes_on_with_new_weights(engine: SglangServer, model: PreTrainedModel) -> None:
    before = engine.version
    answers: list[Completion] = []

    def run() -> None:
        answers.extend(engine.generate(PROMPTS[:1], Sampling(max_tokens=240, temperature=0))[0])

    call = threading.Thread(target=run)
    call.start()
    time.sleep(0.2)  # some tokens
    engine.pause("keep")
    assert not answers
    perturb(model)
    update(engine, model)
    engine.health()
    engine.resume()
    call.join()
    (ours,) = answers
    assert len(ours.tokens) == 240 and ours.weight_version == before
    require_equal(model, PROMPTS[0], ours, first=239)


def test_a_refusal_is_an_exception_soon(engine: SglangServer, model: PreTrainedModel) -> None:
    """Tensors outside of an update: the server answers, takes no part in the broadcast, and works again after it."""
    assert engine.process is not None
    engine.pause()
    engine.begin_update()
    Routes(engine.process.url).post("end_weight_update")
    start = time.monotonic()
    with pytest.raises(ServerError, match="must run between"):
        engine.receive(list(stream_hf_tensors(model))[:3])
    assert time.monotonic() - start < 10
    engine.resume()
    with pytest.raises(EngineStateError, match="must run between"):
        engine.generate(PROMPTS, GREEDY)
    engine.pause()
    update(engine, model)
    engine.resume()
    (ours,) = engine.generate(PROMPTS[:1], GREEDY)[0]
    require_equal(model, PROMPTS[0], ours)


def test_why_stacked_experts_are_refused(engine: SglangServer, model: PreTrainedModel) -> None:
    """The server takes them, says that all is well, and keeps what it had."""
    assert engine.process is not None
    routes = Routes(engine.process.url)
    stacked = [item for item in stream_hf_tensors(model, experts="stacked") if item[1].ndim == 3]
    assert stacked
    text = base64.b64encode(pickle.dumps([(name, torch.zeros_like(tensor)) for name, tensor in stacked])).decode()
    routes.post("begin_weight_update")
    answer = routes.post("update_weights_from_tensor", {"serialized_named_tensors": [text] * engine.facts.tp_size})
    routes.post("end_weight_update")
    assert answer["success"]
    (ours,) = engine.generate(PROMPTS[:1], GREEDY)[0]
    require_equal(model, PROMPTS[0], ours)


def test_a_killed_server_is_an_error_soon(engine: SglangServer, model: PreTrainedModel) -> None:
    """Between two buckets of an update."""
    assert engine.process is not None
    items = list(stream_hf_tensors(model))
    engine.pause()
    engine.begin_update()
    engine.receive(items[:5])
    engine.process.close()
    start = time.monotonic()
    with pytest.raises(ServerError, match="the SGLang server ended"):
        engine.receive(items[5:10])
    assert time.monotonic() - start < 30
    with pytest.raises(EngineStateError):
        engine.health()
