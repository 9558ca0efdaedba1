"""A recipe with router losses and frozen modules: a whole run on 2 ranks, its metrics and its export."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from moesaic.config import Recipe
from moesaic.train.loop import train
from tests.pool import RunRanks
from tests.unit.data_tokenizers import MARKED, build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny


def train_on_rank(rank: int, recipe: Recipe) -> None:
    train(recipe)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_with_router_losses_and_frozen_routers(run_ranks: RunRanks, tmp_path: Path) -> None:
    model, data, out = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "out"
    save_tiny(model, "qwen3_moe", vocab_size=320)
    build_tokenizer(MARKED).save_pretrained(model)
    samples = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(8)]
    data.write_text("".join(json.dumps({"messages": one}) + "\n" for one in samples))
    fields = {
        "model": str(model),
        "train_dataset": str(data),
        "output_dir": str(out),
        "cutoff_len": 64,
        "global_batch_size": 4,
        "max_steps": 2,
        "bf16": False,
        "learning_rate": 1e-2,
        "router_config": {"aux_loss_coef": 0.1, "z_loss_coef": 0.01},
        "frozen_modules": ["model.layers.*.mlp.gate"],
        "dist_config": {"name": "moesaic", "ep_size": 2},
    }
    run_ranks(train_on_rank, 2, Recipe.model_validate(fields))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["router"].keys() == {"aux_loss", "z_loss"}
        # K is what evenly loaded experts have; a loss of one choice per token would be half of it
        assert 1.9 < line["router"]["aux_loss"] < 4 and line["router"]["z_loss"] > 0
    before, after = (load_all(folder) for folder in (model, out / "export"))
    # An expert that no token chose stays as it is too: this recipe has no weight decay.
    same = {name for name in before if ".experts." not in name and torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.endswith("mlp.gate.weight")} and same
