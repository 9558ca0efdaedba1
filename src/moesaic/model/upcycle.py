"""Dense to mixture of experts: each chosen layer's MLP becomes ``num_experts`` copies of itself behind a fresh router.

With normalised top-k weights the copies' weighted sum is the MLP's own output, so at ``noise=0`` the MoE computes what
the dense model computes (up to rounding), and training starts from there. Sources: models whose blocks are Llama's
(llama, qwen2, mistral). The folder is written in the Hub's keys, one expert per tensor, one file per layer: the peak
memory is one layer of the MoE.

Example: SmolLM2-135M (30 layers, hidden 576, MLP 1536), ``qwen2_moe``, ``layers="every:5"``, 8 experts: layers 4, 9,
14, 19, 24, 29 become sparse, 7 more copies of 3 * 576 * 1536 weights in each, 134.5M -> 246.7M parameters.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import MixtralConfig, PreTrainedConfig, Qwen2MoeConfig
from transformers.utils import GENERATION_CONFIG_NAME

from moesaic.model.tokenizer_files import copy_tokenizer
from moesaic.model.upcycle_checks import (
    DTYPES,
    QKV_BIASES,
    DenseModel,
    argument_problems,
    check_source,
    choose_layers,
    sliding_attention,
)

# Rows of the shared expert that every sparse Qwen2-MoE layer has; it starts as the zero function.
SHARED_EXPERT_SIZE = 64

_MLP_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
# How the Hub's files of a family name an MoE, and in it the parts of an expert, in the order above.
_HUB_NAMES = {
    "qwen2_moe": ("mlp", _MLP_PARTS),
    "mixtral": ("block_sparse_moe", ("w1.weight", "w3.weight", "w2.weight")),
}
# Written by the MoE's own config or meaningless in it; every other field that both configs have is copied.
_COPIED_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings rope_parameters attention_dropout "
    "pad_token_id bos_token_id eos_token_id"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcycleReport:
    """What was written: the layers that became sparse, the number of parameters, and the weights' size in bytes."""

    sparse_layers: tuple[int, ...]
    num_parameters: int
    num_bytes: int


def upcycle(
    dense_folder: str | Path,
    out_folder: str | Path,
    *,
    family: str,
    num_experts: int,
    top_k: int,
    layers: str | Sequence[int] = "all",
    noise: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
) -> UpcycleReport:
    """Write a MoE whose experts are copies of a dense model's MLPs. One process, no process group.

    Args:
        dense_folder: a folder with ``config.json`` and safetensors of a llama, qwen2 or mistral model.
        out_folder: a new or empty folder; it appears only when it is complete. Tokenizer, chat template and generation
            config are copied.
        family: ``qwen2_moe`` (any layers; zero q/k/v biases where the source has none; a shared expert of
            ``SHARED_EXPERT_SIZE`` rows whose output is exactly zero until it is trained) or ``mixtral`` (all layers).
        num_experts, top_k: experts per sparse layer, and how many of them each token visits.
        layers: ``"all"``, ``"every:N"`` (layers N-1, 2N-1, ...), ``"4,9,14"``, or a list of layer numbers from 0.
        noise: standard deviation of the normal noise added to each expert weight, relative to that weight's own
            standard deviation. 0 gives exact copies; 0.01 to 0.05 lets experts part sooner; 0.1 degrades a model.
        seed: of the routers, the shared experts and the noise.
        dtype: ``float32``, ``bfloat16`` or ``float16``; default: each tensor keeps its own.

    Raises:
        ValueError: everything that is wrong with the arguments and the source, one problem a line; nothing is written.
    """
    source, out = Path(dense_folder), Path(out_folder)
    problems = argument_problems(out, family, num_experts, top_k, noise, dtype)
    dense, source_problems = check_source(source, family)
    problems += source_problems
    sparse_layers: tuple[int, ...] = ()
    if dense is not None:
        sparse_layers, layer_problems = choose_layers(layers, dense.config.num_hidden_layers, family)
        problems += layer_problems
    if problems or dense is None:
        raise ValueError("\n".join(problems))

    config = _build_config(dense, family, num_experts, top_k, sparse_layers)
    config.dtype = DTYPES[dtype] if dtype else dense.config.dtype
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        report = _write_weights(dense, folder, config, sparse_layers, noise, seed, DTYPES[dtype] if dtype else None)
        config.save_pretrained(folder)
        copy_tokenizer(source, folder)
        if (source / GENERATION_CONFIG_NAME).exists():
            shutil.copyfile(source / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)
        folder.rename(out)
    return report


def _build_config(
    dense: DenseModel, family: str, num_experts: int, top_k: int, sparse_layers: tuple[int, ...]
) -> PreTrainedConfig:
    """The MoE's config. Its MLP size is the dense one's, in the sparse layers too."""
    fields = dense.config.to_dict()
    fields = {name: fields[name] for name in _COPIED_FIELDS}
    window, attention_kinds = sliding_attention(dense.config)
    if dense.head_dim * fields["num_attention_heads"] != fields["hidden_size"]:
        fields["head_dim"] = dense.head_dim
    if family == "mixtral":
        window = window if "sliding_attention" in attention_kinds else None
        fields |= {"num_local_experts": num_experts, "sliding_window": window}
        return MixtralConfig(**fields, num_experts_per_tok=top_k, architectures=["MixtralForCausalLM"])
    num_layers = fields["num_hidden_layers"]
    step = sparse_layers[0] + 1
    if sparse_layers != tuple(range(step - 1, num_layers, step)):
        step = 1
    dense_layers = sorted(set(range(step - 1, num_layers, step)) - set(sparse_layers))
    return Qwen2MoeConfig(
        **fields,
        architectures=["Qwen2MoeForCausalLM"],
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=step,
        mlp_only_layers=dense_layers,
        moe_intermediate_size=fields["intermediate_size"],
        shared_expert_intermediate_size=SHARED_EXPERT_SIZE,
        qkv_bias=True,
        use_sliding_window="sliding_attention" in attention_kinds,
        sliding_window=window,
        layer_types=attention_kinds,
    )


def _write_weights(
    dense: DenseModel,
    folder: Path,
    config: PreTrainedConfig,
    sparse_layers: tuple[int, ...],
    noise: float,
    seed: int,
    dtype: torch.dtype | None,
) -> UpcycleReport:
    """One file with what lies outside the layers, then one per layer, then the index."""
    generator = torch.Generator().manual_seed(seed)
    num_layers = config.num_hidden_layers
    groups: dict[int, list[str]] = {layer: [] for layer in range(-1, num_layers)}
    for name in dense.files:
        groups[int(name.split(".")[2]) if name.startswith("model.layers.") else -1].append(name)
    weight_map: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for number, (layer, names) in enumerate(groups.items(), start=1):
        tensors = {name: _read_tensor(dense, name, dtype) for name in names}
        if layer >= 0 and isinstance(config, Qwen2MoeConfig):
            tensors = _zero_biases(layer, tensors) | tensors
        if layer in sparse_layers:
            tensors = _to_experts(layer, tensors, config, noise, generator)
        file = f"model-{number:05d}-of-{num_layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        num_parameters += sum(t.numel() for t in tensors.values())
        num_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return UpcycleReport(sparse_layers=sparse_layers, num_parameters=num_parameters, num_bytes=num_bytes)


def _read_tensor(dense: DenseModel, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    with safe_open(dense.folder / dense.files[name], framework="pt") as tensors:
        return tensors.get_tensor(name).to(dtype)


def _zero_biases(layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros for q, k and v: ``qkv_bias=False`` would do here, but vLLM leaves those biases uninitialised then."""
    prefix = f"model.layers.{layer}."
    weights = {prefix + bias: tensors[prefix + bias.replace(".bias", ".weight")] for bias in QKV_BIASES}
    return {name: weight.new_zeros(weight.shape[0]) for name, weight in weights.items()}


def _to_experts(
    layer: int,
    tensors: Mapping[str, torch.Tensor],
    config: PreTrainedConfig,
    noise: float,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """A layer's tensors in the Hub's keys, its MLP replaced by experts, a router and, in Qwen2-MoE, a shared expert."""
    mlp = f"model.layers.{layer}.mlp."
    moe_name, hub_parts = _HUB_NAMES[config.model_type]
    moe = f"model.layers.{layer}.{moe_name}."
    dense_mlp = {part: tensors[mlp + part] for part in _MLP_PARTS}
    reference = dense_mlp["gate_proj.weight"]

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * config.initializer_range).to(reference.dtype)

    made = {moe + "gate.weight": normal(config.num_experts, config.hidden_size)}
    for expert in range(config.num_experts):
        for hub_part, weight in zip(hub_parts, dense_mlp.values(), strict=True):
            made[f"{moe}experts.{expert}.{hub_part}"] = _add_noise(weight, noise, generator)
    if isinstance(config, Qwen2MoeConfig):
        # Only the last matrix is zero: were all three, no gradient would ever reach any of them.
        size = config.shared_expert_intermediate_size
        made[moe + "shared_expert.gate_proj.weight"] = normal(size, config.hidden_size)
        made[moe + "shared_expert.up_proj.weight"] = normal(size, config.hidden_size)
        made[moe + "shared_expert.down_proj.weight"] = reference.new_zeros(config.hidden_size, size)
        made[moe + "shared_expert_gate.weight"] = reference.new_zeros(1, config.hidden_size)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(mlp)} | made


def _add_noise(weight: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """A copy of ``weight`` plus normal noise of ``noise`` times its standard deviation; computed in fp32."""
    if noise == 0:
        return weight.clone()
    wide = weight.float()
    return (wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)).to(weight.dtype)
