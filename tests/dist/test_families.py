"""What families need beyond arithmetic: one dtype in a unit, refusals by name, models without experts."""

from __future__ import annotations

import pytest
import torch

from moesaic.meshes import build_meshes
from moesaic.model.build import build_on_meta, find_auto_class
from moesaic.parallel.apply import ParallelOptions, parallelize
from moesaic.specs import refusal
from moesaic.train.step import train_step
from tests.families.configs import tiny_config
from tests.oracle.cells import Cell, build_batch, share_documents
from tests.oracle.reference import Case, build_documents
from tests.pool import RunRanks

BF16 = ParallelOptions(storage_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)


def step_in_bf16(rank: int, model_type: str) -> tuple[set[torch.dtype], set[torch.dtype], bool]:
    """Dtypes of parameters and of floating buffers, and whether a step moved the weights."""
    meshes = build_meshes("cpu", ep_size=2)
    config = tiny_config(model_type)
    model = find_auto_class(config).from_config(config, dtype=torch.bfloat16).train()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16, torch.float32}, "the family has both"
    parallelize(model, meshes, options=BF16)
    case = Case(family=model_type, is_listed=True, num_documents=2)
    (documents,) = share_documents(build_documents(case), Cell(world_size=2), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train_step(model, [build_batch(documents, "padded")], optimizer, None, meshes, max_grad_norm=1.0)
    floating = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}
    return {param.dtype for param in model.parameters()}, floating, result.is_finite and result.grad_norm > 0


@pytest.mark.parametrize("model_type", ["hunyuan_v1_moe", "ernie4_5_moe"])
def test_parameters_that_a_family_keeps_in_fp32(model_type: str, run_ranks: RunRanks) -> None:
    for params, buffers, has_moved in run_ranks(step_in_bf16, 2, model_type):
        assert params == {torch.bfloat16} and torch.float32 in buffers and has_moved


def refusals(rank: int) -> list[str]:
    """What parallelize says to models that path B can't take."""
    meshes = build_meshes("cpu", ep_size=1)
    configs = [tiny_config(model_type) for model_type in ("gemma4_text", "granitemoehybrid", "qwen3_moe")]
    configs[0].enable_moe_block = False
    configs[1].num_local_experts = 0
    said = []
    for config in configs:
        model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
        if config.model_type == "qwen3_moe":
            model.config.model_type = "openai_privacy_filter"
        try:
            parallelize(model, meshes)
        except ValueError as error:
            said.append(str(error))
    return said


def test_models_without_experts_and_refused_families(run_ranks: RunRanks) -> None:
    (said,) = run_ranks(refusals, 1)
    assert len(said) == 3
    for message, name in zip(said[:2], ("Gemma4", "GraniteMoeHybrid"), strict=True):
        assert message.startswith(name) and "nothing to split over ep" in message and "FSDP2 alone" in message
    assert "model_type='openai_privacy_filter'" in said[2] and str(refusal("openai_privacy_filter")) in said[2]
