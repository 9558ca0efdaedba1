"""The table of FSDP units."""

from __future__ import annotations

import torch

from moesaic.parallel.units import UnitParam, units_table


def test_the_table_names_each_unit_once() -> None:
    def row(unit: str, name: str, shape: tuple[int, ...]) -> UnitParam:
        return UnitParam(
            unit=unit,
            name=name,
            shape=shape,
            local_shape=(shape[0] // 2, *shape[1:]),
            axes="mp_shard=2",
            placements="Shard(dim=0)",
            dtypes=(torch.float32, torch.bfloat16, torch.float32),
            device="cpu",
        )

    table = units_table(
        [row("", "embed.weight", (96, 64)), row("layers.0", "a", (8, 6, 4)), row("layers.0", "b", (8,))]
    )
    assert table.splitlines() == [
        "parameter       shape  this rank's  mesh        placements    dtypes                    on",
        "[root]",
        "  embed.weight  96x64  48x64        mp_shard=2  Shard(dim=0)  float32 bfloat16 float32  cpu",
        "[layers.0]",
        "  a             8x6x4  4x6x4        mp_shard=2  Shard(dim=0)  float32 bfloat16 float32  cpu",
        "  b             8      4            mp_shard=2  Shard(dim=0)  float32 bfloat16 float32  cpu",
    ]
