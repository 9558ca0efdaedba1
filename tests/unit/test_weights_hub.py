"""Every tensor of models as they lie on the Hub has its place: from headers alone, at real sizes, with few layers. All
layers: tests/families/hub_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.model.build import build_on_meta
from moesaic.weights.agree import state_tensors
from moesaic.weights.export import find_layout
from moesaic.weights.source import match_folder, remember_source
from tests.unit.hub_folders import HUB_MODELS, write_folder
from tests.unit.tiny_checkpoints import counted_reads


def match_hub_model(name: str, num_layers: int, folder: Path) -> int:
    """Match the model's files; how many of their tensors fill nothing."""
    hub = HUB_MODELS[name]
    write_folder(folder, hub, num_layers)
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.bfloat16)
    with counted_reads() as counter:
        source = match_folder(model, folder)  # raises where anything is missing, unknown or of another shape
    assert counter["num_bytes"] == 0
    tensors = hub.tensors(num_layers)
    state = state_tensors(model)
    assert source.grids.keys() == state.keys()
    used = {key for grid in source.grids.values() for tile in grid.tiles for key in source.stored[tile.key].keys}
    assert used | set(source.ignored_keys) == tensors.keys()
    assert not used & set(source.ignored_keys)
    assert all(key.startswith(hub.ignored(num_layers)) for key in source.ignored_keys) and not source.doubled
    assert not any(key.startswith(hub.ignored(num_layers)) for key in used if hub.ignored(num_layers))
    remember_source(model, source)
    _, shapes = find_layout(model, state)
    exported = {key for key in shapes}
    plain = {key.removesuffix("_blocks") for key in used if not key.endswith(("_scale_inv", "_scales"))}
    assert exported == plain  # as it came, unpacked
    return len(source.ignored_keys)


@pytest.mark.parametrize("name", HUB_MODELS)
def test_every_tensor_of_a_model_on_the_hub_has_its_place(name: str, tmp_path: Path) -> None:
    match_hub_model(name, HUB_MODELS[name].few_layers, tmp_path)
