"""Formulas and the files that metrics are written to."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.model.seam import find_experts
from moesaic.specs import find_spec
from moesaic.train.evaluate import HeldOut
from moesaic.train.flops import ModelFlops, build_model_flops, num_active_params, num_causal_pairs, peak_flops_per_s
from moesaic.train.metrics import MetricsWriter, StepMetrics, memory_bytes

METRICS = StepMetrics(
    step=3,
    epoch=1,
    loss=1.25,
    grad_norm=0.5,
    lr=1e-4,
    num_loss_tokens=17,
    step_time_s=0.25,
    tokens_per_s=1234.0,
    tflops_per_rank=0.5,
    mfu=None,
    memory_gib=[1.0, 2.0],
    expert_load={"layers.0": 1.5, "layers.1": 2.5},
)


def test_flops_formula_is_the_documented_example() -> None:
    assert ModelFlops(per_token=60, per_pair=96).total(num_tokens=8, num_pairs=num_causal_pairs([8])) == 3936


def test_attention_counts_documents_not_rows() -> None:
    assert num_causal_pairs([3, 2]) == 6 + 3
    assert num_causal_pairs([]) == 0  # a row that only fills up a batch


def test_flops_are_those_that_torch_counts() -> None:
    """torch counts whole squares of scores, causal or not: the same cost per pair, for n * n pairs."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(2, 64, dtype=torch.int64), use_cache=False).logits.sum().backward()
    ours = build_model_flops(model, find_spec("llama")).total(num_tokens=2 * 64, num_pairs=2 * 64 * 64)
    # the norms' weights are in N and no matrix product to torch; the rotary angles are one to torch
    assert counter.get_total_flops() == pytest.approx(ours, rel=5e-3)


def build_tiny_moe(tie: bool) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        hidden_size=8, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=1, num_hidden_layers=2, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=16, tie_word_embeddings=tie,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("tie", [False, True])
def test_active_params_count_a_quarter_of_the_experts_and_the_head_once(tie: bool) -> None:
    model = build_tiny_moe(tie)
    per_layer = 8 * 8 + 2 * (8 * 4) + 8 * 8 + 2 * 4  # q, k and v, o, their two norms
    per_layer += 2 * 8 + 4 * 8  # norms, router
    per_layer += 3 * 8 * 4  # one of four experts
    expected = 2 * per_layer + 8 + 16 * 8
    assert num_active_params(model, find_experts(model), top_k=1) == expected
    assert build_model_flops(model, find_spec("qwen3_moe")) == ModelFlops(per_token=6 * expected, per_pair=12 * 2 * 8)


def test_linear_attention_has_no_pairs() -> None:
    model = build_tiny_moe(tie=False)
    whole = build_model_flops(model, find_spec("qwen3_moe"))
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert build_model_flops(model, find_spec("qwen3_moe")) == replace(whole, per_pair=whole.per_pair / 2)


def test_active_params_of_a_model_without_experts() -> None:
    assert num_active_params(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), {}, 1) == 8


def test_peak_is_known_by_name_and_unknown_otherwise() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_per_s("NVIDIA H100 PCIe") == 756e12
    assert peak_flops_per_s("Some Other Device") is None
    assert peak_flops_per_s(None) is None


def test_memory_is_in_bytes() -> None:
    assert 2**26 < memory_bytes() < 2**38  # an interpreter with torch; KiB or pages would fall out of this


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_writer_fills_console_jsonl_and_tensorboard(tmp_path: Path) -> None:
    screen = io.StringIO()
    writer = MetricsWriter(tmp_path, num_steps=10, console=Console(file=screen, width=300))
    writer.write_step(METRICS)
    writer.write_eval(3, HeldOut(sets={"held out": (2.5, 40)}))
    writer.close()
    train_line, eval_line = read_lines(tmp_path / "metrics.jsonl")
    assert train_line["kind"] == "train" and train_line["loss"] == 1.25 and train_line["memory_gib"] == [1.0, 2.0]
    assert train_line["expert_load"] == {"layers.0": 1.5, "layers.1": 2.5}
    assert eval_line == {
        "kind": "eval",
        "step": 3,
        "loss": 2.5,
        "num_loss_tokens": 40,
        "sets": {"held out": {"loss": 2.5, "num_loss_tokens": 40}},
    }
    assert screen.getvalue().splitlines() == [
        "step  3/10  loss 1.2500  norm 0.500  lr 1.00e-04  1,234 tok/s  0.5 TFLOP/s per rank  MFU n/a  2.00 GiB  "
        "expert load max/mean 2.50",
        "step  3/10  held-out loss 2.5000",
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("eval/loss")] == [(3, 2.5)]
    assert board.Scalars("train/expert_load/layers.1")[0].value == 2.5
    assert board.Scalars("train/memory_gib_max")[0].value == 2.0
    assert "train/mfu" not in board.Tags()["scalars"]


def test_a_resumed_writer_appends(tmp_path: Path) -> None:
    for step in (3, 4):
        writer = MetricsWriter(tmp_path, num_steps=10, first_step=step - 1, console=Console(file=io.StringIO()))
        writer.write_step(replace(METRICS, step=step))
        writer.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [3, 4]
