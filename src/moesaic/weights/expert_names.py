"""Routed experts under other names than the files have: one by one, or stacked as the model holds them.

Example (qwen3_moe), for the parameter ``model.layers.0.mlp.experts.down_proj``:

    per_expert   model.layers.0.mlp.experts.0.down_proj.weight, model.layers.0.mlp.experts.1.down_proj.weight, ...
    stacked      model.layers.0.mlp.experts.down_proj
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from transformers import PreTrainedModel

from moesaic.model.seam import find_experts
from moesaic.weights.agree import plain_name
from moesaic.weights.conversions import derive_default_grids, derive_grids
from moesaic.weights.tiles import Grid, Shape, Tile

ExpertNames = Literal["per_expert", "stacked"]


def name_experts(
    model: PreTrainedModel, grids: Mapping[str, Grid], shapes: Mapping[str, Shape], experts: ExpertNames
) -> tuple[dict[str, Grid], dict[str, Shape]]:
    """``find_layout``'s ``grids`` and ``shapes`` with the routed experts' tensors named as ``experts`` says. Those that
    are so already keep their names. Pure.

    Raises:
        ValueError: the family has no such names, or they wouldn't lead back to the model's parameters.
    """
    stacks = [
        f"{plain_name(path)}.{name}"
        for path, module in find_experts(model).items()
        for name, _ in module.named_parameters(recurse=False)
    ]
    wanted = {name: grids[name] for name in stacks if _is_per_expert(grids[name]) != (experts == "per_expert")}
    if not wanted:
        return dict(grids), dict(shapes)
    renamed = _stack(wanted) if experts == "stacked" else _unstack(model, wanted)
    new_shapes = _key_shapes(renamed)
    derivation = derive_grids(model, new_shapes)
    for name, grid in renamed.items():
        found = derivation.grids.get(name)
        if found is None or set(found.tiles) != set(grid.tiles):
            raise ValueError(
                f"experts={experts!r}: {model.config.model_type} has no names for it that lead back to {name}, by "
                "transformers' mapping of the family. Leave experts out, for the names that its files have."
            )
    new_grids = {**grids, **renamed}
    keys = {tile.key for grid in new_grids.values() for tile in grid.tiles}
    return new_grids, {key: shape for key, shape in {**shapes, **new_shapes}.items() if key in keys}


def _is_per_expert(grid: Grid) -> bool:
    """Made by stacking tensors along its first dim."""
    return all(tile.dims[0] is None for tile in grid.tiles)


def _stack(grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """Each parameter as one tensor, named by what its experts' names begin with and its own last name."""
    return {
        name: Grid.whole(f"{_before_number(grid.tiles[0].key)}.{name.rpartition('.')[2]}", grid.shape)
        for name, grid in grids.items()
    }


def _unstack(model: PreTrainedModel, grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """As transformers would write each expert, behind the prefix that the stacked tensor has in the files."""
    apart, _ = derive_default_grids(model, grids, is_per_expert=True)
    result = {}
    for name, grid in grids.items():
        if not _is_per_expert(apart[name]):
            raise ValueError(
                f"experts='per_expert': transformers has no names for single experts of "
                f"{model.config.model_type}, e.g. of {name}. Use experts='stacked', or leave it out."
            )
        prefix = grid.tiles[0].key.rpartition(".")[0]
        tiles = tuple(
            Tile(prefix + tile.key.removeprefix(_before_number(tile.key)), tile.offset, tile.dims, tile.ranges)
            for tile in apart[name].tiles
        )
        result[name] = Grid(grid.shape, tiles)
    return result


def _before_number(key: str) -> str:
    """``a.0.experts`` of ``a.0.experts.3.up_proj.weight``: the last number that stands alone is the expert's."""
    parts = key.split(".")
    places = [place for place, part in enumerate(parts) if part.isdigit()]
    assert places, f"{key} names no expert"
    return ".".join(parts[: places[-1]])


def _key_shapes(grids: Mapping[str, Grid]) -> dict[str, Shape]:
    """Of the files' tensors, each as large as its furthest tile reaches."""
    shapes: dict[str, Shape] = {}
    for grid in grids.values():
        for tile in grid.tiles:
            reach = tuple(part[-1] + 1 for part in tile.source)
            shapes[tile.key] = tuple(map(max, shapes.get(tile.key, reach), reach))
    return shapes
