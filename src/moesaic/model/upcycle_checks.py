"""What ``upcycle`` can start from: its arguments and the dense model, checked before anything is written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config

DENSE_MODEL_TYPES = ("llama", "qwen2", "mistral")
FAMILIES = ("qwen2_moe", "mixtral")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QKV_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    """A checked source: its config, which file holds which tensor, and the head size its weights imply."""

    folder: Path
    config: PreTrainedConfig
    files: Mapping[str, str]
    head_dim: int


def argument_problems(
    out: Path, family: str, num_experts: int, top_k: int, noise: float, dtype: str | None
) -> list[str]:
    """What is wrong with the arguments of ``upcycle`` that can be judged without the source, one problem an entry."""
    problems = []
    if family not in FAMILIES:
        problems.append(f"family={family!r}: must be one of {', '.join(FAMILIES)}.")
    if num_experts < 1:
        problems.append(f"num_experts={num_experts}: must be at least 1.")
    if not 1 <= top_k <= max(num_experts, 1):
        problems.append(f"top_k={top_k}: must lie between 1 and num_experts={num_experts}.")
    if not (math.isfinite(noise) and noise >= 0):
        problems.append(f"noise={noise}: must be a finite number of at least 0; 0 gives exact copies.")
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}, or left out to keep the source's.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problems.append(f"out_folder={str(out)!r}: must be new or empty; choose another, or remove it first.")
    return problems


def choose_layers(layers: str | Sequence[int], num_layers: int, family: str) -> tuple[tuple[int, ...], list[str]]:
    """The sparse layers, ascending, and what is wrong with the choice."""
    step_text = layers.removeprefix("every:") if isinstance(layers, str) else ""
    if layers == "all":
        chosen = list(range(num_layers))
    elif isinstance(layers, str) and layers.startswith("every:") and step_text.isdecimal() and int(step_text) > 0:
        chosen = list(range(int(step_text) - 1, num_layers, int(step_text)))
    elif isinstance(layers, str) and all(part.strip().isdecimal() for part in layers.split(",")):
        chosen = [int(part) for part in layers.split(",")]
    elif isinstance(layers, str):
        return (), [
            f"layers={layers!r}: must be 'all', 'every:N' with N of at least 1, or layer numbers like '4,9,14'."
        ]
    else:
        chosen = list(layers)
    problems = []
    outside = sorted({layer for layer in chosen if not 0 <= layer < num_layers})
    if outside:
        problems.append(f"layers={layers!r}: {outside} out of range; this model has layers 0 to {num_layers - 1}.")
    if not chosen:
        problems.append(f"layers={layers!r}: chooses no layer of this model's {num_layers}; choose at least one.")
    if family == "mixtral" and set(chosen) != set(range(num_layers)):
        problems.append(f"layers={layers!r}: every mixtral layer is sparse; use layers='all', or family='qwen2_moe'.")
    return tuple(sorted(set(chosen))), problems


def check_source(folder: Path, family: str) -> tuple[DenseModel | None, list[str]]:
    """The source, or what is wrong with it: its kind, its tensors and their shapes, what ``family`` can't express."""
    field = f"dense_folder={str(folder)!r}"
    if not (folder / "config.json").is_file():
        return None, [f"{field}: has no config.json; give the folder of a saved Hugging Face model."]
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("model_type") not in DENSE_MODEL_TYPES:
        kinds = ", ".join(DENSE_MODEL_TYPES)
        return None, [f"{field}: model_type={raw.get('model_type')!r} has no Llama-like MLP; must be one of {kinds}."]
    if "quantization_config" in raw:
        return None, [f"{field}: its weights are quantized; save a dequantized copy first."]
    files = _find_tensors(folder)
    if not files:
        return None, [f"{field}: has no safetensors; save the model with save_pretrained first."]
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")  # transformers ties it to the embedding, whatever the file says
    problems = [
        f"{field}: lacks {name}; the checkpoint is incomplete." for name in sorted(expected.keys() - files.keys())
    ]
    for name in sorted(expected.keys() & files.keys()):
        with safe_open(folder / files[name], framework="pt") as tensors:
            shape = tuple(tensors.get_slice(name).get_shape())
        if shape != expected[name]:
            problems.append(f"{field}: {name} has shape {shape}; config.json asks for {expected[name]}.")
    problems += [f"{field}: {problem}" for problem in _inexpressible(config, expected.keys(), family)]
    if problems:
        return None, problems
    head_dim = expected["model.layers.0.self_attn.q_proj.weight"][0] // config.num_attention_heads
    return DenseModel(folder=folder, config=config, files={k: files[k] for k in expected}, head_dim=head_dim), []


def _find_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> name of the file that holds it; empty if the folder has no safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)


def _inexpressible(config: PreTrainedConfig, names: Iterable[str], family: str) -> list[str]:
    """What the source computes and the MoE family has no place for."""
    kept = QKV_BIASES if family == "qwen2_moe" else ()
    biases = sorted({name.split(".", 3)[3] for name in names if name.endswith(".bias")} - set(kept))
    problems = []
    if biases:
        remedy = "use family='qwen2_moe'" if set(biases) <= set(QKV_BIASES) else "this model can't be upcycled"
        problems.append(f"{family} has no place for its biases {', '.join(biases)}; {remedy}.")
    if family == "mixtral" and len(set(sliding_attention(config)[1])) > 1:
        problems.append("mixtral has one kind of attention in all layers, this model has two; use family='qwen2_moe'.")
    return problems


def sliding_attention(config: PreTrainedConfig) -> tuple[int | None, list[str]]:
    """The source's attention window in tokens, or None, and the kind of attention of each layer."""
    kinds = ["full_attention"] * config.num_hidden_layers
    if isinstance(config, Qwen2Config):
        return config.sliding_window, list(config.layer_types or kinds)
    if isinstance(config, MistralConfig) and config.sliding_window is not None:
        return config.sliding_window, ["sliding_attention"] * config.num_hidden_layers
    return None, kinds
