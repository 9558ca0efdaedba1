"""What vLLM's reload does with tensors that it treats apart: on a model without an engine around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.engines import vllm_live
from moesaic.engines.vllm_layout import EngineRank, engine_rank, trace_model
from tests.engines.checkpoints import pairs, read_files, replay, save_checkpoint, sources_of


@pytest.mark.parametrize(
    ("model_type", "apart"), [("glm4_moe", "gate.e_score_correction_bias"), ("gemma4_text", "layer_scalar")]
)
@pytest.mark.parametrize("order", [1, -1])
def test_tensors_that_vllm_treats_apart_are_updated(
    model_type: str, apart: str, order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last of their layer: not dropped, and no end of it. Other tensors are packed for the CPU's kernels."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    monkeypatch.setattr(vllm_live, "repack_for_cpu", lambda model: None)
    save_checkpoint(tmp_path, model_type)
    files = read_files(tmp_path)
    sources = sources_of(files)
    with engine_rank(tmp_path, EngineRank()) as model:
        layout = trace_model(model, sources)
    new = replay(layout, {key: tensor + 1 for key, tensor in files.items()})
    names = [name for name in new if name.endswith(apart)]
    assert names
    with engine_rank(tmp_path, EngineRank()) as model:
        config = get_current_vllm_config()
        record_metadata_for_reloading(model)
        model.load_weights(pairs(files))  # type: ignore[operator]
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        live = vllm_live.LiveModel(model, config, sources)
        live.begin()
        sink = live.sink(layout)
        for name in list(new)[::order]:
            sink.open(name).copy_(new[name])
            sink.close(name)
        live.finish()
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        for name in [*names, *(name for name in new if "norm" in name)]:
            assert torch.equal(state[name], new[name]), name
