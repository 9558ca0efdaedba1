"""mixtral: the Hub says ``block_sparse_moe``, ``w1``/``w3``/``w2`` where the module says ``mlp``, gate/up/down."""

from moesaic.specs.base import ExpertParam, ModelSpec

SPEC = ModelSpec(
    model_types=("mixtral",),
    expert_params=(
        ExpertParam(name="gate_up_proj", hub_parts=("w1.weight", "w3.weight")),
        ExpertParam(name="down_proj", hub_parts=("w2.weight",)),
    ),
    hub_renames=((".mlp.", ".block_sparse_moe."),),
    num_experts_fields=("num_local_experts",),
)
