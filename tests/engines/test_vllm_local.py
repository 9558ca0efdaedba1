"""vLLM in this process: updates by both ways, and what each step of them is for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moesaic.engines import vllm_live
from moesaic.engines.base import Sampling
from moesaic.engines.server import ServerError
from moesaic.engines.states import EngineStateError
from moesaic.engines.vllm_layout import describe_files
from moesaic.engines.vllm_local import VllmLocal
from moesaic.engines.vllm_server import ServerOptions
from tests.engines.checkpoints import read_files, replay, save_checkpoint

PROMPT = list(range(40, 140))  # three blocks of the prefix cache, and some
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "block_size": 32}
OPTIONS |= {"kv_cache_gib": 1, "enforce_eager": True}


def noise() -> tuple[object, ...]:
    """The state of each generator that this process draws from."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


class Pair:
    """An engine, and transformers' model of the weights that it should have."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        save_checkpoint(folder, "qwen3_moe", tie_word_embeddings=True)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.noise_before = noise()
        self.engine = VllmLocal(ServerOptions(model=str(folder), **OPTIONS), describe_files(self.model))
        self.noise_after = noise()
        self._scratch = scratch

    def train(self) -> dict[str, torch.Tensor]:
        """Other weights, as files."""
        torch.manual_seed(self.engine.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.model.save_pretrained(self._scratch)
        return read_files(self._scratch)

    def update(self, way: str, files: dict[str, torch.Tensor]) -> None:
        """One whole update."""
        if self.engine.state.phase == "running":
            self.engine.pause()
        self.engine.begin_update()
        if way == "streamed":
            items = list(files.items())
            self.engine.receive(items[: len(items) // 2])
            self.engine.receive(items[len(items) // 2 :])
        else:
            receiving = self.engine.start_receive(None)  # type: ignore[arg-type]  # of a plan it needs nothing here
            assert receiving.sink is not None
            for name, tensor in replay(self.engine.target_layouts()[0], files).items():
                receiving.sink.open(name).copy_(tensor)
                receiving.sink.close(name)
            receiving.wait(1.0)
        self.engine.end_update()
        self.engine.reset_caches()
        self.engine.set_version(self.engine.version + 1)
        self.engine.resume()

    def error(self) -> float:
        """Largest difference of log-probability, or infinite where a greedy token is another."""
        ((completion,),) = self.engine.generate([PROMPT], Sampling(max_tokens=8, temperature=0))
        with torch.no_grad():
            logits = self.model(torch.tensor([[*PROMPT, *completion.tokens]])).logits[0, len(PROMPT) - 1 : -1]
        raw = logits.log_softmax(-1)[torch.arange(8), list(completion.tokens)]
        return (raw - torch.tensor(completion.logprobs)).abs().max().item()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("scratch"))
    yield made
    made.engine.close()


def test_updates_one_after_another(pair: Pair) -> None:
    assert pair.error() < 1e-4
    for way in ("streamed", "planned", "planned", "streamed"):
        files = pair.train()
        assert pair.error() > 1e-2  # weights that are another's are seen
        pair.update(way, files)
        assert pair.error() < 1e-4, way


@pytest.mark.parametrize("skipped", ["caches", "cpu"])
def test_a_step_that_is_left_out_is_seen(pair: Pair, skipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.error()  # the prompt's keys and values are in the cache
    files = pair.train()
    with monkeypatch.context() as patch:
        if skipped == "caches":
            patch.setattr(VllmLocal, "_reset_caches", lambda self: None)
        else:
            patch.setattr(vllm_live, "repack_for_cpu", lambda model: None)
        pair.update("planned", files)
    assert pair.error() > 1e-2
    pair.update("planned", files)
    assert pair.error() < 1e-4


def test_an_update_that_lacks_something_fails_and_the_next_one_heals(pair: Pair) -> None:
    files = pair.train()
    pair.engine.pause()
    pair.engine.begin_update()
    pair.engine.receive(list(files.items())[:-1])
    with pytest.raises(RuntimeError, match="didn't bring"):
        pair.engine.end_update()
    pair.engine.resume()
    with pytest.raises(EngineStateError, match="broken"):
        pair.error()
    pair.engine.pause()
    pair.engine.begin_update()
    with pytest.raises(ValueError, match="not a tensor of the checkpoint"):
        pair.engine.receive([("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(8, 64, 64))])
    pair.update("streamed", files)
    assert pair.error() < 1e-4


def test_the_noise_of_training_is_left_alone(pair: Pair) -> None:
    assert pair.noise_after == pair.noise_before, "starting the engine seeded what training draws from"
    before = noise()
    answers = [pair.engine.generate([PROMPT], Sampling(max_tokens=8, seed=seed)) for seed in (1, 1, None, None)]
    assert noise() == before
    tokens = [answer[0][0].tokens for answer in answers]
    assert tokens[0] == tokens[1] and len(set(tokens)) == 3


def test_what_one_process_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use the server"):
        VllmLocal(ServerOptions(model=str(tmp_path), tp_size=2), {})


def test_a_busy_cache_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(ServerError, match="in use"):
        pair.engine.reset_caches()
