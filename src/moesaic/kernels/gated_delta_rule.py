"""The gated delta rule, as the linear-attention layers of Qwen3.5 and Qwen3-Next call it: in chunks, or token by token.

The reference is transformers' own PyTorch function. flash-linear-attention's kernels take the same arguments.
Legend: B rows, T tokens, N key heads, M value heads (a multiple of N), K and V sizes of a head.
query, key [B, T, N, K]; value [B, T, M, V]; g (log of the decay), beta [B, T, M]; returns [B, T, M, V] and the state.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from moesaic.kernels.base import REFERENCE, Function, Implementation, Operator, Package

FLA_NAME = "flash-linear-attention"
FLA = Package(
    module="fla",
    distribution="fla-core",
    min_version="0.6",  # honours chunk_size; older ones swallow it without a word
    install="flash-linear-attention>=0.6",
)
# Those that fla's own check of the platform knows.
FLA_DEVICE_TYPES = frozenset({"cuda", "npu", "xpu"})
CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"


def refuse_packed(function: Function) -> Function:
    """``function``, which knows one sequence per row, refusing the boundaries of packed ones, not ignoring them."""

    @functools.wraps(function)
    def call(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        if cu_seqlens is not None:
            raise ValueError(
                f"cu_seqlens: the reference of {function.__name__} would carry the state of one packed sequence into "
                f"the next. Run the sequences apart, or with kernel_config.name: {FLA_NAME}."
            )
        return function(*args, **kwargs)

    return call


def _build_chunk_reference(reference: Function, chunk_size: int) -> Function:
    return functools.partial(refuse_packed(reference), chunk_size=chunk_size)


def _build_recurrent_reference(reference: Function, chunk_size: int) -> Function:
    return refuse_packed(reference)


def _build_fla(name: str, reference: Function, chunk_size: int) -> Function:
    """``chunk_size`` goes through fla's ``**kwargs``; what else transformers hands on is for attention and left out."""
    kernel = getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)
    known = inspect.signature(kernel).parameters
    fixed = {"chunk_size": chunk_size} if name == CHUNK else {}

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **{key: value for key, value in kwargs.items() if key in known}, **fixed)

    return call


def _describe_fla(name: str) -> Implementation:
    return Implementation(
        name=FLA_NAME,
        build=functools.partial(_build_fla, name),
        device_types=FLA_DEVICE_TYPES,
        package=FLA,
    )


OPERATORS = (
    Operator(
        name=CHUNK,
        global_name="torch_chunk_gated_delta_rule",
        reference=Implementation(name=REFERENCE, build=_build_chunk_reference),
        implementations=(_describe_fla(CHUNK),),
    ),
    Operator(
        name=RECURRENT,
        global_name="torch_recurrent_gated_delta_rule",
        reference=Implementation(name=REFERENCE, build=_build_recurrent_reference),
        implementations=(_describe_fla(RECURRENT),),
    ),
)
