"""Upcycled models compute what their dense source computes; wrong requests are refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from moesaic.model.upcycle import upcycle

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**fields: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields))


def qwen2(**fields: object) -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | fields))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # they start at zero, which would hide a lost bias
            torch.nn.init.normal_(parameter)
    return model


def mistral(**fields: object) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES | fields))


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="30KB")  # several files, as large models have
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(llama(), tmp_path / "dense")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            tensors |= {name: content.get_tensor(name) for name in content.keys()}
    return tensors


@torch.no_grad()
def outputs(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 20 prompts of 12 tokens, and their greedy continuations."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    prompts = torch.randint(3, SIZES["vocab_size"], (20, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(prompts)
    tokens = model.eval().generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return model(prompts, attention_mask=mask, use_cache=False).logits, tokens


SOURCES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-head-dim": lambda: llama(head_dim=16),
    "llama-qkv-one-head": lambda: llama(num_key_value_heads=1, rms_norm_eps=1e-3),
    "mistral-window": lambda: mistral(sliding_window=5),
    "mistral": lambda: mistral(sliding_window=None),
    "qwen2-biases": qwen2,
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=2),
}


# Mixtral has no biases, which qwen2 always has: refused, see below.
CASES = [(source, "qwen2_moe") for source in SOURCES]
CASES += [(source, "mixtral") for source in SOURCES if not source.startswith("qwen2")]


@pytest.mark.parametrize(("source", "family"), CASES)
def test_without_noise_equals_dense(source: str, family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    dense_folder, moe_folder = save(SOURCES[source](), tmp_path / "dense"), tmp_path / "new" / "moe"
    layers = "every:2" if family == "qwen2_moe" else "all"
    report = upcycle(dense_folder, moe_folder, family=family, num_experts=4, top_k=2, layers=layers)
    dense_logits, dense_tokens = outputs(dense_folder)
    moe_logits, moe_tokens = outputs(moe_folder)
    assert (moe_logits - dense_logits).abs().max() < 2e-4
    assert torch.equal(moe_tokens, dense_tokens)
    assert report.sparse_layers == ((1, 3) if family == "qwen2_moe" else (0, 1, 2, 3))
    assert report.num_parameters == sum(tensor.numel() for tensor in stored(moe_folder).values())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["moe"]  # no scratch left


@pytest.mark.parametrize(
    ("layers", "expected", "step", "mlp_only"),
    [
        ("all", (0, 1, 2, 3), 1, []),
        ("every:3", (2,), 3, []),
        ([3, 0], (0, 3), 1, [1, 2]),
        ("1,3", (1, 3), 2, []),
    ],
)
def test_layers(
    layers: str | list[int], expected: tuple[int, ...], step: int, mlp_only: list[int], dense: Path, tmp_path: Path
) -> None:
    report = upcycle(dense, tmp_path / "moe", family="qwen2_moe", num_experts=2, top_k=1, layers=layers)
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert report.sparse_layers == expected
    assert (config["decoder_sparse_step"], config["mlp_only_layers"]) == (step, mlp_only)
    routers = {int(name.split(".")[2]) for name in stored(tmp_path / "moe") if name.endswith("mlp.gate.weight")}
    assert routers == set(expected)
    outputs(tmp_path / "moe")  # the config and the tensors agree on which layers are sparse


def test_shared_expert_starts_at_zero_and_learns(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", family="qwen2_moe", num_experts=2, top_k=1, layers=[1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    block = model.model.layers[1].mlp
    assert torch.count_nonzero(block.shared_expert(torch.randn(5, 32))) == 0
    tokens = torch.arange(3, 19)[None]
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert block.shared_expert.down_proj.weight.grad.abs().max() > 0
    attention = model.model.layers[1].self_attn
    assert torch.count_nonzero(attention.q_proj.bias) == 0


def test_noise_is_relative_to_each_weight(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", family="qwen2_moe", num_experts=8, top_k=2, layers=[2], noise=0.1, seed=3)
    before, after = stored(dense), stored(tmp_path / "moe")
    for part in ("gate_proj", "up_proj", "down_proj"):
        weight = before[f"model.layers.2.mlp.{part}.weight"]
        added = torch.stack([after[f"model.layers.2.mlp.experts.{e}.{part}.weight"] - weight for e in range(8)])
        # 8 x 1536 draws: the sample's standard deviation is within 1% of the true one, 5% is five times that.
        assert added.std() / weight.std() == pytest.approx(0.1, rel=0.05)
        assert not torch.equal(added[0], added[1])
    assert all(torch.equal(after[name], before[name]) for name in before.keys() & after.keys())


def test_seed_decides(dense: Path, tmp_path: Path) -> None:
    arguments = {"family": "mixtral", "num_experts": 2, "top_k": 1, "noise": 0.01}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(dense, tmp_path / name, seed=seed, **arguments)
    a, b, c = (stored(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert not torch.equal(a[router], c[router])


def test_dtype_and_copied_files(dense: Path, tmp_path: Path) -> None:
    (dense / "tokenizer.json").write_text("{}")
    (dense / "chat_template.jinja").write_text("{{ messages }}")
    (dense / "training_args.bin").write_text("not wanted")
    report = upcycle(dense, tmp_path / "moe", family="mixtral", num_experts=2, top_k=2, dtype="bfloat16")
    tensors = stored(tmp_path / "moe")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert report.num_bytes == 2 * report.num_parameters
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["dtype"] == "bfloat16"
    names = {path.name for path in (tmp_path / "moe").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "training_args.bin" not in names


def test_every_problem_at_once_and_nothing_written(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "taken"
    out.mkdir()
    (out / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError) as error:
        upcycle(dense, out, family="qwen9", num_experts=2, top_k=3, layers=[1, 4], noise=float("nan"), dtype="float8")
    lines = str(error.value).splitlines()
    fields = ("family='qwen9'", "top_k=3", "noise=nan", "dtype='float8'", "out_folder=", "layers=[1, 4]: [4]")
    assert len(lines) == len(fields)
    assert all(any(line.startswith(field) for line in lines) for field in fields)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("layers", ["every:0", "every:x", "some", "", "every:9", []])
def test_bad_layers(layers: str | list[int], dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^layers="):
        upcycle(dense, tmp_path / "moe", family="qwen2_moe", num_experts=2, top_k=1, layers=layers)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("build", "family", "message"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8)), "qwen2_moe", "'gpt2'"),
        (qwen2, "mixtral", "self_attn.q_proj.bias.*use family='qwen2_moe'"),
        (lambda: llama(attention_bias=True), "qwen2_moe", "self_attn.o_proj.bias; this model can't"),
        (lambda: llama(mlp_bias=True), "mixtral", "mlp.down_proj.bias"),
    ],
)
def test_source_that_does_not_fit(
    build: Callable[[], PreTrainedModel], family: str, message: str, tmp_path: Path
) -> None:
    folder = save(build(), tmp_path / "dense")
    with pytest.raises(ValueError, match=message):
        upcycle(folder, tmp_path / "moe", family=family, num_experts=2, top_k=1)
    assert not (tmp_path / "moe").exists()


def test_mixtral_needs_all_layers(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every mixtral layer is sparse"):
        upcycle(dense, tmp_path / "moe", family="mixtral", num_experts=2, top_k=1, layers="every:2")


def test_incomplete_source(dense: Path, tmp_path: Path) -> None:
    index = dense / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.up_proj.weight[^$]*embed_tokens.*\(64, 32\)"):
        upcycle(dense, tmp_path / "moe", family="mixtral", num_experts=2, top_k=1)


def test_source_without_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        upcycle(tmp_path, tmp_path / "moe", family="mixtral", num_experts=2, top_k=1)
