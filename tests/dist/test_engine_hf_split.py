"""The in-process engine on models split over tp, or with their experts over ep: the same tokens as of the whole model,
and weights that arrive from trained shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moesaic.engines.base import Sampling
from moesaic.engines.hf import HfEngine
from moesaic.engines.hf_split import build_engine_model
from moesaic.engines.hf_weights import describe_target
from moesaic.engines.sync import Agreement, WeightSync
from moesaic.engines.transfer import PlannedTransfer
from moesaic.meshes import Meshes, build_meshes
from moesaic.model.build import find_auto_class
from moesaic.parallel.apply import from_pretrained
from moesaic.weights.agree import state_tensors
from moesaic.weights.load import load_weights
from tests.families.configs import FIRST_TOKEN, MODEL_TYPES, VOCAB_SIZE, tiny_config
from tests.pool import RunRanks
from tests.unit.test_engine_hf import check_numbers, make_model, plain_tokens

Kind = Literal["tp", "ep"]

GREEDY = Sampling(max_tokens=6, temperature=0)
PROMPTS = ([[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]], [[9, 7]], [[1], [2], [3]], [[6] * 20])
CPU = torch.device("cpu")


def build(folder: Path, kind: Kind, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, HfEngine, Meshes]:
    """Two engine ranks each, of four."""
    meshes = build_meshes(tp_size=2) if kind == "tp" else build_meshes(ep_size=2)
    tp_mesh, ep_mesh = (meshes.dense["tp"], None) if kind == "tp" else (None, meshes.expert["ep"])
    model = build_engine_model(folder, dtype=dtype, device=CPU, tp_mesh=tp_mesh, ep_mesh=ep_mesh)
    engine = HfEngine(
        model, tp_mesh=tp_mesh, meshes=meshes if kind == "ep" else None, routed_experts=True, max_batch_tokens=40
    )
    return model, engine, meshes


def prompts_of(rank: int, kind: Kind) -> list[list[int]]:
    """tp: of the pair; ep: of each rank."""
    return PROMPTS[rank // 2 if kind == "tp" else rank]


def generate_as_the_whole(rank: int, folder: Path, kind: Kind) -> None:
    model, engine, _ = build(folder, kind)
    load_weights(model, folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine = prompts_of(rank, kind)
    stop = plain_tokens(plain, mine[0], 6)[2]
    for sampling in (
        GREEDY,
        Sampling(max_tokens=6, temperature=0, stop_token_ids=(stop,)),
        Sampling(max_tokens=6, seed=1, n=2),
        Sampling(max_tokens=6, top_k=5, n=2),  # a seed of the engine's own
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
        if kind == "tp":
            theirs: list[Any] = [None] * 4
            dist.all_gather_object(theirs, groups_as_values(groups))
            assert theirs[rank] == theirs[rank ^ 1]


def groups_as_values(groups: Any) -> list[list[tuple[Any, ...]]]:
    return [[(each.tokens, each.logprobs, each.finish_reason) for each in group] for group in groups]


@pytest.mark.parametrize(
    ("model_type", "kind", "overrides"),
    [
        ("qwen3_moe", "tp", {}),
        ("qwen3_moe", "tp", {"tie_word_embeddings": True, "vocab_size": 47}),
        pytest.param("qwen2_moe", "tp", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", "tp", {}, marks=pytest.mark.slow),
        ("qwen3_5_moe_text", "tp", {}),
        ("qwen3_moe", "ep", {"tie_word_embeddings": True}),
    ],
)
def test_every_rank_generates_as_one_process_would(
    run_ranks: RunRanks, tmp_path: Path, model_type: str, kind: Kind, overrides: dict[str, Any]
) -> None:
    make_model(model_type, **overrides).save_pretrained(tmp_path / "model")
    run_ranks(generate_as_the_whole, 4, tmp_path / "model", kind)


def sync_twice(rank: int, first: Path, second: Path, kind: Kind, dtype: torch.dtype) -> int:
    """Elements of the split tensors that don't lie in one run: those that a wrong description would mix up."""
    trained = from_pretrained(first, build_meshes(ep_size=2))
    model, engine, _ = build(first, kind, dtype)
    store = dist.distributed_c10d._get_default_store()
    sync = WeightSync([engine], PlannedTransfer(trained, dtype=dtype), Agreement(store, rank, 4, prefix="split"))
    for version, folder in enumerate((first, second), start=1):
        load_weights(trained, folder)
        engine.sleep(2)
        sync.sync(version)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        expected = state_tensors(plain)
        tensors = state_tensors(model)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert whole.dtype == expected[name].dtype, name
            assert torch.equal(whole, expected[name]), name
        if dtype == torch.float32:
            for prompt, (completion,) in zip(
                prompts_of(rank, kind), engine.generate(prompts_of(rank, kind), GREEDY), strict=True
            ):
                assert list(completion.tokens) == plain_tokens(plain, prompt, 6)
                assert completion.weight_version == version
    copies = describe_target(model).copies
    return len(copies) - len({copy.target for copy in copies})


@pytest.mark.parametrize(
    ("model_type", "kind", "dtype"),
    [
        ("qwen3_moe", "tp", torch.float32),
        ("qwen3_5_moe_text", "tp", torch.bfloat16),
        pytest.param("qwen2_moe", "tp", torch.float32, marks=pytest.mark.slow),
        ("qwen3_moe", "ep", torch.bfloat16),
    ],
)
def test_two_syncs_bring_the_bits_of_what_was_trained(
    run_ranks: RunRanks, tmp_path: Path, model_type: str, kind: Kind, dtype: torch.dtype
) -> None:
    # Slices of 16 numbers of 2 bytes: torch's grouped matmul takes no thinner ones.
    for name, seed in (("a", 1), ("b", 2)):
        make_model(model_type, seed=seed, moe_intermediate_size=32).save_pretrained(tmp_path / name)
    packed = run_ranks(sync_twice, 4, tmp_path / "a", tmp_path / "b", kind, dtype)
    assert all(packed) == (kind == "tp"), "gate and up are split each for itself"


def refuse(rank: int, folder: Path) -> None:
    meshes = build_meshes(tp_size=4)
    tp_mesh = meshes.dense["tp"]
    with pytest.raises(ValueError, match="tp_size=4: num_key_value_heads=2. Choose a tp_size that divides them, or 1"):
        build_engine_model(folder, dtype=torch.float32, device=CPU, tp_mesh=tp_mesh)
    pair = build_meshes(tp_size=2)
    model = build_engine_model(folder, dtype=torch.float32, device=CPU, tp_mesh=pair.dense["tp"])
    with pytest.raises(ValueError, match="the model is parallelized .*: give the engine its meshes, or its tp_mesh"):
        HfEngine(model)
    with pytest.raises(ValueError, match="meshes and tp_mesh: give one"):
        HfEngine(model, meshes=build_meshes(), tp_mesh=pair.dense["tp"])
    with pytest.raises(ValueError, match="batching='continuous'"):
        HfEngine(model, tp_mesh=pair.dense["tp"], batching="continuous")
    with pytest.raises(ValueError, match="not both"):
        build_engine_model(folder, dtype=torch.float32, device=CPU, tp_mesh=tp_mesh, ep_mesh=meshes.expert["ep"])
    load_weights(model, folder)
    engine = HfEngine(model, tp_mesh=pair.dense["tp"])
    if rank < 2:  # a pair that is asked different things finds out, and goes on
        with pytest.raises(RuntimeError, match="the ranks aren't in step"):
            engine.generate([[1, 2 + rank]], GREEDY)
    with pytest.raises(ValueError, match="prompt 1: tokens 1 to 99; the model has 0 to 47"):
        engine.generate([[1, 99]], GREEDY)
    assert len(engine.generate([[1, 2]], GREEDY)[0][0].tokens) == 6


def test_what_it_cannot_do_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(refuse, 4, tmp_path / "model")


def refuse_half_split(rank: int, folder: Path, message: str) -> None:
    tp_mesh = build_meshes(tp_size=2).dense["tp"]
    with pytest.raises(ValueError, match=message):
        build_engine_model(folder, dtype=torch.float32, device=CPU, tp_mesh=tp_mesh)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("glm5_next", "as its plan in transformers splits it: a forward ends in RuntimeError: mat1 and mat2 shapes"),
        ("inkling2_text", "as its plan in transformers splits it: model.layers.0.mlp.experts is split across its gate"),
    ],
)
def test_plans_that_split_a_part_are_refused(
    run_ranks: RunRanks, tmp_path: Path, model_type: str, message: str
) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    run_ranks(refuse_half_split, 2, tmp_path, message)


# Families that transformers has no plan for, or whose plan is found out at their tiny sizes.
UNSPLIT = frozenset(
    "zaya deepseek_v4 inkling_text inkling2_text glm5_next muse_spark diffusion_gemma openai_privacy_filter".split()
)


def logits_as_the_whole(rank: int, folder: Path) -> float:
    """Relative error."""
    tp_mesh = build_meshes(tp_size=2).dense["tp"]
    model = build_engine_model(folder, dtype=torch.float32, device=CPU, tp_mesh=tp_mesh)
    load_weights(model, folder)
    plain = find_auto_class(model.config).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(FIRST_TOKEN, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = (each(ids, use_cache=False).logits for each in (plain, model))
    return ((logits - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in UNSPLIT])
def test_a_split_model_of_every_family_computes_what_the_whole_does(
    run_ranks: RunRanks, tmp_path: Path, model_type: str
) -> None:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = find_auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    # fp32 sums in another order: 1e-6 is the largest found.
    assert max(run_ranks(logits_as_the_whole, 2, tmp_path)) < 1e-5
