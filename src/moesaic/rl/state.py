"""What a run of reinforcement learning remembers: all that the next step depends on beside the recipe.

| part              | in the checkpoint                                                   |
|-------------------|---------------------------------------------------------------------|
| actor             | weights, optimizer, schedule: under the keys of supervised training |
| critic            | the same, in a folder below                                         |
| prompts           | epoch, and place in it                                              |
| KL controller     | its coefficient                                                     |
| rollout           | groups that were begun and aren't whole                             |
| step              | the version of the actor's weights, too                             |
| random generators | of each rank                                                        |

Reference, teacher and reward model are what their folders say, and engines get the actor's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moesaic.checkpoint import Position, Stateful, Trained, TrainState, Turn, load_checkpoint, save_checkpoint
from moesaic.rl.budget import State
from moesaic.rl.memory import HandOver
from moesaic.rl.roles import Role, Roles

ACTOR = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class RlState:
    """The parts of a run that have a state.

    Attributes:
        prompts: which are next.
        kl: the coefficient's controller.
        rollout: what has begun.
        hand_over: brings each role into memory while it is read or written; None: all are there.
    """

    roles: Roles
    prompts: Position
    kl: Stateful
    rollout: Stateful
    hand_over: HandOver | None = None

    @property
    def train_state(self) -> TrainState:
        """The same as a checkpoint's parts."""
        actor = _trained(self.roles.actor)
        others = {} if self.roles.critic is None else {"critic": _trained(self.roles.critic)}
        return TrainState(
            model=actor.model,
            optimizer=actor.optimizer,
            scheduler=actor.scheduler,
            data=self.prompts,
            others=others,
            plain={"kl": self.kl, "rollout": self.rollout},
        )


def save_rl_checkpoint(output_dir: Path, state: RlState, step: int) -> Path:
    """``save_checkpoint`` of all that ``state`` names, after ``step`` steps; the run is then in the state it was in.
    Every rank must call it.

    Raises:
        RuntimeError: a rank couldn't write.
    """
    with _turns(state.hand_over) as turn:
        return save_checkpoint(output_dir, state.train_state, step, turn)


def load_rl_checkpoint(folder: Path, state: RlState) -> int:
    """``load_checkpoint`` into all that ``state`` names. Every rank must call it; engines have no part in it: SYNC is
    next.

    Returns:
        Steps done.

    Raises:
        ValueError: no complete checkpoint, or one of other models, prompts or roles.
    """
    with _turns(state.hand_over, changes=True) as turn:
        return load_checkpoint(folder, state.train_state, turn)


@contextmanager
def _turns(hand_over: HandOver | None, *, changes: bool = False) -> Iterator[Turn]:
    """What brings one role after another into memory; at the end the run is in the state that it was in."""
    if hand_over is None:
        yield lambda name: None
        return
    state, role = hand_over.state, hand_over.at_work

    def turn(name: str | None) -> None:
        hand_over.enter(State.TRAIN, name or ACTOR, changes=changes)

    yield turn
    hand_over.enter(state, role, changes=changes)


def _trained(role: Role) -> Trained:
    assert role.optimizer is not None and role.scheduler is not None, role.name
    return Trained(model=role.model, optimizer=role.optimizer, scheduler=role.scheduler)
