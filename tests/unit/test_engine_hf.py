"""The in-process engine against plain transformers: tokens, log-probabilities, routed experts, memory, new weights."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from moesaic.engines.base import Completion, Sampling
from moesaic.engines.hf import HfEngine
from moesaic.engines.hf_batched import cut_batches
from moesaic.engines.sampler import draft
from moesaic.engines.states import EngineStateError
from moesaic.model.seam import find_experts
from moesaic.weights import export_hf
from moesaic.weights.agree import state_tensors
from tests.unit.tiny_checkpoints import MODEL_TYPES, tiny_config

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3]]
GREEDY = Sampling(max_tokens=12, temperature=0)
BATCHINGS = ("batched", "continuous")


@pytest.fixture(autouse=True, scope="module")
def cheap_collections() -> Iterator[None]:
    """transformers collects garbage twice per continuous batch: leave what is imported out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


def make_model(model_type: str = "qwen3_moe", seed: int = 1, **overrides: Any) -> PreTrainedModel:
    """A random model whose tokens differ from place to place."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=7.0, eos_token_id=[2, 3], top_k=1, temperature=0.1
    )
    return model.eval()


def plain_tokens(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy, by transformers' own ``generate``, one prompt at a time."""
    theirs, model.generation_config = model.generation_config, GenerationConfig()
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    tokens: Any = model.generate(torch.tensor([list(prompt)]), generation_config=config)
    model.generation_config = theirs
    return list(tokens[0, len(prompt) :].tolist())


def recompute(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T] and routed experts [P + T, layers, K] of a sequence, by one forward without cache."""
    heard: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, args: heard.append(args[1]))
        for module in find_experts(model).values()
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return logprobs, torch.stack(heard, dim=1)


def check_numbers(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> None:
    logprobs, experts = recompute(model, prompt, completion.tokens)
    assert (torch.tensor(completion.logprobs) - logprobs).abs().max() < 1e-5
    if completion.routed_experts is not None:
        assert completion.routed_experts.dtype == torch.int32
        assert torch.equal(completion.routed_experts.long(), experts[:-1])


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_greedy_equals_plain_generate(model_type: str, batching: Any) -> None:
    model = make_model(model_type)
    if model_type == "qwen3_5_moe_text" and batching == "continuous":
        with pytest.raises(ValueError, match=r"batching='continuous': .*linear_attention.*use batched"):
            HfEngine(model, batching=batching)
        return
    engine = HfEngine(model, batching=batching, routed_experts=True, version=4)
    for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert list(completion.tokens) == plain_tokens(model, prompt, 12)
        assert (completion.finish_reason, completion.weight_version) == ("length", 4)
        check_numbers(model, prompt, completion)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_sampled_tokens_are_raw_repeat_and_stop(batching: Any) -> None:
    model = make_model()
    engine = HfEngine(model, batching=batching, routed_experts=True, max_batch_tokens=64)
    sampling = Sampling(max_tokens=10, temperature=1.4, top_k=30, top_p=0.95, n=3, seed=5)
    first, again = engine.generate(PROMPTS, sampling), engine.generate(PROMPTS, sampling)
    assert [[each.tokens for each in group] for group in first] == [[each.tokens for each in group] for group in again]
    for prompt, group in zip(PROMPTS, first, strict=True):
        assert len({each.tokens for each in group}) > 1
        for completion in group:
            check_numbers(model, prompt, completion)
    stop = first[1][0].tokens[4]
    stopped = engine.generate(
        PROMPTS, Sampling(max_tokens=10, temperature=1.4, top_k=30, top_p=0.95, n=3, seed=5, stop_token_ids=(stop,))
    )
    for before, after in zip(sum(first, []), sum(stopped, []), strict=True):
        cut = before.tokens.index(stop) + 1 if stop in before.tokens else 10
        assert after.tokens == before.tokens[:cut]
        assert after.finish_reason == ("stop" if stop in before.tokens else "length")
        assert after.routed_experts is not None and before.routed_experts is not None
        assert torch.equal(after.routed_experts, before.routed_experts[: len(after.routed_experts)])
    assert engine.generate(PROMPTS, Sampling(max_tokens=10)) != engine.generate(PROMPTS, Sampling(max_tokens=10))


def test_both_ways_and_any_batches_draw_the_same() -> None:
    model = make_model()
    sampling = Sampling(max_tokens=10, seed=11, n=2)
    one_by_one = HfEngine(model, batching="batched", max_batch_tokens=1)
    expected = [[each.tokens for each in group] for group in one_by_one.generate(PROMPTS, sampling)]
    for engine in (HfEngine(model, batching="batched"), HfEngine(model, batching="continuous")):
        assert [[each.tokens for each in group] for group in engine.generate(PROMPTS, sampling)] == expected


def test_continuous_batching_with_too_little_memory_for_all() -> None:
    """Requests are put off and computed again: the same tokens, experts of every position once."""
    model = make_model()
    prompts = [[index % 40 + 1] * 9 for index in range(12)]
    sampling = Sampling(max_tokens=30, seed=2)
    roomy = HfEngine(model, batching="continuous", routed_experts=True).generate(prompts, sampling)
    engine = HfEngine(model, batching="continuous", routed_experts=True, max_batch_tokens=128)
    for prompt, (mine,), (theirs,) in zip(prompts, engine.generate(prompts, sampling), roomy, strict=True):
        assert mine.tokens == theirs.tokens
        check_numbers(model, prompt, mine)


def test_auto_is_continuous_where_lengths_differ_much(monkeypatch: pytest.MonkeyPatch) -> None:
    import moesaic.engines.hf as module

    used: list[str] = []

    def spy(name: str) -> None:
        original = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    spy("generate_batched")
    spy("generate_continuous")
    engine = HfEngine(make_model())
    engine.generate([[1] * 10, [2] * 12, [3] * 9], Sampling(max_tokens=2))
    engine.generate([[1] * 40, [2], [3], [4]], Sampling(max_tokens=2))
    assert used == ["generate_batched", "generate_continuous"]
    HfEngine(make_model("qwen3_5_moe_text")).generate([[1] * 40, [2], [3], [4]], Sampling(max_tokens=2))
    assert used[2:] == ["generate_batched"]


def test_batches_hold_likes_and_stay_below_the_limit() -> None:
    drafts = sum(draft([[1] * size for size in (5, 1, 30, 6, 2)], Sampling(max_tokens=4), seed=0, max_length=64), [])
    batches = list(cut_batches(drafts, 30))
    assert [[len(each.prompt) for each in batch] for batch in batches] == [[30], [6, 5, 2], [1]]


def test_sequences_end_at_the_longest_that_the_model_can() -> None:
    engine = HfEngine(make_model(), max_length=10)
    ((short,), (long,)) = engine.generate([[1] * 2, [2] * 7], Sampling(max_tokens=5, temperature=0))
    assert (len(short.tokens), len(long.tokens), long.finish_reason) == (5, 3, "length")
    for tokens in ([1, 64_000], [-1, 2]):
        with pytest.raises(ValueError, match=f"prompt 2: tokens {min(tokens)} to {max(tokens)}; the model has 0 to"):
            engine.generate([[1], tokens], GREEDY)
    with pytest.raises(ValueError, match="64 tokens, and the engine's sequences at most 64"):
        HfEngine(make_model()).generate([[1] * 64], GREEDY)


def of_dynamic_rope() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return make_model("qwen3_moe", rope_parameters=rope, max_position_embeddings=32)


def of_a_table() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 48, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize("build", [of_dynamic_rope, of_a_table])
def test_a_completion_at_the_models_end_disturbs_no_other(build: Callable[[], PreTrainedModel]) -> None:
    """It goes on in its batch: beyond the table of positions, or to where frequencies change for all rows."""
    model = build()
    engine = HfEngine(model, batching="batched")
    sampling = Sampling(max_tokens=20, temperature=0)
    ((long,), (short,)) = engine.generate([[1] * 28, [2, 3]], sampling)
    assert (len(long.tokens), len(short.tokens)) == (4, 20)
    ((alone,),) = engine.generate([[2, 3]], sampling)
    assert short.tokens == alone.tokens
    assert short.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert not model._forward_pre_hooks


def test_training_mode_and_settings_are_left_as_they_were() -> None:
    model = make_model()
    model.train()
    model.model.layers[0].eval()
    modes, config = [module.training for module in model.modules()], model.generation_config
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for batching in BATCHINGS:
        HfEngine(model, batching=batching).generate(PROMPTS, Sampling(max_tokens=3))  # type: ignore[arg-type]
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state), "the trainer's noise was used"
    assert not any(module._forward_pre_hooks for module in find_experts(model).values())


# --- weights


def names_of(model: PreTrainedModel, folder: Path) -> list[tuple[str, Tensor]]:
    """The tensors of an export, as a stream of them would come."""
    from safetensors.torch import load_file

    export_hf(model, folder)
    return [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]


def update(engine: HfEngine, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
    engine.pause()
    engine.begin_update()
    for pair in pairwise([*range(0, len(tensors), 3), len(tensors)]):
        bucket = [(name, tensor.clone()) for name, tensor in tensors[slice(*pair)]]
        engine.receive(bucket)
        for _, tensor in bucket:
            tensor.fill_(torch.nan)  # what is handed over is free to be used again
    engine.end_update()
    engine.reset_caches()
    engine.set_version(version)
    engine.resume()


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize(
    ("model_type", "overrides"), [("qwen3_moe", {"tie_word_embeddings": True}), ("mixtral", {}), ("qwen2_moe", {})]
)
def test_a_repeated_prompt_is_computed_with_the_new_weights(
    tmp_path: Path, model_type: str, overrides: dict[str, Any], batching: Any
) -> None:
    model, trained = make_model(model_type, **overrides), make_model(model_type, seed=2, **overrides)
    engine = HfEngine(model, batching=batching)
    prompts = [[5] * 40, [5] * 41]
    before = engine.generate(prompts, GREEDY)
    tensors = names_of(trained, tmp_path / "out")
    assert any(".experts.0." in name for name, _ in tensors)
    update(engine, tensors, 1)
    for (name, mine), theirs in zip(state_tensors(model).items(), state_tensors(trained).values(), strict=True):
        assert torch.equal(mine, theirs), name
    for prompt, (old,), (new,) in zip(prompts, before, engine.generate(prompts, GREEDY), strict=True):
        assert list(new.tokens) == plain_tokens(trained, prompt, 12) != list(old.tokens)
        assert (old.weight_version, new.weight_version) == (0, 1)
        check_numbers(trained, prompt, new)
    stacked = [
        (name, tensor.detach()) for name, tensor in state_tensors(make_model(model_type, seed=3, **overrides)).items()
    ]
    update(engine, stacked, 2)
    assert all(torch.equal(tensor, dict(stacked)[name]) for name, tensor in state_tensors(model).items())


def test_an_update_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    model, trained = make_model(), make_model(seed=2)
    tensors = names_of(trained, tmp_path / "out")
    engine = HfEngine(model)
    gate = next(index for index, (name, _) in enumerate(tensors) if ".experts.1.gate_proj" in name)
    with pytest.raises(ValueError, match=r"not filled exactly once, .*gate_up_proj \(128 of"):
        update(engine, [item for index, item in enumerate(tensors) if index != gate], 1)
    assert "gate_up_proj" in engine.state.broken
    # As many elements as there should be: one tensor twice, another of its size never.
    up = next(index for index, (name, _) in enumerate(tensors) if ".experts.1.up_proj" in name)
    engine.resume()
    with pytest.raises(ValueError, match="experts.1.gate_proj.weight: it came twice"):
        update(engine, [tensors[gate] if index == up else item for index, item in enumerate(tensors)], 1)
    stacked = next(item for item in state_tensors(trained).items() if item[0].endswith("gate_up_proj"))
    for wrong, message in (
        (("model.nothing", torch.ones(1)), "model.nothing: the model has no place for it"),
        ((tensors[gate][0], torch.ones(3, 3)), r"\(3, 3\) came, the model's is \(8, 16\)"),
        (tensors[gate], r"experts.1.gate_proj.weight: it came twice"),
        (stacked, r"gate_up_proj \(-\d+ of"),
    ):
        engine.resume()
        with pytest.raises(EngineStateError, match="broken"):
            engine.generate([[1]], GREEDY)
        with pytest.raises(ValueError, match=message):
            update(engine, [*tensors, wrong], 1)
    engine.resume()
    update(engine, tensors, 1)
    assert list(engine.generate([[1]], GREEDY)[0][0].tokens) == plain_tokens(trained, [1], 12)


def num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in state_tensors(model).values())


def test_sleep_gives_memory_back_and_an_update_fills_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    trained = make_model(seed=2, tie_word_embeddings=True)
    engine = HfEngine.load(folder, dtype=torch.float32, device=torch.device("cpu"))
    model = engine.model
    size, before = num_bytes(model), engine.generate(PROMPTS, GREEDY)
    engine.sleep(1)
    assert num_bytes(model) == 0  # they are in a file
    with pytest.raises(EngineStateError, match="asleep: call wake first"):
        engine.generate(PROMPTS, GREEDY)
    engine.wake()
    assert num_bytes(model) == size and engine.generate(PROMPTS, GREEDY) == before
    for round_ in range(3):
        engine.sleep(2)
        assert num_bytes(model) == 0
        engine.wake(("weights",))
        assert num_bytes(model) == size
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with pytest.raises(EngineStateError, match="dropped by sleep"):
            engine.wake()
            engine.generate(PROMPTS, GREEDY)
        update(engine, names_of(trained, tmp_path / f"out{round_}"), round_ + 1)
        for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert list(completion.tokens) == plain_tokens(trained, prompt, 12)


def test_the_trained_model_itself_moves_and_drops_nothing() -> None:
    model = make_model()
    engine = HfEngine(model, owns_weights=False)
    assert engine.target_layouts() == ()
    update(engine, [], 1)
    with pytest.raises(ValueError, match=r"level=2 would drop the weights that are trained"):
        engine.sleep(2)
    assert num_bytes(model) > 0


def test_layout_of_a_whole_model_is_every_tensor_once() -> None:
    model = make_model(tie_word_embeddings=True)
    (layout,) = HfEngine(model).target_layouts()
    state = state_tensors(model)
    assert [tensor.name for tensor in layout.tensors] == list(state) == [copy.source for copy in layout.copies]
    for copy, tensor in zip(layout.copies, state.values(), strict=True):
        assert (copy.shape, copy.target_offset, copy.target_strides) == (tuple(tensor.shape), 0, tensor.stride())
    assert "lm_head.weight" not in state


def test_threads_take_turns_and_nothing_is_kept_in_flight() -> None:
    engine = HfEngine(make_model(), routed_experts=True)
    sampling = Sampling(max_tokens=20, seed=1)
    expected = engine.generate(PROMPTS, sampling)
    answers: list[list[list[Completion]]] = []
    threads = [threading.Thread(target=lambda: answers.append(engine.generate(PROMPTS, sampling))) for _ in range(3)]
    for thread in threads:
        thread.start()
    engine.pause("drain")
    for thread in threads:
        thread.join()
    assert [[[each.tokens for each in group] for group in answer] for answer in answers] == (
        [[[each.tokens for each in group] for group in expected]] * len(answers)
    )
    engine.resume()
    engine.pause("keep")  # with nothing in flight there is nothing to keep


def test_bad_arguments() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(ValueError, match="routed_experts: LlamaForCausalLM has no experts"):
        HfEngine(LlamaForCausalLM(LlamaConfig(**small)), routed_experts=True)
    with pytest.raises(ValueError, match="batching='all': one of auto, batched, continuous"):
        HfEngine(make_model(), batching="all")  # type: ignore[arg-type]


def test_what_a_failed_call_had_made_is_salvaged_once() -> None:
    model = make_model()
    engine = HfEngine(model, batching="batched", version=2)
    whole = engine.generate(PROMPTS[:2], GREEDY)
    assert engine.salvage() == []
    calls: list[int] = []

    def break_logits(module: Any, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * torch.nan if len(calls) == 4 else output

    hook = model.lm_head.register_forward_hook(break_logits)
    with pytest.raises(RuntimeError, match="logits are broken"):
        engine.generate(PROMPTS[:2], GREEDY)
    hook.remove()
    for (expected,), (completion,) in zip(whole, engine.salvage(), strict=True):
        assert (completion.finish_reason, completion.weight_version) == ("aborted", 2)
        assert completion.tokens == expected.tokens[:3] and len(completion.logprobs) == 3
    engine.pause()
    with pytest.raises(EngineStateError):
        engine.generate(PROMPTS[:1], GREEDY)
    assert engine.salvage() == [], "of the last call, which was refused"
