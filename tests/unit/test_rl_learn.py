"""From rewards to what updates are given: who is asked, in which order, and what becomes of it; roles are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moesaic.config import Recipe
from moesaic.rl import learn
from moesaic.rl.kl import KlController
from moesaic.rl.learn import Learned, Learner
from moesaic.rl.rewards import Reward
from moesaic.rl.roles import Role, Roles
from moesaic.rl.types import Experience, Prompt, Trajectory
from moesaic.train.router import RouterTraining

# Two groups of two. The third trajectory's environment wrote its second token.
LENGTHS = (3, 1, 4, 2)
GROUPS = (0, 0, 1, 1)
REWARDS = (1.0, 0.0, 0.5, 0.25)
SCORES = {0: 2.0, 1: -1.0, 2: 0.5, 3: 4.0}  # of the reward model, by first token
MAX_TOKENS, BUFFER = 4, 2
PENALTIES = (-0.5, 0.0, -1.0, 0.0)  # lengths 3 and 4 are into the last two


def trajectory(number: int, length: int, group: int, environment: Sequence[int] = ()) -> Trajectory:
    is_model = tuple(place not in environment for place in range(length))
    return Trajectory(
        prompt=Prompt(number=group, tokens=(9,), text="", row={}),
        group=group,
        index=number % 2,
        tokens=(number,) * length,
        is_model=is_model,
        logprobs=tuple(-1.0 - place if mine else 0.0 for place, mine in enumerate(is_model)),
        versions=tuple(0 if mine else -1 for mine in is_model),
        finish_reason="stop",
    )


TRAJECTORIES = [
    trajectory(number, length, group, (1,) if number == 2 else ())
    for number, (length, group) in enumerate(zip(LENGTHS, GROUPS, strict=True))
]
MASK_BT = Experience.of(TRAJECTORIES).mask_BT
# What the stand-ins say, by role and column; each is another number.
COLUMNS = {
    ("actor", "logprobs"): -1.5,
    ("actor", "raw_logprobs"): -2.0,
    ("actor", "entropy"): 0.7,
    ("ref", "logprobs"): -1.75,
    ("teacher", "logprobs"): -0.5,
    ("critic", "values"): 0.125,
}
TEMPERATURE = 0.5
ROUTER = "the actor's"


class Stage:
    """A learner whose roles are names; what updates were given, and whose turns there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, roles: Sequence[str], **fields: Any) -> None:
        self.turns: list[str] = []
        self.asked: list[tuple[str, tuple[str, ...], float]] = []
        self.updates: dict[str, tuple[Experience, Tensor, dict[str, Any]]] = {}
        self.raw_BT: Tensor | None = None
        for name in ("compute_columns", "compute_scores", "compute_topk", "update_actor", "update_critic"):
            monkeypatch.setattr(learn, name, getattr(self, name))
        sampling = {"n": 2, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}
        data = {"model": "m", "train_dataset": "d", "stage": "rl", "rollout": {"sampling": sampling}, **fields}
        recipe = Recipe.model_validate(data)
        self.learner = Learner(
            recipe=recipe,
            roles=Roles(**{name: cast(Role, name) for name in ("actor", *roles)}),
            kl=KlController(recipe.kl_config),
            router=cast(RouterTraining, ROUTER),
            at_work=self.at_work,
        )

    @contextmanager
    def at_work(self, phase: str, role: Any) -> Iterator[None]:
        self.turns.append(phase)
        self.role = role
        yield
        self.role = None

    def compute_columns(self, role: str, experience: Experience, wanted: Any, *, temperature: float = 1.0) -> Any:
        assert self.role == role, "it isn't on the device"
        self.asked.append((role, tuple(wanted), temperature))
        tables = {name: torch.where(experience.mask_BT, COLUMNS[role, name], 0.0) for name in wanted}
        if self.raw_BT is not None and "raw_logprobs" in tables:
            tables["raw_logprobs"] = self.raw_BT
        return tables

    def compute_scores(self, role: str, experience: Experience) -> Tensor:
        assert self.role == role == "reward"
        return torch.tensor([SCORES[each.tokens[0]] for each in experience.trajectories])

    def compute_topk(self, role: str, experience: Experience, k: int, *, temperature: float) -> Any:
        assert self.role == role == "teacher"
        return "topk", k, temperature

    def update_actor(self, role: str, experience: Experience, mask_BT: Tensor, **options: Any) -> dict[str, float]:
        assert self.role == role == "actor"
        self.updates["actor"] = (experience, mask_BT, options)
        return {}

    def update_critic(self, role: str, experience: Experience, mask_BT: Tensor, **options: Any) -> dict[str, float]:
        assert self.role == role == "critic"
        self.updates["critic"] = (experience, mask_BT, options)
        return {}

    def learn(self, step: int = 1, **options: Any) -> Learned:
        rewards = [Reward(total=value, components={"score": value}) for value in REWARDS]
        return self.learner.learn(step, TRAJECTORIES, rewards, **options)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *roles, **fields: Stage(monkeypatch, roles, **fields)


def on_tokens(values_B: Sequence[float]) -> Tensor:
    return torch.where(MASK_BT, torch.tensor(values_B)[:, None], 0.0)


REWARD = {"functions": ["f.py:f"], "model": "r", "weights": [1.0, 0.1], "overlong_buffer_len": BUFFER}
WHOLE = [own + 0.1 * SCORES[row] + PENALTIES[row] for row, own in enumerate(REWARDS)]


def test_a_reward_is_of_functions_model_and_length_less_one_divergence(stage: Any) -> None:
    kl = {"use": "reward", "estimator": "k1", "coef": 0.5, "target": 0.1, "horizon": 8}
    made = stage("ref", "reward", reward=REWARD, kl_config=kl, algorithm={"adv_estimator": "dr_grpo"})
    learned = made.learn()
    experience, mask_BT, _ = made.updates["actor"]
    assert torch.equal(mask_BT, MASK_BT)
    # log p - log p_ref is 0.25 at each of the model's tokens: 3, 1, 3 and 2 of them.
    totals = [whole - 0.5 * 0.25 * count for whole, count in zip(WHOLE, (3, 1, 3, 2), strict=True)]
    torch.testing.assert_close(experience.columns["token_rewards"].sum(dim=1), torch.tensor(totals))
    means = [(totals[0] + totals[1]) / 2] * 2 + [(totals[2] + totals[3]) / 2] * 2
    expected = [total - mean for total, mean in zip(totals, means, strict=True)]
    torch.testing.assert_close(experience.columns["advantages"], on_tokens(expected))
    metrics = learned.metrics
    assert [each.total for each in learned.rewards] == pytest.approx(WHOLE)
    assert metrics["critic/score/mean"] == pytest.approx(sum(WHOLE) / 4)
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(totals) / 4)
    assert metrics["reward/reward_model/mean"] == pytest.approx(sum(SCORES.values()) / 4)
    assert metrics["reward/overlong/mean"] == pytest.approx(sum(PENALTIES) / 4)
    assert metrics["reward/score/mean"] == pytest.approx(sum(REWARDS) / 4)
    # Each trajectory's mean divergence is 0.25: that is over the target, and the next coefficient is larger.
    assert (metrics["actor/reward_kl_penalty_coeff"], metrics["actor/reward_kl_penalty"]) == (0.5, 0.25)
    assert made.learner.kl.coef == pytest.approx(0.5 * (1 + 0.2 * 4 / 8))
    assert ("ref", ("logprobs",), TEMPERATURE) in made.asked, "the actor's are of that temperature"


def test_the_greedy_completions_baseline_is_a_whole_reward_too(stage: Any) -> None:
    made = stage("reward", reward=REWARD, algorithm={"adv_estimator": "remax"})
    # The second group's first: baselines go by the group's number.
    greedy = [trajectory(3, 4, 0), trajectory(1, 1, 1)]
    own = [Reward(total=value, components={}) for value in (0.75, 0.125)]
    learned = made.learn(greedy=(greedy, own))
    baselines = (0.75 + 0.1 * SCORES[3] - 1.0, 0.125 + 0.1 * SCORES[1])
    expected = [whole - baselines[group] for whole, group in zip(WHOLE, GROUPS, strict=True)]
    torch.testing.assert_close(made.updates["actor"][0].columns["advantages"], on_tokens(expected))
    assert [each.total for each in learned.rewards] == pytest.approx(WHOLE), "the greedy ones are not trained on"


def test_held_out_completions_are_judged_without_the_penalty(stage: Any) -> None:
    made = stage("reward", reward=REWARD)
    rewards = made.learner.judge(TRAJECTORIES, [Reward(total=1.0, components={}) for _ in LENGTHS], is_held_out=True)
    assert [each.total for each in rewards] == pytest.approx([1 + 0.1 * SCORES[row] for row in range(4)])


def test_what_is_rejected_is_not_trained_on_and_its_reward_counts(stage: Any) -> None:
    correction: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_rs": ("token_k1",)}
    correction["rollout_rs_threshold"] = ("0.5_4.0",)
    fields = {"algorithm": {"adv_estimator": "dr_grpo"}, "correction_config": correction}
    made = stage("critic", **fields)
    rollout_BT = Experience.of(TRAJECTORIES).columns["rollout_logprobs"]
    # The trainer's raw ones are the engine's, but for one token that it finds e times likelier, and one e**3 times
    # less likely, which is rejected: it is the first trajectory's last, where its reward is.
    made.raw_BT = rollout_BT.clone()
    made.raw_BT[1, 0] += 0.5
    made.raw_BT[0, 2] -= 3
    learned = made.learn()
    expected_BT = MASK_BT.clone()
    expected_BT[0, 2] = False
    for name in ("actor", "critic"):
        experience, mask_BT, _ = made.updates[name]
        assert torch.equal(mask_BT, expected_BT), name
    advantages = experience.columns["advantages"]
    torch.testing.assert_close(advantages, on_tokens([0.5, -0.5, 0.125, -0.125]))
    weights = torch.where(MASK_BT, 1.0, 0.0)
    weights[1, 0], weights[0, 2] = 1.5, torch.tensor(-3.0).exp()
    torch.testing.assert_close(experience.columns["rollout_weights"], weights)
    assert made.asked[0] == ("actor", ("logprobs", "entropy", "raw_logprobs"), TEMPERATURE)
    assert torch.equal(experience.columns["old_logprobs"], torch.where(MASK_BT, -1.5, 0.0)), "those of the loss"
    assert learned.metrics["actor/trained_token_ratio"] == pytest.approx(8 / 9)
    assert learned.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 9)


def test_in_bypass_the_engines_log_probabilities_are_the_old_ones(stage: Any) -> None:
    made = stage(correction_config={"bypass_mode": True})
    made.learn()
    experience, mask_BT, options = made.updates["actor"]
    assert options == {"topk": None, "router": ROUTER}
    assert torch.equal(experience.columns["old_logprobs"], experience.columns["rollout_logprobs"])
    assert torch.equal(mask_BT, MASK_BT) and "rollout_weights" not in experience.columns
    assert made.turns == ["update_actor"] and not made.asked


def test_only_the_critic_learns_at_first(stage: Any) -> None:
    made = stage("critic", algorithm={"adv_estimator": "gae"}, critic={"critic_warmup": 2})
    for step, expected in ((1, {"critic"}), (2, {"critic"}), (3, {"actor", "critic"})):
        made.updates.clear()
        made.learn(step)
        assert made.updates.keys() == expected, step
    experience, _, _ = made.updates["critic"]
    # gamma and lam are 1: a return is the reward, through the environment's token as well.
    torch.testing.assert_close(experience.columns["returns"], on_tokens(REWARDS))
    assert ("critic", ("values",), 1.0) in made.asked


def test_what_comes_later_is_discounted(stage: Any) -> None:
    made = stage("critic", algorithm={"adv_estimator": "gae", "gamma": 0.5, "lam": 0.0})
    made.learn()
    # Without a decay a return is the next value, discounted, and at the last token the reward.
    expected_BT = on_tokens([0.5 * COLUMNS["critic", "values"]] * 4)
    for row, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        expected_BT[row, length - 1] = reward
    torch.testing.assert_close(made.updates["critic"][0].columns["returns"], expected_BT)


def test_a_teachers_advantages_are_its_own(stage: Any) -> None:
    distillation = {"mode": "policy_gradient", "coef": 0.5, "loss_max_clamp": 0.75}
    algorithm = {"adv_estimator": "on_policy_distillation"}
    made = stage("teacher", distillation_config=distillation, algorithm=algorithm)
    made.learn()
    experience, _, options = made.updates["actor"]
    torch.testing.assert_close(experience.columns["advantages"], on_tokens([0.5 * 0.75] * 4))  # 1, cut, halved
    assert options["topk"] is None and ("teacher", ("logprobs",), TEMPERATURE) in made.asked


def test_a_teachers_likeliest_tokens_go_to_the_loss(stage: Any) -> None:
    distillation = {"mode": "forward_kl_topk", "topk": 7, "use_task_rewards": True}
    made = stage("teacher", distillation_config=distillation)
    made.learn()
    experience, _, options = made.updates["actor"]
    assert options["topk"] == ("topk", 7, TEMPERATURE) and experience.columns["advantages"].any()


def test_trajectories_out_of_order_are_refused(stage: Any) -> None:
    """Their rewards would be others'."""
    for order in (range(len(TRAJECTORIES))[::-1], (1, 0, *range(2, len(TRAJECTORIES)))):
        made, mixed = stage(), [TRAJECTORIES[number] for number in order]
        with pytest.raises(AssertionError, match="not in order"):
            made.learner.learn(1, mixed, [Reward(total=0.0, components={}) for _ in LENGTHS])
