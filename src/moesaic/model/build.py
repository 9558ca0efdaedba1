"""Build a Hugging Face model on meta, as ``from_pretrained`` would configure it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation


def build_on_meta(
    path: str | Path | PreTrainedConfig, *, attn_implementation: str | None, dtype: torch.dtype
) -> PreTrainedModel:
    """The causal language model of a folder's ``config.json``, on meta, in training mode.

    Where the family has its language model only within one of images and text, that one: given text alone, it is a
    causal language model too (its towers get no gradient). Attention, experts and generation settings are those that
    ``from_pretrained`` of that auto class would pick; so is the dtype of what the family keeps in fp32. ``use_cache``
    is left as configured.

    Args:
        path: a model folder, or a config (copied; its generation settings are then derived from it alone).
        attn_implementation: ``None`` for the library's choice, else ``eager``, ``sdpa``, ...
        dtype: of the parameters.

    Raises:
        ValueError: the folder has no ``config.json``, transformers has no language model for it, or the attention isn't
            available.
    """
    config = copy.deepcopy(path) if isinstance(path, PreTrainedConfig) else find_config(path)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        model = find_auto_class(config).from_config(config, dtype=dtype, **chosen)
    _keep_in_fp32(model, dtype)
    if not isinstance(path, PreTrainedConfig) and model.can_generate():
        _load_generation_config(model, str(path))
    return model


def find_config(folder: str | Path) -> PreTrainedConfig:
    """The config of a model folder.

    Raises:
        ValueError: it has no ``config.json``.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"model={str(folder)!r} has no config.json; a model is a local folder. Download it there first."
        )
    return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def find_fp32_names(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What the family keeps in fp32 where the rest of ``model`` is in ``dtype``: search it in a tensor's name."""
    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0] if plan else None


def find_auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]:
    """The auto class that has the family's language model.

    Raises:
        ValueError: transformers has none.
    """
    for auto_class in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in auto_class._model_mapping:
            return auto_class
    raise ValueError(
        f"model_type={config.model_type!r}: transformers has no causal language model for {type(config).__name__}, nor "
        "one of several modalities. Use a model of another family."
    )


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    pattern = find_fp32_names(model, dtype)
    if pattern is None:
        return
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if pattern.search(f"{module_name}.{name}"):
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if pattern.search(f"{module_name}.{name}") and name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.float())


def _load_generation_config(model: PreTrainedModel, folder: str) -> None:
    """What ``from_pretrained`` does: ``generation_config.json``, or what an old ``config.json`` says of generation."""
    model.adjust_generation_fn(
        None,
        True,
        False,
        folder,
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision=None,
        subfolder="",
        trust_remote_code=False,
    )
