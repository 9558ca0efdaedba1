"""The roles of a run, each a model on meshes of its own; all of them on the same ranks, which take turns.

    actor     causal LM, trained                       always
    ref       the actor's first weights                where a divergence from it is taken (``kl_config.use``)
    critic    value model, trained                     where advantages need values (``adv_estimator: gae``)
    teacher   causal LM                                where the actor learns from it (``distillation_config.mode``)
    reward    value model of a sequence classifier     where it scores text (``reward.model``)

Roles with equal sizes share their meshes: the same groups, and no communicators more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from moesaic.config import Recipe
from moesaic.config.roles import TRAINED_ROLES, RoleName, active_roles, role_recipe
from moesaic.meshes import Meshes, build_meshes
from moesaic.train.optim import build_optimizer, build_scheduler, give_state
from moesaic.train.setup import build_model

MeshSizes = tuple[int, int, int, int, int]
VALUE_HEADS: Mapping[str, Literal["new", "trained"]] = MappingProxyType({"critic": "new", "reward": "trained"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One role, ready for a forward; where it has an optimizer, for a step.

    Attributes:
        recipe: the role's own (``role_recipe``): the run's, with the role's section laid over.
        meshes: roles with equal sizes share theirs.
        model: sharded over ``meshes``; of the critic and of the reward model, with a head of one column: its logits
            [B, S, 1] are values, whole on every tp rank.
        optimizer, scheduler: of the actor and the critic; None where nothing is trained. The scheduler counts steps of
            the run, whatever the number of optimizer updates in one.
    """

    name: RoleName
    recipe: Recipe
    meshes: Meshes
    model: PreTrainedModel
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Those that the recipe asks for."""

    actor: Role
    ref: Role | None = None
    critic: Role | None = None
    teacher: Role | None = None
    reward: Role | None = None

    @property
    def present(self) -> tuple[Role, ...]:
        """All there are, the actor first."""
        every = (self.actor, self.ref, self.critic, self.teacher, self.reward)
        return tuple(role for role in every if role is not None)


def build_roles(
    recipe: Recipe, *, num_steps: int | None = None, when_built: Callable[[Role], None] | None = None
) -> Roles:
    """Meshes, models, optimizers of all roles, one after another. Every rank must call it.

    The process group is joined, and seeds are set (``train.setup.start``).

    Args:
        num_steps: of the run, for the learning rates; default: the recipe's ``max_steps``.
        when_built: gets each role before the next is built, so that it can make room (``HandOver.add``).

    Raises:
        ValueError: neither ``num_steps`` nor ``max_steps``; a reward model that is no classifier of one label; what
            ``from_pretrained`` raises.
    """
    steps = recipe.max_steps if num_steps is None else num_steps
    if steps is None:
        raise ValueError("num_steps: the learning rates need the number of steps; give it, or set max_steps.")
    meshes: dict[MeshSizes, Meshes] = {}
    built: dict[str, Role] = {}
    for name in active_roles(recipe):
        own = role_recipe(recipe, name)
        sizes = (own.cp_size, own.tp_size, own.mp_replicate_size, own.ep_size, own.edp_size)
        if sizes not in meshes:
            cp_size, tp_size, mp_replicate_size, ep_size, edp_size = sizes
            meshes[sizes] = build_meshes(
                cp_size=cp_size,
                tp_size=tp_size,
                mp_replicate_size=mp_replicate_size,
                ep_size=ep_size,
                edp_size=edp_size,
            )
        built[name] = _build_role(name, own, meshes[sizes], steps)
        if when_built is not None:
            when_built(built[name])
    return Roles(**built)


def _build_role(name: RoleName, recipe: Recipe, meshes: Meshes, num_steps: int) -> Role:
    model = build_model(recipe, meshes, VALUE_HEADS.get(name))
    if name not in TRAINED_ROLES:
        model.requires_grad_(False).eval()
        return Role(name=name, recipe=recipe, meshes=meshes, model=model)
    optimizer = build_optimizer(model, recipe.optim_config, recipe.learning_rate)
    # From the first step on the same memory is used; and a role that has not been stepped yet can be saved.
    give_state(optimizer)
    scheduler = build_scheduler(optimizer, recipe.lr_scheduler_config, num_steps)
    return Role(name=name, recipe=recipe, meshes=meshes, model=model, optimizer=optimizer, scheduler=scheduler)
