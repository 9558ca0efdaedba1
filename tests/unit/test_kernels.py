"""Kernels: what a recipe selects on which device, and what the modules of a model then really call."""

from __future__ import annotations

import copy
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from moesaic.config import KernelConfig
from moesaic.kernels import (
    BUILT_IN_OPERATORS,
    Implementation,
    KernelSelection,
    Operator,
    Package,
    apply_kernels,
    extend,
    find_bound_kernels,
    select_kernels,
)
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.weights import export_hf, load_weights
from tests.unit.tiny_checkpoints import assert_same_state, tiny_config

CHUNK, RECURRENT = (operator.name for operator in BUILT_IN_OPERATORS)
GLOBAL_NAMES = {operator.name: operator.global_name for operator in BUILT_IN_OPERATORS}
FLA = "flash-linear-attention"
SEED_CONFIG = KernelConfig(name=f"auto, {FLA}", include_kernels=f"{CHUNK}, {RECURRENT}", chunk_size=32)
IDS = torch.arange(1, 41).view(1, 40)


def build_hybrid(**overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config("qwen3_5_moe_text", **overrides)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def fake_fla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """An installed fla whose kernels record what they are called with, and compute what the references do."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def kernel_of(name: str) -> Any:
        reference = getattr(modeling, GLOBAL_NAMES[name]).__wrapped__

        def kernel(
            q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs
        ):
            calls.append((name, kwargs))
            return reference(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )

        return kernel

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for name in (CHUNK, RECURRENT):
        setattr(sys.modules["fla.ops.gated_delta_rule"], name, kernel_of(name))
    monkeypatch.setattr("moesaic.kernels.registry.version", {"fla-core": "0.6.0"}.__getitem__)
    return calls


def chosen(selection: KernelSelection) -> dict[str, str]:
    return {choice.operator.name: choice.implementation.name for choice in selection.choices}


def bound(model: PreTrainedModel, operator: str) -> Any:
    """What a model's linear attention calls."""
    return model.model.layers[0].linear_attn.forward.__func__.__globals__[GLOBAL_NAMES[operator]]


# What is selected.


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_is_the_reference_also_where_fla_is_installed(device_type: str, fake_fla: list[Any]) -> None:
    selection = select_kernels(device_type=device_type)
    assert chosen(selection) == {CHUNK: "reference", RECURRENT: "reference"}
    assert not any(choice.passed_over for choice in selection.choices)


@pytest.mark.parametrize("name", [FLA, f"auto, {FLA}", f"{FLA}, auto"])
def test_fla_is_taken_where_it_is_listed_and_runs(name: str, fake_fla: list[Any]) -> None:
    selection = select_kernels(KernelConfig(name=name), device_type="cuda")
    assert chosen(selection) == {CHUNK: FLA, RECURRENT: FLA}


def test_an_operator_that_is_not_included_gets_the_reference(fake_fla: list[Any]) -> None:
    config = KernelConfig(name=f"auto, {FLA}", include_kernels=CHUNK)
    assert chosen(select_kernels(config, device_type="cuda")) == {CHUNK: FLA, RECURRENT: "reference"}


def test_on_cpu_fla_is_passed_over_and_the_choice_says_so() -> None:
    selection = select_kernels(SEED_CONFIG, device_type="cpu")
    assert chosen(selection) == {CHUNK: "reference", RECURRENT: "reference"}
    assert [str(choice) for choice in selection.choices] == [
        f"kernel {name}: reference ({FLA} runs on cuda, npu, xpu, not on cpu)" for name in (CHUNK, RECURRENT)
    ]


def test_on_an_accelerator_fla_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ValueError, match="pip install 'flash-linear-attention>=0.6'") as caught:
        select_kernels(SEED_CONFIG, device_type="cuda")
    assert all(name in str(caught.value) for name in (CHUNK, RECURRENT, "kernel_config.name", "no package fla"))


def test_an_old_fla_which_would_ignore_the_chunk_size_is_refused(
    fake_fla: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.kernels.registry.version", lambda name: "0.4.1")
    with pytest.raises(ValueError, match="needs fla-core >= 0.6, and here is 0.4.1"):
        select_kernels(SEED_CONFIG, device_type="cuda")


def test_unknown_names_are_refused_together() -> None:
    with pytest.raises(ValueError) as caught:
        select_kernels(KernelConfig(name="auto, liger", include_kernels="rmsnorm"), device_type="cpu")
    assert all(word in str(caught.value) for word in ("'liger'", FLA, "'rmsnorm'", CHUNK))


# What is bound.


def test_the_reference_is_what_runs_with_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, sizes = modeling.torch_chunk_gated_delta_rule.__wrapped__, []

    def count(*args: Any, chunk_size: int = 64, **kwargs: Any) -> Any:
        sizes.append(chunk_size)
        return reference(*args, chunk_size=chunk_size, **kwargs)

    model = build_hybrid(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
    expected = model(IDS).logits
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", count)
    for size in (16, 32, 64):
        sizes.clear()
        apply_kernels(model, select_kernels(KernelConfig(chunk_size=size), device_type="cpu"))
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        assert sizes == [size, size]


def test_two_models_in_one_process_select_differently_and_the_module_stays_as_it_is(fake_fla: list[Any]) -> None:
    before = dict(vars(modeling))
    plain, first, second = build_hybrid(), build_hybrid(), build_hybrid()
    apply_kernels(first, select_kernels(KernelConfig(chunk_size=16), device_type="cpu"))
    apply_kernels(second, select_kernels(SEED_CONFIG, device_type="cuda"))
    assert dict(vars(modeling)) == before
    logits = [model(IDS, use_cache=False).logits for model in (plain, first)]
    assert fake_fla == []
    logits.append(second(IDS, use_cache=False).logits)
    assert fake_fla == [(CHUNK, {"chunk_size": 32})], "fla gets the chunk size, and nothing meant for attention"
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-5, atol=1e-5)
    assert "forward" not in plain.model.layers[0].linear_attn.__dict__
    assert find_bound_kernels(plain) == {}


def test_what_transformers_bound_at_import_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported_kernel(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("fla was not listed")

    # As transformers does where fla is installed: the kernel, in a wrapper that remembers the PyTorch function.
    for name in GLOBAL_NAMES.values():
        wrapped = copy.copy(imported_kernel)
        wrapper = type(wrapped)(wrapped.__code__, wrapped.__globals__, name)
        wrapper.__wrapped__ = getattr(modeling, name).__wrapped__  # type: ignore[attr-defined]
        monkeypatch.setattr(modeling, name, wrapper)
    model = build_hybrid()
    with pytest.raises(AssertionError, match="not listed"):
        model(IDS)
    apply_kernels(model, select_kernels(device_type="cpu"))
    assert model(IDS).logits.isfinite().all()


def test_a_reference_that_was_made_a_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package ``kernels`` (0.17) makes of a decorated function, where it is installed."""

    def make_module(func: Any) -> torch.nn.Module:
        class Func(torch.nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return func(*args, **kwargs)

        return Func()

    reference = modeling.torch_chunk_gated_delta_rule.__wrapped__
    made = make_module(modeling.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", made)
    model = apply_kernels(build_hybrid(), select_kernels(KernelConfig(chunk_size=16), device_type="cpu"))
    call = bound(model, CHUNK)
    assert call.keywords == {"chunk_size": 16} and call.func.__wrapped__ is reference


def test_decoding_with_a_cache_calls_the_recurrent_operator(fake_fla: list[Any]) -> None:
    model = apply_kernels(build_hybrid(), select_kernels(SEED_CONFIG, device_type="cuda"))
    cache = model(IDS[:, :-1], use_cache=True).past_key_values
    last = model(IDS[:, -1:], past_key_values=cache, use_cache=True).logits
    assert [name for name, _ in fake_fla] == [CHUNK, RECURRENT]
    torch.testing.assert_close(last, build_hybrid()(IDS).logits[:, -1:], rtol=1e-4, atol=1e-5)


def test_the_reference_refuses_packed_sequences() -> None:
    model = apply_kernels(build_hybrid(), select_kernels(device_type="cpu"))
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(IDS, cu_seq_lens_q=torch.tensor([0, 20, 40], dtype=torch.int32), use_cache=False)


def test_a_copy_of_a_model_calls_its_own_weights() -> None:
    model = apply_kernels(build_hybrid(), select_kernels(device_type="cpu"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].linear_attn.out_proj.weight.zero_()
    assert not torch.equal(model(IDS).logits, other(IDS).logits)


def test_choices_are_logged_once_and_described(caplog: pytest.LogCaptureFixture) -> None:
    model = build_hybrid(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
    with caplog.at_level(logging.INFO, logger="moesaic"):
        apply_kernels(model, select_kernels(SEED_CONFIG, device_type="cpu"))
    why = f"{FLA} runs on cuda, npu, xpu, not on cpu"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"kernel {CHUNK}: reference ({why})"),
        ("WARNING", f"kernel {RECURRENT}: reference ({why})"),
    ]
    one = {"implementation": "reference", "passed_over": why, "num_modules": 2}
    assert find_bound_kernels(model) == {CHUNK: one, RECURRENT: one}

    caplog.clear()
    with caplog.at_level(logging.INFO, logger="moesaic"):
        apply_kernels(model, select_kernels(device_type="cpu"))
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert find_bound_kernels(model)[CHUNK]["passed_over"] is None, "the later call replaces what the first one bound"


NOTHING = {"layer_types": ["full_attention", "full_attention"]}


@pytest.mark.parametrize("config", [SEED_CONFIG, KernelConfig(include_kernels=CHUNK), KernelConfig(name=FLA)])
@pytest.mark.parametrize(("model_type", "overrides"), [("qwen3_moe", {}), ("qwen3_5_moe_text", NOTHING)])
def test_what_is_asked_for_and_matches_nothing_is_an_error(
    config: KernelConfig, model_type: str, overrides: dict[str, Any]
) -> None:
    model = build_on_meta(tiny_config(model_type, **overrides), attn_implementation="sdpa", dtype=torch.float32)
    with pytest.raises(ValueError, match="has none of the known operators") as caught:
        apply_kernels(model, select_kernels(config, device_type="cpu"))
    assert all(name in str(caught.value) for name in config.kernels or (FLA,))


def test_auto_alone_asks_for_nothing() -> None:
    model = build_on_meta(tiny_config("qwen3_moe"), attn_implementation="sdpa", dtype=torch.float32)
    assert find_bound_kernels(apply_kernels(model, select_kernels(device_type="cpu"))) == {}


def test_a_model_that_has_one_of_two_says_which() -> None:
    operators = (
        *BUILT_IN_OPERATORS,
        Operator(name="mine", global_name="nowhere", reference=_implementation("reference")),
    )
    selection = select_kernels(KernelConfig(include_kernels=f"{CHUNK}, mine"), device_type="cpu", operators=operators)
    with pytest.raises(ValueError, match=f"include_kernels: mine matches nothing.*has {CHUNK}, {RECURRENT}"):
        apply_kernels(build_hybrid(), selection)


# What is added from outside.


def _implementation(name: str, **fields: Any) -> Implementation:
    return Implementation(name=name, build=lambda reference, chunk_size: reference, **fields)


def test_more_implementations_are_added_never_replaced() -> None:
    mine = _implementation("mine", device_types=frozenset({"npu"}), is_auto=True)
    operators = extend(BUILT_IN_OPERATORS, CHUNK, mine)
    assert chosen(select_kernels(device_type="npu", operators=operators)) == {CHUNK: "mine", RECURRENT: "reference"}
    assert chosen(select_kernels(device_type="cpu", operators=operators))[CHUNK] == "reference"
    assert chosen(select_kernels(KernelConfig(name="mine"), device_type="npu", operators=operators))[CHUNK] == "mine"
    assert chosen(select_kernels(device_type="npu"))[CHUNK] == "reference", "the built-in table is as it was"
    for taken in (mine, _implementation(FLA), _implementation("reference"), _implementation("auto")):
        with pytest.raises(ValueError, match="is taken"):
            extend(operators, CHUNK, taken)
    with pytest.raises(ValueError, match="'rmsnorm' is none of"):
        extend(operators, "rmsnorm", mine)


def test_auto_passes_over_what_is_not_installed_and_says_so() -> None:
    package = Package(module="no_such_package", distribution="none", min_version="1", install="none")
    operators = extend(BUILT_IN_OPERATORS, CHUNK, _implementation("mine", package=package, is_auto=True))
    choice = select_kernels(device_type="cpu", operators=operators).choices[0]
    assert choice.implementation.name == "reference" and "mine needs none >= 1" in choice.passed_over
    with pytest.raises(ValueError, match="no package no_such_package"):
        select_kernels(KernelConfig(name="mine"), device_type="cpu", operators=operators)


# The hybrid family's files.


def test_weights_of_the_whole_model_with_its_vision_tower_load_into_the_text_model(tmp_path: Path) -> None:
    text = tiny_config("qwen3_5_moe_text").to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = modeling.Qwen3_5MoeConfig(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    torch.manual_seed(0)
    modeling.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path)
    model = build_on_meta(tmp_path, attn_implementation="sdpa", dtype=torch.float32)
    materialize(model, "cpu")
    report = load_weights(model, tmp_path)
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert report.ignored_keys and all(key.startswith("model.visual.") for key in report.ignored_keys)
    # The export is the whole model again, the text model in it trained: both classes load it.
    export_hf(model, tmp_path / "whole")
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32))
    whole, info = modeling.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "whole", output_loading_info=True
    )
    assert not any(info.values()), info
    assert_same_state(whole, modeling.Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path))
    export_hf(model, tmp_path / "text", keep_unused=False)
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32))
