"""Engine ``hf``, on several ranks: a model with its experts or its matrices split over them, made to generate only.

Over tp, transformers' own tensor parallelism does it, by the plan that each family has: heads, widths and the
vocabulary are split, every rank sees every token, and what the ranks computed is summed. That of training (``parallel/
tensor.py``) cuts the tokens too, and can't be used for one token at a time. Over ep, each rank has whole experts, and
tokens are exchanged as in training; everything else is whole on every rank, so that nothing is gathered for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.model.seam import DOWN, find_experts, up_name
from moesaic.ops.parking import local_tensor
from moesaic.ops.placements import local_blocks
from moesaic.parallel.apply import find_ties
from moesaic.parallel.experts import ExpertPlan, expert_parallelize_modules
from moesaic.specs import find_spec, refusal
from moesaic.weights.agree import raise_together


def build_engine_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp_mesh: DeviceMesh | None = None,
    ep_mesh: DeviceMesh | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A model of a folder's ``config.json``, with storage and no values, for an ``HfEngine`` that weights come to.

    Whole in this process, unless a mesh is given: then every rank of it must call. Over tp the model is tried out.

    Args:
        dtype: of the parameters; what the family keeps in fp32 stays so.
        tp_mesh: 1-D; its ranks share each matrix, by the family's plan in transformers. The engine is given it too.
        ep_mesh: 1-D; its ranks share the experts. The engine is given the meshes that it is a part of.
        attn_implementation: as in transformers; None: transformers' choice.

    Raises:
        ValueError: both meshes; a family or sizes that can't be split so, or a plan of transformers' that is found to
            split a part of the model in another way than the next part takes it.
    """
    if tp_mesh is not None and ep_mesh is not None:
        raise ValueError("tp_mesh and ep_mesh: the hf engine splits matrices or experts, not both. Give one of them.")
    model = build_on_meta(path, attn_implementation=attn_implementation, dtype=dtype)
    if tp_mesh is not None:
        _split_matrices(model, tp_mesh)
    if ep_mesh is not None:
        _split_experts(model, ep_mesh)
    materialize(model, device)
    model.eval()
    if tp_mesh is not None:
        _try_out(model, tp_mesh)
    return model


def _split_matrices(model: PreTrainedModel, tp_mesh: DeviceMesh) -> None:
    """Parameters become DTensors on ``tp_mesh``; module code is transformers', with hooks of its own."""
    tp_size = tp_mesh.size()
    problems = list(_size_problems(model, tp_size))
    if problems:
        raise ValueError(f"tp_size={tp_size}: {'; '.join(problems)}. Choose a tp_size that divides them, or 1.")
    plan = cast(Any, model)._expand_parallel_plan(cast(Any, model).tp_plan)
    ties = find_ties(model)
    # The second name of a tied parameter has a rule too, for a model whose ties aren't made yet; here they are.
    further = {name for group in ties for name in group[1:]}
    apply_tensor_parallelism(model, tp_mesh, {name: style for name, style in plan.items() if name not in further})
    for first, *others in ties:
        for name in others:
            module_name, _, parameter_name = name.rpartition(".")
            model.get_submodule(module_name).register_parameter(parameter_name, model.get_parameter(first))


def _size_problems(model: PreTrainedModel, tp_size: int) -> Iterator[str]:
    """What transformers would find out in the middle of a forward, or not at all."""
    if not cast(Any, model).tp_plan:
        yield f"{type(model).__name__} has no plan for it in transformers"
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = config.to_dict().get(field)
        if isinstance(heads, int) and heads % tp_size:
            yield f"{field}={heads}"


@torch.no_grad()
def _try_out(model: PreTrainedModel, tp_mesh: DeviceMesh) -> None:
    """Some plans split a part of the model only, some tear experts' gates from what they multiply; and some slices are
    too thin for a kernel. What is torn is looked for; the rest ends a forward, so there is one of one token, with zeros
    for weights. It can't show what fits and is wrong elsewhere."""

    def refuse(problem: str | None) -> None:
        error = None
        if problem is not None:
            error = ValueError(
                f"tp_size={tp_mesh.size()}: {type(model).__name__} can't be run as its plan in transformers splits it: "
                f"{problem}. Set 1 or another size, or split its experts (ep_size)."
            )
        raise_together(error, tp_mesh, "trying out the split model")

    # Before the forward: there a rank that has a problem of its own would be missed by the others.
    refuse(
        next(
            (f"{name} is split across its gates" for name, each in find_experts(model).items() if _is_torn(each)), None
        )
    )
    for parameter in model.parameters():
        local_tensor(parameter).zero_()
    problem = None
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:  # whatever transformers' code says of sizes that don't fit
        problem = f"a forward ends in {type(error).__name__}: {error}"
    refuse(problem)


def _is_torn(experts: nn.Module) -> bool:
    """Whether this rank's columns of the first stacked weight don't make its columns of what the second one takes."""
    flags = cast(Any, experts)
    up, down = experts.get_parameter(up_name(experts)), experts.get_parameter(DOWN)
    if not isinstance(up, DTensor) or not isinstance(down, DTensor):
        return isinstance(up, DTensor) != isinstance(down, DTensor)
    rows, columns = (2, 1) if flags.is_transposed else (1, 2)
    row = torch.linspace(-1, 1, up.size(rows), device=up.device)[None]
    activate = flags._apply_gate if flags.has_gate else flags.act_fn
    try:
        own, whole = activate(row[:, _held(up, rows)]), activate(row)[:, _held(down, columns)]
    except RuntimeError:  # e.g. an odd number of gates and ups
        return True
    return own.shape != whole.shape or not torch.allclose(own, whole)


def _held(parameter: DTensor, dim: int) -> list[int]:
    """What this rank holds along ``dim``, in its order."""
    blocks = local_blocks(parameter.shape, parameter.device_mesh, parameter.placements)
    runs = {block.local_offset[dim]: range(*block.global_slices[dim].indices(parameter.size(dim))) for block in blocks}
    return [place for _, run in sorted(runs.items()) for place in run]


def _split_experts(model: PreTrainedModel, ep_mesh: DeviceMesh) -> None:
    reason = refusal(model.config.model_type)
    if reason is not None:
        raise ValueError(
            f"model_type={model.config.model_type!r}: its experts can't be split over ep: {reason}. Leave ep_size out."
        )
    expert_parallelize_modules(
        cast(nn.Module, model), ep_mesh, ExpertPlan.from_spec(find_spec(model.config.model_type))
    )
