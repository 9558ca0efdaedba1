"""A shortened run of the quickstart's task that must learn: supervised training, then GRPO on 4 ranks."""

from __future__ import annotations

from pathlib import Path

from moesaic.config import Recipe, load_recipe
from moesaic.rl.loop import train_rl
from moesaic.train.loop import train
from quickstart.rewards import read_accuracies
from quickstart.tiny_model import save_random_model
from quickstart.tiny_task import build_demonstrations, build_split, save_rows
from tests.pool import RunRanks

RECIPES = Path(__file__).parents[2] / "recipes"
# A million parameters, and words of 3 and 4 letters: a fifth of the time of the real ones.
SIZES = (128, 128, 2)
LENGTHS = (3, 4)
# Of accuracy; less than half of what was measured: 0.25 and 0.27.
MIN_GAIN = 0.1


def train_on_rank(rank: int, recipe: Recipe) -> None:
    train(recipe)


def train_rl_on_rank(rank: int, recipe: Recipe) -> None:
    train_rl(recipe)


def recipe_of(name: str, world_size: int, *fields: str) -> Recipe:
    return load_recipe(RECIPES / name, list(fields), world_size=world_size)


def test_a_model_learns_from_rewards_what_its_demonstrations_did_not_show(run_ranks: RunRanks, tmp_path: Path) -> None:
    words, heldout = build_split(num_train=720, num_heldout=100, lengths=LENGTHS)
    save_random_model(tmp_path / "start", SIZES, seed=0)
    for name, rows in (("train", words), ("heldout", heldout), ("sft", build_demonstrations(words, num_each=15))):
        save_rows(rows, tmp_path / f"{name}.jsonl")
    fields = (f"model={tmp_path / 'start'}", f"train_dataset.path={tmp_path / 'sft.jsonl'}", "learning_rate=4e-3")
    alone = ("dist_config.ep_size=1", "micro_batch_size=64")
    sft = recipe_of("sft/tiny.yaml", 1, *fields, *alone, f"output_dir={tmp_path / 'sft'}", "max_steps=330")
    run_ranks(train_on_rank, 1, sft)
    fields = (f"model={tmp_path / 'sft' / 'export'}", f"output_dir={tmp_path / 'grpo'}", "max_steps=12")
    data = (f"train_dataset.path={tmp_path / 'train.jsonl'}", f"eval_dataset.path={tmp_path / 'heldout.jsonl'}")
    sizes = ("global_batch_size=32", "learning_rate=4e-4", "eval_steps=12")
    run_ranks(train_rl_on_rank, 4, recipe_of("rl/grpo_tiny.yaml", 4, *fields, *data, *sizes))
    accuracies = read_accuracies(tmp_path / "grpo" / "metrics.jsonl")
    assert 0.25 < accuracies[0] < 0.65, "the skill is partial"
    assert accuracies[12] - accuracies[0] >= MIN_GAIN
