"""A tiny config of every family of transformers whose experts are at its experts seam.

Two layers, hidden size 64, 8 experts of width 24 (so that no stacked weight is square, and one that is read transposed
doesn't fit), 2 of them for each token. A family that mixes dense and MoE layers has one of each, and one that mixes
kinds of attention has two of them. Tokens below ``FIRST_TOKEN`` are special.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

FIRST_TOKEN = 7
VOCAB_SIZE = 128
NUM_EXPERTS = 8

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
}
INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1}
WIDTHS: dict[str, Any] = {"intermediate_size": 96, "moe_intermediate_size": 24}
DENSE_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}
SLIDING_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
LINEAR_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
GATED_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
NEMOTRON_H: dict[str, Any] = {
    **GQA,
    **ROUTED_EXPERTS,
    **WIDTHS,
    **GROUPS,
    "moe_shared_expert_intermediate_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "moe_latent_size": 32,
}
INKLING: dict[str, Any] = {
    **GQA,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "sliding_window_size": 8,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    **ROUTED_EXPERTS,
    "unpadded_vocab_size": VOCAB_SIZE,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 2, "patch_size": 4}
QWEN_VISION: dict[str, Any] = {**VISION, "out_hidden_size": 64, "num_position_embeddings": 16}


def _mrope(*sections: int) -> dict[str, Any]:
    """Rotary positions along three axes; ``sections`` add up to half of the rotary width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


QWEN_TEXT: dict[str, Any] = {**BASE, **GQA, **EXPERTS, **WIDTHS, **_mrope(4, 2, 2)}
SAM: dict[str, Any] = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "downsample_channels": [32, 64],
    "mlp_dim": 64,
    "global_attn_indexes": [0],
}

# Text models, on top of BASE.
TEXT: dict[str, dict[str, Any]] = {
    "mixtral": {**GQA, **LOCAL_EXPERTS, "intermediate_size": 24},
    "minimax_m2": {**GQA, **LOCAL_EXPERTS, "intermediate_size": 24},
    # Without noise its router chooses by the maximum, in training too; with it, it draws.
    "phimoe": {"router_jitter_noise": 0.0, "num_key_value_heads": 2, **LOCAL_EXPERTS, "intermediate_size": 24},
    "gpt_oss": {**GQA, **LOCAL_EXPERTS, **SLIDING_FULL, **ROPE, "intermediate_size": 24},
    "olmoe": {"num_key_value_heads": 2, **EXPERTS, "intermediate_size": 24},
    "flex_olmo": {"num_key_value_heads": 2, **EXPERTS, "intermediate_size": 24},
    "qwen2_moe": {"num_key_value_heads": 2, **EXPERTS, **WIDTHS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**GQA, **EXPERTS, **WIDTHS},
    "mellum": {**GQA, **EXPERTS, **WIDTHS, **SLIDING_FULL, **DENSE_SPARSE},
    "cohere2_moe": {**GQA, **EXPERTS, "intermediate_size": 24, **SLIDING_FULL, **DENSE_SPARSE, "num_shared_experts": 1},
    "hunyuan_v1_moe": {**GQA, "num_experts": NUM_EXPERTS, "moe_topk": 2, "intermediate_size": 24},
    "ernie4_5_moe": {"num_key_value_heads": 2, "moe_num_experts": NUM_EXPERTS, "moe_k": 2, **WIDTHS},
    "hy_v3": {**GQA, **EXPERTS, **WIDTHS},
    "flint": {
        **GQA,
        **EXPERTS,
        **WIDTHS,
        **SLIDING_FULL,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 32,
    },
    "kolibri1": {**GQA, **EXPERTS, **SLIDING_FULL, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    "laguna": {**GQA, **EXPERTS, **WIDTHS, **SLIDING_FULL, "shared_expert_intermediate_size": 32},
    "afmoe": {**GQA, **EXPERTS, **WIDTHS, "num_dense_layers": 1, "global_attn_every_n_layers": 2, "sliding_window": 8},
    "beam": {**GQA, **EXPERTS, **WIDTHS, **SLIDING_FULL, **DENSE_SPARSE, **GROUPS},
    "exaone_moe": {"num_key_value_heads": 2, **EXPERTS, **WIDTHS, **SLIDING_FULL},
    "zaya": {
        **GQA,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 24,
        "router_hidden_size": 16,
    },
    "granitemoe": {"num_key_value_heads": 2, **LOCAL_EXPERTS, "intermediate_size": 24},
    "granitemoe_swa": {"num_key_value_heads": 2, **LOCAL_EXPERTS, "intermediate_size": 24, "sliding_window": 8},
    "granitemoeshared": {
        "num_key_value_heads": 2,
        **LOCAL_EXPERTS,
        "intermediate_size": 24,
        "shared_intermediate_size": 32,
    },
    "dots1": {
        "num_key_value_heads": 2,
        **ROUTED_EXPERTS,
        **WIDTHS,
        **GROUPS,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "glm4_moe": {"num_key_value_heads": 2, **ROUTED_EXPERTS, **WIDTHS, **GROUPS},
    "solar_open": {**GQA, **ROUTED_EXPERTS, "moe_intermediate_size": 24},
    "mimo_v2_flash": {**GQA, **ROUTED_EXPERTS, **WIDTHS, "v_head_dim": 16, "sliding_window": 9},
    "aria_text": {"num_key_value_heads": 2, "moe_num_experts": NUM_EXPERTS, "moe_topk": 2, "intermediate_size": 24},
    "minimax_m3_vl_text": {
        **GQA,
        **LOCAL_EXPERTS,
        "intermediate_size": 24,
        "dense_intermediate_size": 96,
        **DENSE_SPARSE,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "gemma4_text": {
        **GQA,
        **WIDTHS,
        **SLIDING_FULL,
        "enable_moe_block": True,
        "num_experts": NUM_EXPERTS,
        "top_k_experts": 2,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "deepseek_v2": {**MLA, **ROUTED_EXPERTS, **WIDTHS, "first_k_dense_replace": 1},
    "deepseek_v3": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **GROUPS, "first_k_dense_replace": 1},
    "deepseek_v32": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **GROUPS, **INDEXER, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **GROUPS, **DENSE_SPARSE},
    "glm_moe_dsa": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **GROUPS, **INDEXER, "first_k_dense_replace": 1},
    "mistral4": {
        **MLA,
        **ROUTED_EXPERTS,
        **WIDTHS,
        **GROUPS,
        "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
    },
    "axk1": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **GROUPS},
    "axk2": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **INDEXER, **DENSE_SPARSE, "gated_norm_rank": 4},
    "dots3_note_text": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **INDEXER, "shared_experts_intermediate_size": 32},
    "hy_v4": {**MLA, **ROUTED_EXPERTS, **WIDTHS, **INDEXER, "hc_mult": 2},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        **ROUTED_EXPERTS,
        "moe_intermediate_size": 24,
        **INDEXER,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "qwen3_next": {**GQA, **EXPERTS, **WIDTHS, **LINEAR_FULL, **GATED_DELTA},
    "qwen3_5_moe_text": {**GQA, **EXPERTS, "moe_intermediate_size": 24, **LINEAR_FULL, **GATED_DELTA},
    "qwen4_exp_text": {
        **GQA,
        **EXPERTS,
        "moe_intermediate_size": 24,
        **GATED_DELTA,
        "hc_count": 2,
        "hc_lowrank": 8,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "minimax": {**GQA, **LOCAL_EXPERTS, **LINEAR_FULL, "intermediate_size": 24, "block_size": 8},
    "lfm2_moe": {
        "num_key_value_heads": 2,
        **EXPERTS,
        **WIDTHS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "jamba": {
        "num_key_value_heads": 2,
        **EXPERTS,
        "intermediate_size": 24,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "granitemoehybrid": {
        "num_key_value_heads": 2,
        **LOCAL_EXPERTS,
        **LINEAR_FULL,
        "intermediate_size": 24,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "nemotron_h": NEMOTRON_H,
    "kimi_linear": {
        **MLA,
        "q_lora_rank": None,
        **LOCAL_EXPERTS,
        **WIDTHS,
        **GROUPS,
        **LINEAR_FULL,
        **DENSE_SPARSE,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **MLA,
        **LOCAL_EXPERTS,
        **WIDTHS,
        **GROUPS,
        **LINEAR_FULL,
        "first_k_dense_replace": 1,
        "head_dim": 16,
    },
    "inkling_text": {**INKLING, **WIDTHS, **DENSE_SPARSE, "n_shared_experts": 1},
    "inkling2_text": {**INKLING, "moe_intermediate_size": 24, "n_layers_per_attn_res_block": 1},
    "openai_privacy_filter": {**GQA, **LOCAL_EXPERTS, **ROPE, "intermediate_size": 24, "sliding_window": 8},
}

# The language model is a part of one of several modalities, which alone has a head.
COMPOSITE: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        "image_token_id": 3,
        "video_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        },
        "audio_token_id": 3,
        "image_token_id": 4,
        "video_token_id": 5,
    },
    "glm4v_moe": {
        "text_config": {**BASE, "num_key_value_heads": 2, **ROUTED_EXPERTS, **WIDTHS, **GROUPS, **_mrope(2, 1, 1)},
        "vision_config": {**VISION, "out_hidden_size": 64, "image_size": 16},
        "image_token_id": 3,
        "video_token_id": 4,
    },
    "glm5_next": {
        "text_config": {
            **BASE,
            **MLA,
            "qk_rope_head_dim": 0,
            **ROUTED_EXPERTS,
            **WIDTHS,
            **GROUPS,
            **INDEXER,
            **DENSE_SPARSE,
            "layer_types": ["linear_attention", "indexed_attention"],
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
        },
        "vision_config": {**VISION, "out_hidden_size": 64, "image_size": 16, "projection_intermediate_size": 64},
        "image_token_id": 3,
        "video_token_id": 4,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **BASE,
            "num_key_value_heads": 2,
            "moe_num_experts": NUM_EXPERTS,
            "moe_k": 2,
            "intermediate_size": 96,
            "moe_intermediate_size": [24, 16],
            **DENSE_SPARSE,
            **_mrope(3, 3, 2),
        },
        "vision_config": VISION,
        "image_token_id": 3,
        "video_token_id": 4,
    },
    "mistral_large4": {
        "text_config": {
            **BASE,
            **{k: v for k, v in MLA.items() if k != "q_lora_rank"},
            **ROUTED_EXPERTS,
            **WIDTHS,
            **GROUPS,
            **INDEXER,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "attention_factor": 1.0},
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "image_token_index": 3,
    },
    "muse_spark": {
        "text_config": {
            **BASE,
            **GQA,
            **LOCAL_EXPERTS,
            **WIDTHS,
            **DENSE_SPARSE,
            "moe_hidden_size": 32,
            "sliding_window": 8,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "audio_config": {
            "patch_sizes": [4, 2],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 64,
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 64,
        "image_token_id": 3,
        "video_token_id": 4,
        "audio_token_id": 5,
    },
    "deepseek_ocr2": {
        "text_config": {**BASE, **ROUTED_EXPERTS, **WIDTHS, **DENSE_SPARSE},
        "vision_config": {"sam_config": SAM, "encoder_config": {**BASE, "intermediate_size": 64}},
        "image_token_id": 3,
    },
    "unlimited_ocr": {
        "text_config": {
            **BASE,
            "num_key_value_heads": 4,
            **ROUTED_EXPERTS,
            **WIDTHS,
            **DENSE_SPARSE,
            "sliding_window": 8,
        },
        "vision_config": {
            "sam_config": SAM,
            "encoder_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        },
        "image_token_id": 3,
    },
    "diffusion_gemma": {
        "text_config": {
            **BASE,
            **GQA,
            **WIDTHS,
            **SLIDING_FULL,
            "num_experts": NUM_EXPERTS,
            "top_k_experts": 2,
            "global_head_dim": 16,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
        },
        "canvas_length": 8,
        "image_token_id": 3,
    },
}


MODEL_TYPES = (*TEXT, *COMPOSITE)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A new config each time: families write into what they are given."""
    fields = {**BASE, **TEXT[model_type]} if model_type in TEXT else COMPOSITE[model_type]
    return AutoConfig.for_model(model_type, **copy.deepcopy(fields))
