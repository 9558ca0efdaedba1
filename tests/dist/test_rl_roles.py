"""Roles on their own meshes; value models, whatever shares them, give what transformers' classifiers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    PreTrainedModel,
)

from moesaic.config import Recipe
from moesaic.config.roles import active_roles
from moesaic.data.batch import Batch, find_loss_positions
from moesaic.data.shard import shard_batch
from moesaic.meshes import Meshes, build_meshes
from moesaic.ops.gather import gather_to_rank_0
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.tensor import vocabulary_shard
from moesaic.rl.roles import Role, build_roles
from moesaic.train.grad_norm import clip_grad_norm_
from moesaic.train.setup import start
from tests.pool import RunRanks
from tests.unit.tiny_checkpoints import SIZES, save_tiny, tiny_config

# Of values and gradients against one process: the same sums in another order, fp32.
TOLERANCE = 1e-5
TOPOLOGIES: dict[str, tuple[dict[str, int], bool]] = {
    "fsdp4": ({}, False),
    "ep2 efsdp2": ({"ep_size": 2}, True),
    "cp2": ({"cp_size": 2}, True),
    "tp2": ({"tp_size": 2, "ep_size": 2}, True),
    "tp2 fsdp": ({"tp_size": 2}, False),
    "tp2 cp2": ({"tp_size": 2, "cp_size": 2, "ep_size": 4}, True),
    "tp4": ({"tp_size": 4}, True),
}
CLASSIFIERS: dict[str, Any] = {
    "token": AutoModelForTokenClassification,  # its head has a bias
    "sequence": AutoModelForSequenceClassification,
}


def save_classifier(folder: Path, auto_class: Any, model_type: str = "qwen3_moe", num_labels: int = 1) -> None:
    """Random weights, the head's bias too."""
    torch.manual_seed(3)
    config = tiny_config(model_type, num_labels=num_labels, num_key_value_heads=4, pad_token_id=0)
    model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)


def rows_of(dp_rank: int) -> tuple[Tensor, Tensor]:
    """Two rows of 12 tokens, and what each value counts."""
    generator = torch.Generator().manual_seed(dp_rank)
    ids = torch.randint(1, 48, (2, 12), generator=generator)
    return ids, torch.randn(2, 12, generator=generator)


def batch_of(ids: Tensor, keeps: bool) -> Batch:
    """With ``keeps`` only some positions have a label, and so a value."""
    labels = ids.clone()
    if keeps:
        labels[:, [0, 1, 4, 9]] = -100
    positions = torch.arange(ids.size(1)).expand_as(ids)
    return Batch(
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        attention_mask=torch.ones_like(ids),
        loss_positions=find_loss_positions(labels) if keeps else None,
    )


def reference_of(folder: Path, auto_class: Any, num_dp: int, keeps: bool) -> tuple[list[Tensor], PreTrainedModel]:
    """Each data-parallel rank's values [B, S] of one process, and its model with the gradients of all of them."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32)
    values = []
    for dp_rank in range(num_dp):
        ids, weights = rows_of(dp_rank)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        its = model.score(hidden).squeeze(-1)
        counted = batch_of(ids, keeps).labels != -100
        (its * weights * counted).sum().backward()
        values.append(its.detach())
    return values, model


def relative(mine: Tensor, theirs: Tensor) -> float:
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


def compare_values(rank: int, folder: Path, kind: str, topology: str, keeps: bool) -> tuple[float, float, float]:
    sizes, expert_parallel = TOPOLOGIES[topology]
    meshes = build_meshes(**sizes)
    options = ParallelOptions(expert_parallel=expert_parallel)
    model = from_pretrained(folder, meshes, options=options, value_head="trained")
    expected, reference = reference_of(folder, CLASSIFIERS[kind], meshes.sizes.dp_size, keeps)
    assert vocabulary_shard(model) is None
    dp_rank = meshes.data.get_local_rank("dp")
    ids, weights = rows_of(dp_rank)
    batch = shard_batch(batch_of(ids, keeps), meshes)
    values = model(**batch.model_inputs()).logits.squeeze(-1)
    positions, kept = batch.position_ids, batch.kept_labels != -100
    if batch.loss_positions is not None:
        positions = positions.index_select(1, batch.loss_positions)
    error = relative(values.detach(), expected[dp_rank].gather(1, positions))
    (values * weights.gather(1, positions) * kept).sum().backward()
    norm = clip_grad_norm_(model.parameters(), None).item()
    worst = compare_grads(model, reference)
    theirs = torch.stack([param.grad.norm() for param in reference.parameters()]).norm().item()
    return error, worst, abs(norm - theirs) / theirs


def compare_grads(model: PreTrainedModel, reference: PreTrainedModel) -> float:
    """The largest relative error of a gradient, on rank 0."""
    theirs = {name.replace("score.", "lm_head."): param.grad for name, param in reference.named_parameters()}
    worst = 0.0
    named = dict(model.named_parameters())
    assert named.keys() == theirs.keys()
    for name, param in named.items():
        assert param.grad is not None, name
        whole = gather_to_rank_0(param.grad)
        if whole is not None:
            worst = max(worst, relative(whole, theirs[name]))
    return worst


CASES = [("sequence", name, True) for name in TOPOLOGIES] + [
    ("token", "ep2 efsdp2", False),
    ("token", "tp2 cp2", False),
]


@pytest.mark.parametrize(("kind", "topology", "keeps"), CASES)
def test_values_and_gradients_are_a_classifiers(
    run_ranks: RunRanks, tmp_path: Path, kind: str, topology: str, keeps: bool
) -> None:
    save_classifier(tmp_path, CLASSIFIERS[kind])
    for values, grads, norm in run_ranks(compare_values, 4, tmp_path, kind, topology, keeps):
        assert max(values, grads, norm) < TOLERANCE, (values, grads, norm)


def build_new_critic(rank: int, folder: Path, sizes: dict[str, int]) -> tuple[list[int], float, list[str]]:
    meshes = build_meshes(**sizes)
    model = from_pretrained(folder, meshes, value_head="new")
    batch = shard_batch(batch_of(rows_of(0)[0], False), meshes)
    values = model(**batch.model_inputs()).logits
    return list(values.shape), values.abs().max().item(), [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"tp_size": 2, "ep_size": 2}])
@pytest.mark.parametrize("ties", [False, True])
def test_a_critic_of_a_language_model_values_everything_at_zero_first(
    run_ranks: RunRanks, tmp_path: Path, sizes: dict[str, int], ties: bool
) -> None:
    plain = save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=ties)
    shape, largest, names = run_ranks(build_new_critic, 4, tmp_path, sizes)[0]
    assert (shape, largest) == ([2, 12, 1], 0.0)
    assert set(names) == {name for name, _ in plain.named_parameters()} | {"lm_head.weight"}


def value_of_scaled_family(rank: int, folder: Path) -> float:
    meshes = build_meshes()
    model = from_pretrained(folder, meshes, options=ParallelOptions(expert_parallel=False), value_head="trained")
    ids = rows_of(0)[0]
    values = model(**batch_of(ids, False).model_inputs()).logits
    plain = GraniteMoeForCausalLM.from_pretrained(folder / "lm")
    expected = plain.model(input_ids=ids).last_hidden_state @ load_file(folder / "model.safetensors")["score.weight"].T
    return relative(values.detach(), expected.detach())


def test_a_familys_scale_of_logits_is_no_scale_of_values(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = GraniteMoeConfig(
        **{**SIZES, "num_hidden_layers": 1}, intermediate_size=8, num_local_experts=4, logits_scaling=4.0
    )
    torch.manual_seed(0)
    GraniteMoeForCausalLM(config).save_pretrained(tmp_path / "lm")
    config.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "lm" / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file({**weights, "score.weight": torch.randn(1, 16)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert run_ranks(value_of_scaled_family, 1, tmp_path)[0] < TOLERANCE


def refuse_labels(rank: int, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        from_pretrained(folder, build_meshes(), value_head="new")
    return str(caught.value)


def test_a_classifier_of_several_labels_gives_no_value(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_classifier(tmp_path, AutoModelForSequenceClassification, num_labels=3)
    message = run_ranks(refuse_labels, 1, tmp_path)[0]
    assert "score.weight is [3, 16], of 3 labels" in message and "num_labels=1" in message


# ------------------------------------------------------------------------------------------------------------- roles


def rl_recipe(folder: Path, reward: Path | None = None, **fields: Any) -> Recipe:
    """Of four roles, five with a reward model, on as many topologies as 4 ranks have."""
    common: dict[str, Any] = {
        "model": str(folder),
        "train_dataset": "none",
        "stage": "rl",
        "bf16": False,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "optim_config": {"eps": 1e-4},
        "lr_scheduler_config": {"name": "linear"},
        "dist_config": {"name": "moesaic", "ep_size": 2},
        "critic": {"dist": "fsdp2", "learning_rate": 2e-2},
        "ref": {"ep_size": 4},
        "algorithm": {"adv_estimator": "gae"},
        "kl_config": {"use": "loss"},
        "reward": {"model": None if reward is None else str(reward)},
    }
    return Recipe.model_validate({**common, **fields})


def facts_of(role: Role) -> dict[str, Any]:
    sizes = role.meshes.sizes
    return {
        "sizes": (sizes.ep_size, sizes.efsdp_size, sizes.mp_shard_size),
        "trains": [param.requires_grad for param in role.model.parameters()],
        "training": role.model.training,
        "lr": None if role.scheduler is None else role.scheduler.get_last_lr()[0],
        "moments": 0 if role.optimizer is None else sum(len(state) for state in role.optimizer.state.values()),
        "num_parameters": len(list(role.model.parameters())),
    }


def build_and_look(rank: int, recipe: Recipe) -> Any:
    start(recipe)
    order: list[str] = []
    roles = build_roles(recipe, when_built=lambda role: order.append(role.name))
    meshes: dict[str, Meshes] = {role.name: role.meshes for role in roles.present}
    same = all(
        torch.equal(gathered, other)
        for gathered, other in zip(whole(roles.actor.model), whole(roles.ref.model), strict=True)
    )
    shared = [(a, b) for a in meshes for b in meshes if a < b and meshes[a] is meshes[b]]
    return order, {role.name: facts_of(role) for role in roles.present}, same, shared


def whole(model: nn.Module) -> list[Tensor]:
    gathered = [gather_to_rank_0(param.detach()) for param in model.parameters()]
    return [each for each in gathered if each is not None]


def test_each_role_has_meshes_of_its_own_and_equal_ones_are_shared(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "lm", "qwen3_moe")
    save_classifier(tmp_path / "rm", AutoModelForSequenceClassification)
    recipe = rl_recipe(tmp_path / "lm", tmp_path / "rm")
    order, facts, same, shared = run_ranks(build_and_look, 4, recipe)[0]
    assert order == ["actor", "ref", "critic", "reward"] == list(active_roles(recipe))
    assert facts["actor"]["sizes"] == (2, 2, 4) and facts["ref"]["sizes"] == (4, 1, 4)
    assert facts["critic"]["sizes"] == facts["reward"]["sizes"] == (1, 4, 4)
    assert shared == [("critic", "reward")], "one set of meshes for equal sizes"
    assert same, "the reference is what the actor starts as"
    for name, its in facts.items():
        trains = name in ("actor", "critic")
        assert set(its["trains"]) == {trains} and its["training"] == trains
        assert its["moments"] == (3 * its["num_parameters"] if trains else 0)
    assert facts["actor"]["lr"] == 1e-2 and facts["critic"]["lr"] == 2e-2, "the first of 8 steps"


def step_once(rank: int, folder: Path) -> tuple[bool, bool]:
    """AdamW with state made before is AdamW that makes its own."""
    recipe = rl_recipe(folder)
    start(recipe)
    given, own = (build_roles(recipe).actor for _ in range(2))
    assert own.optimizer is not None and given.optimizer is not None
    own.optimizer.state.clear()
    for role in (given, own):
        batch = batch_of(rows_of(rank)[0], False)
        for _ in range(2):
            role.model(**batch.model_inputs()).logits.square().mean().backward()
            role.optimizer.step()
            role.optimizer.zero_grad()
    local = [[param.to_local() for param in role.model.parameters()] for role in (given, own)]
    steps = [
        [state["step"] for state in role.optimizer.state.values()]
        for role in (given, own)
        if role.optimizer is not None
    ]
    return all(map(torch.equal, *local)), all(map(torch.equal, *steps))


def test_state_made_early_is_the_state_of_the_first_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    assert run_ranks(step_once, 4, tmp_path) == [(True, True)] * 4


def critic_is_its_own(rank: int, folder: Path) -> tuple[bool, bool]:
    recipe = rl_recipe(folder)
    start(recipe)
    roles = build_roles(recipe)
    assert roles.critic is not None
    before = [param.to_local().clone() for param in roles.actor.model.parameters()]
    critic = roles.critic
    moved = [param.to_local().clone() for param in critic.model.parameters()]
    values = critic.model(**batch_of(rows_of(rank)[0], False).model_inputs()).logits
    (values - 1).square().mean().backward()
    assert critic.optimizer is not None
    critic.optimizer.step()
    after = [param.to_local() for param in roles.actor.model.parameters()]
    head = critic.model.lm_head.weight
    assert isinstance(head, DTensor)
    grew = head.full_tensor().abs().min().item() > 0
    changed = any(not torch.equal(a, b.to_local()) for a, b in zip(moved, critic.model.parameters(), strict=True))
    return all(map(torch.equal, before, after)), grew and changed


def test_the_critic_learns_and_the_actor_stays(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    assert run_ranks(critic_is_its_own, 4, tmp_path) == [(True, True)] * 4


def refuse_roles(rank: int, recipe: Recipe) -> str:
    start(recipe)
    with pytest.raises(ValueError) as caught:
        build_roles(recipe)
    return str(caught.value)


def test_what_scores_nothing_is_no_reward_model(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "lm", "qwen3_moe")
    message = run_ranks(refuse_roles, 2, rl_recipe(tmp_path / "lm", tmp_path / "lm", ref={"ep_size": 2}))[0]
    assert "has no score.weight" in message and "AutoModelForSequenceClassification" in message
    message = run_ranks(refuse_roles, 2, rl_recipe(tmp_path / "lm", max_steps=None, ref={"ep_size": 2}))[0]
    assert "max_steps" in message
