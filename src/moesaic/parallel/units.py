"""What became of each parameter: the FSDP units of a model as a table, for people."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitParam:
    """One parameter of one unit.

    Attributes:
        unit: the unit's name; empty for the root.
        name: the parameter's name in the model.
        shape, local_shape: of the whole, and of this rank's shard.
        axes: ``axis=size`` of each axis of its mesh.
        placements: how it lies on each axis.
        dtypes: of storage, computation and reduction.
        device: where the shard is.
    """

    unit: str
    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: str
    placements: str
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: str


def list_units(model: nn.Module) -> list[UnitParam]:
    """Every parameter under the FSDP unit that gathers and reduces it, units in the model's order. Not collective."""
    names = {id(param): name for name, param in model.named_parameters()}
    rows = []
    for unit_name, unit in model.named_modules():
        if not isinstance(unit, FSDPModule):
            continue
        # Which unit owns a parameter doesn't follow from where it is: a unit may own a part of what is below it.
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for param in (fsdp_param.sharded_param for fsdp_param in group.fsdp_params):
                assert isinstance(param, DTensor)
                compute = group.mp_policy.param_dtype or param.dtype
                rows.append(
                    UnitParam(
                        unit=unit_name,
                        name=names[id(param)],
                        shape=tuple(param.shape),
                        local_shape=tuple(param._local_tensor.shape),
                        axes=_axes(param),
                        placements=", ".join(map(str, param.placements)),
                        dtypes=(param.dtype, compute, group.mp_policy.reduce_dtype or compute),
                        device=param._local_tensor.device.type,
                    )
                )
    return rows


def units_table(rows: list[UnitParam]) -> str:
    """One line per parameter under its unit's name, in columns."""
    lines: list[tuple[str, ...]] = [("parameter", "shape", "this rank's", "mesh", "placements", "dtypes", "on")]
    unit = None
    for row in rows:
        if row.unit != unit:
            unit = row.unit
            lines.append((f"[{unit or 'root'}]", *[""] * 6))
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
        lines.append(
            (f"  {row.name}", _by(row.shape), _by(row.local_shape), row.axes, row.placements, dtypes, row.device)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _axes(param: DTensor) -> str:
    mesh = param.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return " ".join(f"{name}={size}" for name, size in axes)


def _by(shape: tuple[int, ...]) -> str:
    """``8x64x64``."""
    return "x".join(map(str, shape))
