"""Every tensor of every layer of models as they lie on the Hub: up to 92,000 keys, from headers alone. Not collected by
default: ``pytest tests/families/hub_models.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hub_folders import HUB_MODELS
from tests.unit.test_weights_hub import match_hub_model


@pytest.mark.parametrize("name", HUB_MODELS)
def test_all_layers(name: str, tmp_path: Path) -> None:
    hub = HUB_MODELS[name]
    assert len(hub.tensors(hub.num_layers)) == hub.num_tensors
    assert match_hub_model(name, hub.num_layers, tmp_path) == hub.num_ignored
