"""The in-process engine on models that are parallelized: every rank generates, and all stop together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moesaic.engines.base import Sampling
from moesaic.engines.hf import HfEngine
from moesaic.engines.states import EngineStateError
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from tests.pool import RunRanks
from tests.unit.test_engine_hf import check_numbers, make_model, plain_tokens

# Of each rank: uneven in number and length, so that ranks have different numbers of batches, and end at other times.
PROMPTS: Sequence[Sequence[Sequence[int]]] = (
    [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]],
    [[9, 7]],
    [[1], [2], [3], [4], [5]],
    [[6] * 20],
)


def generate_everywhere(rank: int, folder: Path, sizes: dict[str, Any], expert_parallel: bool) -> None:
    meshes = build_meshes(**sizes)
    options = ParallelOptions(expert_parallel=expert_parallel)
    model = from_pretrained(folder, meshes, options=options)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = HfEngine(model, meshes=meshes, routed_experts=expert_parallel, owns_weights=False, max_batch_tokens=40)
    mine = PROMPTS[rank]
    stop = plain_tokens(plain, mine[0], 6)[2]
    for sampling in (
        Sampling(max_tokens=6 + rank, temperature=0),
        Sampling(max_tokens=6, temperature=0, stop_token_ids=(stop,)),
        Sampling(max_tokens=6, seed=1, n=2),
    ):
        groups = engine.generate(mine, sampling)
        for prompt, group in zip(mine, groups, strict=True):
            assert len(group) == sampling.n
            for completion in group:
                check_numbers(plain, prompt, completion)
                if sampling.temperature == 0:
                    expected = plain_tokens(plain, prompt, sampling.max_tokens)
                    end = expected.index(stop) + 1 if stop in expected and sampling.stop_token_ids else len(expected)
                    assert list(completion.tokens) == expected[:end]
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="a prompt has 64 tokens|another rank"):
        engine.generate([[1] * (64 if rank == 1 else 2)], Sampling(max_tokens=1))
    assert model.training


def fail_together(rank: int, folder: Path) -> None:
    """What one rank can't do, all say, at once; and go on afterwards."""
    meshes = build_meshes(ep_size=2)
    engine = HfEngine(from_pretrained(folder, meshes), meshes=meshes, owns_weights=False)
    once = Sampling(max_tokens=3, temperature=0)
    expected = engine.generate([[1, 2]], once)
    is_odd = rank == 1
    others = "generate failed on another rank"
    with pytest.raises(ValueError if is_odd else RuntimeError, match="0 of them" if is_odd else others):
        engine.generate([] if is_odd else [[1]], once)
    with pytest.raises(
        ValueError if is_odd else RuntimeError, match="prompt 1: tokens 1 to 9999" if is_odd else others
    ):
        engine.generate([[1, 9999 if is_odd else 2]], once)
    if is_odd:
        engine.pause()
    with pytest.raises(EngineStateError if is_odd else RuntimeError, match="paused" if is_odd else others):
        engine.generate([[1]], once)
    if is_odd:
        engine.resume()
    break_logits = engine.model.lm_head.register_forward_hook(lambda module, args, out: out * torch.nan)
    if not is_odd:
        break_logits.remove()
    with pytest.raises(RuntimeError, match="logits are broken" if is_odd else others):
        engine.generate([[1, 2]], once)
    break_logits.remove()
    assert engine.generate([[1, 2]], once) == expected


def test_what_fails_on_one_rank_fails_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(fail_together, 4, tmp_path / "model", timeout_s=60.0)


@pytest.mark.parametrize(("sizes", "expert_parallel"), [({"ep_size": 2}, True), ({}, False)])
def test_every_rank_generates_as_one_process_would(
    run_ranks: RunRanks, tmp_path: Path, sizes: dict[str, Any], expert_parallel: bool
) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(generate_everywhere, 4, tmp_path / "model", sizes, expert_parallel)


def refuse(rank: int, folder: Path) -> None:
    meshes = build_meshes(cp_size=2)
    model = from_pretrained(folder, meshes)
    with pytest.raises(ValueError, match="cp_size=2, tp_size=1: the hf engine generates on whole sequences"):
        HfEngine(model, meshes=meshes)
    with pytest.raises(ValueError, match="the model is parallelized .*: give the engine its meshes"):
        HfEngine(model)
    plain = build_meshes()
    with pytest.raises(ValueError, match="batching='continuous': for a model that is whole in one process"):
        HfEngine(from_pretrained(folder, plain), meshes=plain, batching="continuous")


def test_what_it_cannot_do_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(refuse, 2, tmp_path / "model")


def update_own_shards(rank: int, folder: Path, other: Path) -> None:
    """New weights under the files' names, into shards."""
    meshes = build_meshes(ep_size=2)
    model = from_pretrained(folder, meshes)
    engine = HfEngine(model, meshes=meshes)
    engine.sleep(2)
    engine.wake()
    engine.pause()
    engine.begin_update()
    from safetensors.torch import load_file

    engine.receive(list(load_file(other / "model.safetensors").items()))
    engine.end_update()
    engine.reset_caches()
    engine.set_version(1)
    engine.resume()
    plain = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    for prompt, (completion,) in zip(
        PROMPTS[rank], engine.generate(PROMPTS[rank], Sampling(max_tokens=6, temperature=0)), strict=True
    ):
        assert list(completion.tokens) == plain_tokens(plain, prompt, 6)
        assert completion.weight_version == 1


def test_a_parallelized_engine_sleeps_and_takes_files_tensors(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "a")
    make_model("qwen3_moe", seed=2).save_pretrained(tmp_path / "b")
    run_ranks(update_own_shards, 4, tmp_path / "a", tmp_path / "b")
