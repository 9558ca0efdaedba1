"""Whole runs of reinforcement learning on tiny models: what they leave behind, what they repeat, what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moesaic.config import MoesaicConfig, Recipe, RecipeError, check_recipe
from moesaic.rl.loop import train_rl
from moesaic.rl.trainer import RlTrainer
from moesaic.runtime import StartError
from tests.pool import RunRanks
from tests.unit.data_tokenizers import build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny

NUM_ROWS, NUM_STEPS = 12, 4
SAMPLING = {"n": 2, "max_tokens": 6}
DOCUMENT = Path(__file__).parents[2] / "docs" / "rl.md"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("rl-source")
    save_tiny(folder / "model", "qwen3_moe", vocab_size=320)
    build_tokenizer().save_pretrained(folder / "model")
    for name, numbers in (("train", range(NUM_ROWS)), ("eval", range(90, 95))):
        rows = [{"prompt": f"{number}?" * (1 + number % 3), "answer": str(number)} for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "def length(prompts, completions, completion_ids, **columns):\n"
        "    return [len(set(ids)) / 6 + ids[0] % 7 / 7 for ids in completion_ids]\n"
    )
    return folder


def recipe_of(source: Path, output_dir: Path, **fields: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "stage": "rl",
        "model": str(source / "model"),
        "train_dataset": {"path": str(source / "train.jsonl"), "format": "prompt"},
        "output_dir": str(output_dir),
        "global_batch_size": 4,
        "max_steps": NUM_STEPS,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "bf16": False,
        "micro_batch_tokens": 128,
        "rollout": {"max_prompt_length": 48, "sampling": SAMPLING},
        "reward": {"functions": [f"{source / 'rewards.py'}:length"]},
        "dist_config": MoesaicConfig(name="moesaic", ep_size=2),
    }
    recipe = Recipe.model_validate({**defaults, **fields})
    assert check_recipe(recipe, 4) == []
    return recipe


def train_on_rank(rank: int, recipe: Recipe) -> None:
    train_rl(recipe)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == kind]


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()]


def test_a_run_leaves_metrics_samples_checkpoints_and_a_model(
    run_ranks: RunRanks, source: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(
        source,
        tmp_path,
        max_steps=2,
        eval_dataset={"path": str(source / "eval.jsonl"), "format": "prompt"},
        eval_steps=1,
        kl_config={"use": "loss", "coef": 0.01},
        algorithm={"ppo_epochs": 2, "ppo_mini_batch_size": 2},
    )
    run_ranks(train_on_rank, 4, recipe)
    steps = read_metrics(tmp_path, "rl")
    assert len(steps) == 2
    for number, metrics in enumerate(steps, 1):
        samples = read_samples(tmp_path, number)
        assert len(samples) == 8 and [each["group"] for each in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert metrics["critic/score/mean"] == pytest.approx(sum(each["reward"] for each in samples) / 8)
        assert all(each["versions"] == [number - 1, number - 1] for each in samples), "on-policy: the newest weights"
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["num_turns/max"] == 2 and metrics["prompt_length/max"] > metrics["prompt_length/min"]
        num_tokens = 8 * (metrics["prompt_length/mean"] + metrics["response_length/mean"])
        assert metrics["perf/throughput"] == pytest.approx(num_tokens / metrics["timing_s/step"] / 4)
        assert metrics["actor/num_skipped"] == 0 and metrics["actor/grad_norm"] > 0
        for phase in ("gen", "reward", "old_log_prob", "ref", "update_actor", "update_weights"):
            assert metrics[f"timing_s/{phase}"] > 0
    # Two updates of an epoch and two of the next: after the first, the policy isn't that of the rollout.
    assert steps[0]["actor/ppo_kl"] != 0 and steps[1]["actor/kl_loss"] > 0
    assert len(read_metrics(tmp_path, "val")) == 3, "before the first step, and after each"
    assert any(name.endswith("/reward/mean@1") for name in read_metrics(tmp_path, "val")[0])
    before, after = read_weights(source / "model"), read_weights(tmp_path / "export")
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    assert "actor" in (tmp_path / "memory.txt").read_text() and "ref" in (tmp_path / "meshes.txt").read_text()
    assert not (tmp_path / "parked").exists() or not list((tmp_path / "parked").iterdir())


@pytest.mark.parametrize(
    "drawn", [{"temperature": 0.7}, pytest.param({"top_k": 1}, marks=pytest.mark.slow)], ids=["seeded", "greedy"]
)
def test_a_run_that_goes_on_is_one_that_never_stopped(
    run_ranks: RunRanks, source: Path, tmp_path: Path, drawn: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {
        "rollout": {"max_prompt_length": 48, "sampling": {**SAMPLING, **drawn}},
        "algorithm": {"adv_estimator": "gae", "lam": 0.9},
        "kl_config": {"use": "reward", "estimator": "k1", "coef": 0.1, "target": 0.01, "horizon": 50},
    }
    run_ranks(train_on_rank, 4, recipe_of(source, tmp_path / "straight", **fields))
    start = {"resume_from_checkpoint": str(tmp_path / "straight" / "step-000002")}
    run_ranks(train_on_rank, 4, recipe_of(source, tmp_path / "resumed", **fields, **start))
    straight, resumed = read_weights(tmp_path / "straight" / "export"), read_weights(tmp_path / "resumed" / "export")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert read_samples(tmp_path / "straight", 4) == read_samples(tmp_path / "resumed", 4)
    ours, theirs = read_metrics(tmp_path / "straight", "rl")[2:], read_metrics(tmp_path / "resumed", "rl")
    kept = [[{key: value for key, value in each.items() if _repeats(key)} for each in run] for run in (ours, theirs)]
    assert kept[0] == kept[1]
    assert ours[0]["actor/reward_kl_penalty_coeff"] != 0.1, "the coefficient adapts"
    epochs = [each["training/epoch"] for each in read_metrics(tmp_path / "straight", "rl")]
    assert epochs == [0, 0, 0, 1], "an epoch is three steps"

    # A resumption that is refused leaves the run as it was: its recipe is what its checkpoints are exported by.
    others = {"train_dataset": str(source / "eval.jsonl"), "ref": {"ep_size": 4}}
    auto = {**fields, "resume_from_checkpoint": "auto"}
    names = ("recipe.yaml", "meshes.txt", "memory.txt", "environment.json")
    before = [(tmp_path / "straight" / name).read_text() for name in names]
    for changed, words in ((others, "num_prompts"), ({"max_steps": 3}, "4 steps done, and the run ends after 3")):
        recipe = recipe_of(source, tmp_path / "straight", **auto, **changed)
        assert words in run_ranks(refuse_on_rank, 4, recipe)[0]
    assert [(tmp_path / "straight" / name).read_text() for name in names] == before


def refuse_on_rank(rank: int, recipe: Recipe) -> str:
    with pytest.raises(StartError) as caught:
        train_rl(recipe)
    return str(caught.value)


def _repeats(name: str) -> bool:
    return not name.startswith(("timing_s/", "perf/")) and name != "rollout/tokens_per_s"


def test_without_learning_nothing_moves(run_ranks: RunRanks, source: Path, tmp_path: Path) -> None:
    """Nor do engine and trainer drift apart: what is between them is rounding, in the fifth step as in the first."""
    stops = list(range(0, 320, 6))
    rollout = {"max_prompt_length": 48, "sampling": SAMPLING, "stop_token_ids": stops}
    fields: dict[str, Any] = {
        "max_steps": 5,
        "learning_rate": 0.0,
        "global_batch_size": NUM_ROWS,
        "rollout": rollout,
    }
    run_ranks(train_on_rank, 4, recipe_of(source, tmp_path, **fields))
    before, after = read_weights(source / "model"), read_weights(tmp_path / "export")
    assert all(torch.equal(before[name], after[name]) for name in before)
    steps = read_metrics(tmp_path, "rl")
    assert len(steps) == 5
    assert all(each["response_length/min"] < each["response_length/max"] for each in steps)
    for name in ("training/rollout_probs_diff_max", "rollout_corr/kl", "rollout_corr/k3_kl"):
        assert all(abs(each[name]) <= 2e-5 for each in steps), name  # 4.1e-6 was the largest seen
    # Of some 100 tokens each, so steady: 1.4e-7 to 1.7e-7 was seen. The largest, of a single token, is not.
    means = [each["training/rollout_probs_diff_mean"] for each in steps]
    assert 0 < max(means) <= 2 * min(means), means


def test_from_python_in_ten_lines(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The example of docs/rl.md as it stands there, but for the folders and the number of steps."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    model = tmp_path / "model"
    save_tiny(model, "qwen3_moe", vocab_size=320, max_position_embeddings=1024)
    build_tokenizer().save_pretrained(model)
    for theirs, ours in (("models/tiny", model), ("runs/sums", tmp_path), ('"max_steps": 50', '"max_steps": 2')):
        assert theirs in code
        code = code.replace(theirs, str(ours))
    run_ranks(run_code, 1, code)
    assert len(read_metrics(tmp_path, "rl")) == 2
    samples = read_samples(tmp_path, 1)
    assert len(samples) == 16 * 8 and all(re.search(r"\d \+ \d =", each["prompt"]) for each in samples)


def run_code(rank: int, code: str) -> None:
    exec(compile(code, "docs/rl.md", "exec"), {})


def test_rows_given_for_another_run_leave_those_of_an_earlier_one(source: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": str(source / "model"),
        "output_dir": str(tmp_path),
        "global_batch_size": 1,
        "max_steps": 1,
        "rollout": {"max_prompt_length": 48, "sampling": SAMPLING},
    }

    def build(*answers: str, **more: Any) -> Path:
        rows = [{"prompt": f"{answer}?", "answer": answer} for answer in answers]
        recipe = RlTrainer({**fields, **more}, reward_fn=len, dataset=rows).recipe
        return Path(recipe.train_dataset[0].path)

    first = build("1", "2")
    begun = first.read_text()
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / ".metadata").touch()
    with pytest.raises(RecipeError, match="holds an earlier run"):
        build("3")
    assert first.read_text() == begun
    with pytest.raises(RecipeError, match="there are 0 functions and no model to weigh"):
        build("1", "2", resume_from_checkpoint="auto", reward={"weights": [0.5]})
    build("3", resume_from_checkpoint="auto")  # it will be refused, by what the checkpoint says of its prompts
    assert first.read_text() == begun
    assert build("1", "2", resume_from_checkpoint="auto") == first
