"""Tensors that files hold in a few bits with scales beside, and their values, slice by slice.

fp8 by blocks (DeepSeek-V3, Qwen3-FP8): ``<key>`` [.., N, K] in F8_E4M3 and ``<key>_scale_inv`` [.., ceil(N/128),
ceil(K/128)]; value = fp32(weight) * fp32(scale of its block). Edge blocks are cut, not stretched: row r belongs to
block r // 128 always.

MXFP4 (gpt-oss): ``<name>_blocks`` [E, out, in/32, 16] and ``<name>_scales`` [E, out, in/32], bytes. Byte j of a group
holds inputs 2j (low half) and 2j + 1 (high half) as codes of ``FP4``; value = code * 2 ** (scale - 127). The parameter
is [E, in, out].

A slice needs its own values and the scales of the blocks it touches, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.weights.files import FileTensor

FP8, SCALE_SUFFIX = "F8_E4M3", "_scale_inv"
SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
DEFAULT_BLOCK = (128, 128)
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
GROUP = 32  # values per MXFP4 scale
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127

# Takes a slice of a file's tensor: (tensor, one range per dim) -> values.
Take = Callable[[FileTensor, tuple[range, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor as a model sees it, whatever the files hold in its place.

    Attributes:
        key: its name once it is plain.
        shape: of its values.
        values: the files' tensor; packed for MXFP4.
        scales: the companion of a quantised one.
        block: (rows, cols) that share an fp8 scale; None for MXFP4 and plain tensors.
    """

    key: str
    shape: tuple[int, ...]
    values: FileTensor
    scales: FileTensor | None = None
    block: tuple[int, int] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Its tensors in the files."""
        return (self.values.key,) if self.scales is None else (self.values.key, self.scales.key)

    def read(self, source: tuple[range, ...], take: Take) -> torch.Tensor:
        """The values at ``source``, one range per dim; fp32 where they were quantised, else in the files' dtype."""
        if self.scales is None:
            return take(self.values, source)
        if self.block is not None:
            return _read_fp8(self.values, self.scales, self.block, source, take)
        return _read_mxfp4(self.values, self.scales, source, take)


def find_stored(headers: Mapping[str, FileTensor], config: Mapping[str, Any]) -> tuple[dict[str, Stored], list[str]]:
    """Key -> tensor as the model sees it, and what doesn't belong together. The files decide, not ``config``: a weight
    is quantised where its scales are there; from ``config.json`` comes the block size of fp8."""
    quantization = config.get("quantization_config") or {}
    rows, cols = quantization.get("weight_block_size") or DEFAULT_BLOCK
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    companions: set[str] = set()
    for key, values in headers.items():
        if values.dtype == FP8 and (scales := headers.get(key + SCALE_SUFFIX)) is not None:
            stored[key] = Stored(key=key, shape=values.shape, values=values, scales=scales, block=(rows, cols))
        elif key.endswith(BLOCKS_SUFFIX) and (scales := headers.get(_scales_key(key))) is not None:
            name = key.removesuffix(BLOCKS_SUFFIX)
            stored[name] = Stored(key=name, shape=_unpacked_shape(values.shape), values=values, scales=scales)
        else:
            stored.setdefault(key, Stored(key=key, shape=values.shape, values=values))
            continue
        companions.add(scales.key)
        problems += _scale_problems(stored[key.removesuffix(BLOCKS_SUFFIX)])
    for key in companions:
        del stored[key]
    problems += [
        f"scales: {key} has no {FP8} weight beside it" for key in stored if key.endswith(f"weight{SCALE_SUFFIX}")
    ]
    return stored, problems


def explain_unreadable(stored: Stored) -> str:
    """Why a tensor of a dtype that can't be cast may be so, as the end of a message."""
    if stored.values.dtype == FP8:
        return f" and has no {stored.key}{SCALE_SUFFIX}: fp8 weights are read with their scales only"
    return ""


def _read_fp8(
    values: FileTensor, scales: FileTensor, block: tuple[int, int], source: tuple[range, ...], take: Take
) -> torch.Tensor:
    *outer, rows, cols = source
    blocks = [_hull(indices, size) for indices, size in zip((rows, cols), block, strict=True)]
    scale = take(scales, (*outer, *blocks)).float()
    for dim, indices, held, size in zip((-2, -1), (rows, cols), blocks, block, strict=True):
        position = torch.tensor([index // size - held.start for index in indices])
        scale = scale.index_select(dim, position)
    return take(values, source).float() * scale


def _read_mxfp4(values: FileTensor, scales: FileTensor, source: tuple[range, ...], take: Take) -> torch.Tensor:
    experts, inputs, outputs = source
    groups = _hull(inputs, GROUP)
    packed = take(values, (experts, outputs, groups, range(values.shape[-1]))).int()
    codes = torch.tensor(FP4)
    unpacked = torch.stack([codes[packed & 15], codes[packed >> 4]], dim=-1).flatten(-2)
    exponents = take(scales, (experts, outputs, groups)).int() - E8M0_BIAS
    unpacked = torch.ldexp(unpacked, exponents.unsqueeze(-1)).flatten(-2)
    start = inputs.start - groups.start * GROUP
    return unpacked[..., start : start + len(inputs) * inputs.step : inputs.step].transpose(1, 2)


def _hull(indices: range, size: int) -> range:
    """Numbers of the blocks of ``size`` that ``indices`` (not empty, ascending) touch."""
    return range(indices[0] // size, indices[-1] // size + 1)


def _scales_key(blocks_key: str) -> str:
    return blocks_key.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX


def _unpacked_shape(packed: tuple[int, ...]) -> tuple[int, ...]:
    if len(packed) != 4:
        return packed
    num_experts, num_outputs, num_groups, _ = packed
    return num_experts, num_groups * GROUP, num_outputs


def _scale_problems(stored: Stored) -> list[str]:
    """What keeps a quantised tensor from being read."""
    values, scales = stored.values, stored.scales
    assert scales is not None
    if stored.block is None:
        if values.dtype != "U8" or scales.dtype != "U8" or values.shape[-1:] != (GROUP // 2,):
            return [f"blocks: {values.key} is {values.dtype} {list(values.shape)}, needs U8 [E, out, in/32, 16]"]
        expected = values.shape[:-1]
    else:
        if scales.dtype not in SCALE_DTYPES:
            return [f"scales: {scales.key} is {scales.dtype}, needs one of {sorted(SCALE_DTYPES)}"]
        last = zip(values.shape[-2:], stored.block, strict=False)
        expected = (*values.shape[:-2], *(-(-size // step) for size, step in last))
    if scales.shape != expected:
        return [f"scales: {scales.key} is {list(scales.shape)}, {values.key} needs {list(expected)}"]
    return []
