"""The tensors of models as they lie on the Hub, from the sizes in their config.json: names, dtypes, shapes; no values.

``write_folder`` makes a model folder of them whose files have headers and holes: they take no room on the disk, and
nothing may read them. ``num_layers`` cuts a model short, with every kind of layer kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...]]]
NUM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One model.

    Attributes:
        config: its config.json, as far as shapes depend on it.
        tensors: those of its files, for a number of layers.
        num_layers: as released.
        few_layers: fewest that have every kind of layer.
        num_tensors, num_ignored: of the release: all, and those that the text model has no use for (scales included).
        ignored: what the keys of the latter begin with, at a number of layers.
    """

    config: Mapping[str, Any]
    tensors: Callable[[int], Tensors]
    num_layers: int
    few_layers: int
    num_tensors: int
    num_ignored: int = 0
    ignored: Callable[[int], tuple[str, ...]] = lambda _: ()

    def config_of(self, num_layers: int) -> dict[str, Any]:
        """config.json of the model cut to ``num_layers``."""
        sized = {**self.config, "num_hidden_layers": num_layers, "dtype": "bfloat16"}
        if "text_config" in self.config:
            sized = {**self.config, "text_config": {**self.config["text_config"], "num_hidden_layers": num_layers}}
        return sized


def write_folder(folder: Path, model: HubModel, num_layers: int, max_file_tensors: int = 4096) -> None:
    """The model cut to ``num_layers``, in several files, with holes in place of values."""
    (folder / "config.json").write_text(json.dumps(model.config_of(num_layers)))
    tensors = list(model.tensors(num_layers).items())
    weight_map: dict[str, str] = {}
    for start in range(0, len(tensors), max_file_tensors):
        name = f"model-{start:06d}.safetensors"
        content: dict[str, Any] = {}
        end = 0
        for key, (dtype, shape) in tensors[start : start + max_file_tensors]:
            begin, end = end, end + NUM_BYTES[dtype] * math.prod(shape)
            content[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            weight_map[key] = name
        header = json.dumps(content).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _linear(tensors: Tensors, key: str, shape: tuple[int, int], scales: str | None) -> None:
    """A matrix: plain, or in fp8 with scales of this dtype."""
    tensors[key] = ("F8_E4M3" if scales else "BF16", shape)
    if scales:
        tensors[f"{key}_scale_inv"] = (scales, (-(-shape[0] // 128), -(-shape[1] // 128)))


def _mlp(tensors: Tensors, prefix: str, size: int, hidden: int, scales: str | None) -> None:
    _linear(tensors, f"{prefix}gate_proj.weight", (size, hidden), scales)
    _linear(tensors, f"{prefix}up_proj.weight", (size, hidden), scales)
    _linear(tensors, f"{prefix}down_proj.weight", (hidden, size), scales)


def _plain(tensors: Tensors, prefix: str, **shapes: tuple[int, ...]) -> None:
    """bf16 weights; ``__`` in a name stands for a dot."""
    for name, shape in shapes.items():
        tensors[f"{prefix}{name.replace('__', '.')}.weight"] = ("BF16", shape)


def _norms(tensors: Tensors, prefix: str, hidden: int) -> None:
    _plain(tensors, prefix, input_layernorm=(hidden,), post_attention_layernorm=(hidden,))


def qwen3_30b(num_layers: int, scales: str | None = None) -> Tensors:
    """Qwen3-30B-A3B; with scales its fp8 release."""
    hidden, vocab = 2048, 151936
    tensors: Tensors = {}
    _plain(tensors, "", model__embed_tokens=(vocab, hidden), model__norm=(hidden,), lm_head=(vocab, hidden))
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        _norms(tensors, prefix, hidden)
        for name, shape in (("q", (4096, hidden)), ("k", (512, hidden)), ("v", (512, hidden)), ("o", (hidden, 4096))):
            _linear(tensors, f"{prefix}self_attn.{name}_proj.weight", shape, scales)
        _plain(tensors, prefix, self_attn__q_norm=(128,), self_attn__k_norm=(128,), mlp__gate=(128, hidden))
        for expert in range(128):
            _mlp(tensors, f"{prefix}mlp.experts.{expert}.", 768, hidden, scales)
    return tensors


def deepseek_v3(num_layers: int) -> Tensors:
    """DeepSeek-V3: fp8 with scales, and one layer more for multi-token prediction."""
    hidden, vocab, num_heads = 7168, 129280, 128
    tensors: Tensors = {}
    _plain(tensors, "", model__embed_tokens=(vocab, hidden), model__norm=(hidden,), lm_head=(vocab, hidden))
    for layer in range(num_layers + 1):
        prefix = f"model.layers.{layer}."
        _norms(tensors, prefix, hidden)
        attention = {
            "q_a_proj": (1536, hidden),
            "q_b_proj": (num_heads * 192, 1536),
            "kv_a_proj_with_mqa": (576, hidden),  # its last block has 64 rows
            "kv_b_proj": (num_heads * 256, 512),
            "o_proj": (hidden, num_heads * 128),
        }
        for name, shape in attention.items():
            _linear(tensors, f"{prefix}self_attn.{name}.weight", shape, "F32")
        _plain(tensors, f"{prefix}self_attn.", q_a_layernorm=(1536,), kv_a_layernorm=(512,))
        if layer < 3:
            _mlp(tensors, f"{prefix}mlp.", 18432, hidden, "F32")
            continue
        _plain(tensors, prefix, mlp__gate=(256, hidden))
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = ("F32", (256,))
        for expert in range(256):
            _mlp(tensors, f"{prefix}mlp.experts.{expert}.", 2048, hidden, "F32")
        _mlp(tensors, f"{prefix}mlp.shared_experts.", 2048, hidden, "F32")
    _mtp(tensors, f"model.layers.{num_layers}.", hidden, vocab)
    return tensors


def _mtp(tensors: Tensors, prefix: str, hidden: int, vocab: int) -> None:
    """What a layer for multi-token prediction has beside a layer's own tensors."""
    _plain(
        tensors, prefix, embed_tokens=(vocab, hidden), enorm=(hidden,), hnorm=(hidden,), eh_proj=(hidden, 2 * hidden)
    )
    _plain(tensors, f"{prefix}shared_head.", norm=(hidden,), head=(vocab, hidden))


def glm_4_5(num_layers: int) -> Tensors:
    """GLM-4.5: three dense layers, and one more for multi-token prediction."""
    hidden, vocab = 5120, 151552
    tensors: Tensors = {}
    _plain(tensors, "", model__embed_tokens=(vocab, hidden), model__norm=(hidden,), lm_head=(vocab, hidden))
    for layer in range(num_layers + 1):
        prefix = f"model.layers.{layer}."
        _norms(tensors, prefix, hidden)
        for name, rows in (("q", 12288), ("k", 1024), ("v", 1024)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = ("BF16", (rows, hidden))
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        _plain(tensors, f"{prefix}self_attn.", o_proj=(hidden, 12288), q_norm=(128,), k_norm=(128,))
        if layer < 3:
            _mlp(tensors, f"{prefix}mlp.", 12288, hidden, None)
            continue
        _plain(tensors, prefix, mlp__gate=(160, hidden))
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = ("F32", (160,))
        for expert in range(160):
            _mlp(tensors, f"{prefix}mlp.experts.{expert}.", 1536, hidden, None)
        _mlp(tensors, f"{prefix}mlp.shared_experts.", 1536, hidden, None)
    _mtp(tensors, f"model.layers.{num_layers}.", hidden, vocab)
    return tensors


def gpt_oss_20b(num_layers: int) -> Tensors:
    """gpt-oss-20b: experts in MXFP4."""
    hidden, size, vocab, num_experts = 2880, 2880, 201088, 32
    tensors: Tensors = {}
    _plain(tensors, "", model__embed_tokens=(vocab, hidden), model__norm=(hidden,), lm_head=(vocab, hidden))
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        _norms(tensors, prefix, hidden)
        for name, shape in (("q", (4096, hidden)), ("k", (512, hidden)), ("v", (512, hidden)), ("o", (hidden, 4096))):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = ("BF16", shape)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = ("BF16", shape[:1])
        tensors[f"{prefix}self_attn.sinks"] = ("BF16", (64,))
        tensors[f"{prefix}mlp.router.weight"] = ("BF16", (num_experts, hidden))
        tensors[f"{prefix}mlp.router.bias"] = ("BF16", (num_experts,))
        for name, rows, cols in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
            tensors[f"{prefix}mlp.experts.{name}_blocks"] = ("U8", (num_experts, rows, cols // 32, 16))
            tensors[f"{prefix}mlp.experts.{name}_scales"] = ("U8", (num_experts, rows, cols // 32))
            tensors[f"{prefix}mlp.experts.{name}_bias"] = ("BF16", (num_experts, rows))
    return tensors


def qwen3_5_35b(num_layers: int) -> Tensors:
    """Qwen3.5-35B-A3B: experts stacked, but one by one in the layer for multi-token prediction; and a vision tower."""
    hidden, vocab = 2048, 248320
    tensors: Tensors = {}
    text = "model.language_model."
    _plain(tensors, "", lm_head=(vocab, hidden))
    _plain(tensors, text, embed_tokens=(vocab, hidden), norm=(hidden,))
    for layer in range(num_layers):
        prefix = f"{text}layers.{layer}."
        _norms(tensors, prefix, hidden)
        if layer % 4 == 3:
            _qwen3_5_attention(tensors, prefix)
        else:
            linear = f"{prefix}linear_attn."
            _plain(tensors, linear, conv1d=(8192, 1, 4), in_proj_qkv=(8192, hidden), in_proj_z=(4096, hidden))
            _plain(tensors, linear, in_proj_a=(32, hidden), in_proj_b=(32, hidden), out_proj=(hidden, 4096))
            tensors |= {f"{linear}A_log": ("F32", (32,)), f"{linear}dt_bias": ("BF16", (32,))}
            tensors[f"{linear}norm.weight"] = ("F32", (128,))
        tensors[f"{prefix}mlp.experts.gate_up_proj"] = ("BF16", (256, 1024, hidden))
        tensors[f"{prefix}mlp.experts.down_proj"] = ("BF16", (256, hidden, 512))
        _qwen3_5_shared(tensors, prefix)
    _plain(tensors, "mtp.", fc=(hidden, 2 * hidden), norm=(hidden,))
    _plain(tensors, "mtp.", pre_fc_norm_embedding=(hidden,), pre_fc_norm_hidden=(hidden,))
    _norms(tensors, "mtp.layers.0.", hidden)
    _qwen3_5_attention(tensors, "mtp.layers.0.")
    _qwen3_5_shared(tensors, "mtp.layers.0.")
    for expert in range(256):
        _mlp(tensors, f"mtp.layers.0.mlp.experts.{expert}.", 512, hidden, None)
    return tensors | _qwen3_5_vision(hidden)


def _qwen3_5_attention(tensors: Tensors, prefix: str) -> None:
    attention = f"{prefix}self_attn."
    _plain(tensors, attention, q_proj=(8192, 2048), k_proj=(512, 2048), v_proj=(512, 2048), o_proj=(2048, 4096))
    _plain(tensors, attention, q_norm=(256,), k_norm=(256,))


def _qwen3_5_shared(tensors: Tensors, prefix: str) -> None:
    _plain(tensors, f"{prefix}mlp.", gate=(256, 2048), shared_expert_gate=(1, 2048))
    _mlp(tensors, f"{prefix}mlp.shared_expert.", 512, 2048, None)


def _qwen3_5_vision(out: int) -> Tensors:
    size, inner = 1152, 4304
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj": (size, 3, 2, 16, 16), "merger.norm": (size,)}
    shapes |= {"merger.linear_fc1": (4 * size, 4 * size), "merger.linear_fc2": (out, 4 * size)}
    for block in range(27):
        prefix = f"blocks.{block}."
        shapes |= {f"{prefix}attn.qkv": (3 * size, size), f"{prefix}attn.proj": (size, size)}
        shapes |= {f"{prefix}mlp.linear_fc1": (inner, size), f"{prefix}mlp.linear_fc2": (size, inner)}
        shapes |= {f"{prefix}norm1": (size,), f"{prefix}norm2": (size,)}
    tensors: Tensors = {"model.visual.pos_embed.weight": ("BF16", (2304, size))}
    for name, shape in shapes.items():
        tensors[f"model.visual.{name}.weight"] = ("BF16", shape)
        tensors[f"model.visual.{name}.bias"] = ("BF16", shape[:1])
    return tensors


QWEN3_30B_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
HUB_MODELS: dict[str, HubModel] = {
    "Qwen3-30B-A3B": HubModel(
        config=QWEN3_30B_CONFIG, tensors=qwen3_30b, num_layers=48, few_layers=1, num_tensors=18_867
    ),
    "Qwen3-30B-A3B-FP8": HubModel(
        config={**QWEN3_30B_CONFIG, "quantization_config": FP8},
        tensors=lambda num_layers: qwen3_30b(num_layers, "BF16"),
        num_layers=48,
        few_layers=1,
        num_tensors=37_491,
    ),
    "DeepSeek-V3": HubModel(
        config={"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "quantization_config": FP8},
        tensors=deepseek_v3,
        num_layers=61,
        few_layers=4,
        num_tensors=91_991,
        num_ignored=1_564,
        ignored=lambda num_layers: (f"model.layers.{num_layers}.",),
    ),
    "gpt-oss-20b": HubModel(
        config={"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}},
        tensors=gpt_oss_20b,
        num_layers=24,
        few_layers=2,
        num_tensors=459,
    ),
    "Qwen3.5-35B-A3B": HubModel(
        config={
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text"},
            "vision_config": {"out_hidden_size": 2048},
        },
        tensors=qwen3_5_35b,
        num_layers=40,
        few_layers=4,
        num_tensors=1_811,
        num_ignored=1_118,
        ignored=lambda _: ("mtp.", "model.visual."),
    ),
    "GLM-4.5": HubModel(
        config={
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "first_k_dense_replace": 3,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
            "vocab_size": 151552,
        },
        tensors=glm_4_5,
        num_layers=92,
        few_layers=4,
        num_tensors=44_691,
        num_ignored=502,
        ignored=lambda num_layers: (f"model.layers.{num_layers}.",),
    ),
}
