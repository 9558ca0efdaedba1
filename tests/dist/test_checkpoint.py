"""A run that stops and resumes equals one that doesn't; incomplete checkpoints are never found."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typer.testing import CliRunner

from moesaic.checkpoint import TrainState, delete_old_checkpoints, load_checkpoint, load_model, save_checkpoint
from moesaic.cli import app
from moesaic.config import LrSchedulerConfig, OptimConfig
from moesaic.config.run_folder import checkpoint_folder, find_latest
from moesaic.ops.gather import gather_to_rank_0
from moesaic.train.optim import build_optimizer, build_scheduler
from moesaic.verify.stores import CheckpointStore


class Counter:
    """A data position that knows how many steps were drawn."""

    def __init__(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class Tiny(nn.Module):
    """Two blocks, a tied head, dropout (random state matters), an odd size (uneven shards)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(2)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = Tiny()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), 0.05)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(name="cosine", warmup_steps=2), num_steps=8)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=Counter())


def run_steps(state: TrainState, num_steps: int, rank: int) -> list[float]:
    """Steps whose data comes from the position, and whose noise from all three generators."""
    losses = []
    for _ in range(num_steps):
        state.data.index += 1
        ids = (torch.arange(5) * state.data.index + rank) % 7
        noise = torch.rand(()) + random.random() + float(numpy.random.rand())
        loss = nn.functional.cross_entropy(state.model(ids), ids) * noise
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()
        losses.append(loss.item())
    return losses


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def whole(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: param.full_tensor().clone() for name, param in state.model.named_parameters()}


def stop_and_resume(rank: int, folder: str) -> tuple[Any, ...]:
    straight = build_state(seed=0)
    seed_everything(rank)
    run_steps(straight, 3, rank)
    path = save_checkpoint(Path(folder), straight, step=3)
    expected = run_steps(straight, 3, rank)

    resumed = build_state(seed=1)
    seed_everything(99)
    step = load_checkpoint(path, resumed)
    losses = run_steps(resumed, 3, rank)
    equal = [torch.equal(a, b) for a, b in zip(whole(straight).values(), whole(resumed).values(), strict=True)]
    moments = [
        torch.equal(
            straight.optimizer.state[a]["exp_avg_sq"].to_local(), resumed.optimizer.state[b]["exp_avg_sq"].to_local()
        )
        for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    ]
    return path.name, step, losses, expected, equal, moments, resumed.scheduler.get_last_lr(), resumed.data.index


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_equals_no_stop_bit_for_bit(run_ranks, tmp_path: Path, world_size: int) -> None:
    for name, step, losses, expected, equal, moments, _, index in run_ranks(stop_and_resume, world_size, str(tmp_path)):
        assert (name, step, index) == ("step-000003", 3, 6)
        assert losses == expected
        assert all(equal) and all(moments)


def save_on_rank(rank: int, folder: str) -> dict[str, torch.Tensor]:
    state = build_state(seed=0)
    run_steps(state, 2, rank=0)
    save_checkpoint(Path(folder), state, step=2)
    return whole(state)


def load_on_rank(rank: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    state, bare = build_state(seed=5), build_state(seed=6)
    path = find_latest(Path(folder))
    assert path is not None
    step = load_checkpoint(path, state)
    load_model(path, bare.model)
    save_checkpoint(Path(folder) / "again", state, step)
    return whole(state), whole(bare), step


def test_another_number_of_ranks_loads_the_same_values(run_ranks, tmp_path: Path) -> None:
    saved = run_ranks(save_on_rank, 2, str(tmp_path))[0]
    for loaded, bare, step in run_ranks(load_on_rank, 3, str(tmp_path)):
        assert step == 2
        assert all(torch.equal(loaded[name], value) and torch.equal(bare[name], value) for name, value in saved.items())
    sides = [str(checkpoint_folder(folder, 2)) for folder in (tmp_path, tmp_path / "again")]
    result = CliRunner().invoke(app, ["diff", *sides])  # of 2 and 3 ranks, each with random states of its own
    assert result.exit_code == 0 and "optimizer.state.blocks.0.0.bias.step" in result.stdout, result.output


def rotate_on_rank(rank: int, folder: str, best: int | None) -> list[str]:
    state, path = build_state(seed=0), Path(folder)
    for step in (1, 2, 10, 11, 11):  # 11 once more, as after a resume: replaced
        newest = save_checkpoint(path, state, step=step)
        kept = None if best is None else checkpoint_folder(path, best)
        delete_old_checkpoints(path, newest, keep=2, best=kept)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("best", "kept"), [(None, ["10", "11"]), (2, ["02", "10", "11"]), (11, ["10", "11"]), (10, ["02", "10", "11"])]
)
def test_the_newest_are_kept_and_the_best_beside_them(
    run_ranks, tmp_path: Path, best: int | None, kept: list[str]
) -> None:
    assert run_ranks(rotate_on_rank, 2, str(tmp_path), best)[0] == [f"step-0000{step}" for step in kept]


def save_an_earlier_step(rank: int, folder: str) -> tuple[bool, list[str]]:
    state = build_state(seed=0)
    (Path(folder) / "step-000200").mkdir(exist_ok=True)
    (Path(folder) / "step-000200" / ".metadata").touch()
    path = save_checkpoint(Path(folder), state, step=150)
    delete_old_checkpoints(Path(folder), path, keep=1)
    return (path / ".metadata").is_file(), sorted(path.name for path in Path(folder).iterdir())


def test_the_one_just_written_is_kept_also_beside_a_later_one(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(save_an_earlier_step, 1, str(tmp_path)) == [(True, ["step-000150"])]


def replace_and_fail(rank: int, folder: str) -> list[str]:
    """The checkpoint of step 1 is written twice; the second time, deleting the first one fails."""
    state = build_state(seed=0)
    save_checkpoint(Path(folder), state, step=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.checkpoint.shutil.rmtree", refuse_to_delete)
        with pytest.raises(OSError, match="busy"):
            save_checkpoint(Path(folder), state, step=1)
    return sorted(path.name for path in Path(folder).iterdir())


def refuse_to_delete(folder: Path, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        assert (folder.with_suffix("") / ".metadata").is_file(), "the new one must be in place first"
        raise OSError("busy")


def test_a_checkpoint_is_replaced_before_the_old_one_is_deleted(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(replace_and_fail, 1, str(tmp_path))[0] == ["step-000001", "step-000001.old"]
    assert find_latest(tmp_path) == tmp_path / "step-000001"


def break_off_between_models(rank: int, folder: str) -> tuple[list[str], list[bool]]:
    """The run ends when the first model is written and the second is not; the next run writes that step anew."""
    state = build_state(seed=0)
    other = build_state(seed=1)
    state = replace(state, others={"critic": other})
    with pytest.raises(OSError, match="gone"):
        save_checkpoint(Path(folder), state, step=1, turn=end_at_critic)
    assert find_latest(Path(folder)) is None
    left = sorted(path.name for path in Path(folder).iterdir())
    path = save_checkpoint(Path(folder), state, step=1)
    again = replace(build_state(seed=2), others={"critic": build_state(seed=3)})
    load_checkpoint(path, again)
    pairs = ((state, again), (other, again.others["critic"]))
    return left, [all(map(torch.equal, whole(a).values(), whole(b).values())) for a, b in pairs]


def end_at_critic(name: str | None) -> None:
    if name == "critic":
        raise OSError("gone")


def test_a_checkpoint_of_two_models_counts_when_both_are_written(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(break_off_between_models, 1, str(tmp_path))[0] == (["step-000001.tmp"], [True, True])


def test_incomplete_checkpoints_are_not_found(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    for name in ("step-000005", "step-000020.tmp", "step-000030", "step-x"):
        (tmp_path / name).mkdir()
    for name in ("step-000005", "step-000020.tmp", "step-x"):
        (tmp_path / name / ".metadata").touch()
    assert find_latest(tmp_path) == tmp_path / "step-000005"


def load_incomplete(rank: int, folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_checkpoint(Path(folder), build_state(seed=0))
    return str(caught.value)


def test_an_incomplete_checkpoint_is_refused(run_ranks, tmp_path: Path) -> None:
    assert str(tmp_path) in run_ranks(load_incomplete, 1, str(tmp_path))[0]


class Strided(nn.Module):
    """A matrix of which two axes shard dim 0, a frozen one, and a buffer that training changes."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.experts = nn.Linear(5, num_rows, bias=False)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.register_buffer("bias", torch.zeros(num_rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias += 1
        return self.experts(self.frozen(x)) + self.bias


def build_strided(seed: int, num_rows: int, mesh_shape: tuple[int, int]) -> TrainState:
    torch.manual_seed(seed)
    model = Strided(num_rows)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("fsdp", "ep"))
    sharded = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(sharded)
    fully_shard(model.experts, mesh=mesh["fsdp"])  # dim 0 again: a strided shard
    fully_shard(model.frozen)
    optimizer = build_optimizer(model, OptimConfig(), 0.1)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(), 8)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=Counter())


def local_values(state: TrainState) -> list[torch.Tensor]:
    """This rank's parts of everything a checkpoint holds: not through full_tensor, which misreads uneven strides."""
    weight = state.model.experts.weight
    moments = state.optimizer.state[weight]
    tensors = [weight, moments["exp_avg"], moments["exp_avg_sq"], state.model.frozen.weight, state.model.bias]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def global_values(state: TrainState) -> list[torch.Tensor]:
    weight = state.model.experts.weight
    moments = state.optimizer.state[weight]
    tensors = [weight, moments["exp_avg"], moments["exp_avg_sq"], state.model.frozen.weight]
    wholes = [gather_to_rank_0(tensor.detach()) for tensor in tensors]
    return [*(whole for whole in wholes if whole is not None), state.model.bias]


def save_strided(rank: int, folder: str, num_rows: int, mesh_shape: tuple[int, int]) -> Any:
    state, again = build_strided(0, num_rows, mesh_shape), build_strided(1, num_rows, mesh_shape)
    for param in (state.model.experts.weight,):
        param.grad = param.detach().clone()
    state.optimizer.step()
    state.model.bias += 3
    path = save_checkpoint(Path(folder), state, step=1)
    load_checkpoint(path, again)
    equal = [torch.equal(a, b) for a, b in zip(local_values(state), local_values(again), strict=True)]
    return equal, [value.clone() for value in global_values(state)]


def load_strided(rank: int, folder: str, num_rows: int, mesh_shape: tuple[int, int]) -> list[torch.Tensor]:
    state = build_strided(2, num_rows, mesh_shape)
    load_checkpoint(Path(folder) / "step-000001", state)
    assert not state.model.frozen.weight.requires_grad
    return [value.clone() for value in global_values(state)]


@pytest.mark.parametrize(("num_rows", "mesh_shape"), [(8, (2, 2)), (7, (3, 2))])
def test_strided_shards_frozen_weights_and_changed_buffers_come_back(
    run_ranks, tmp_path: Path, num_rows: int, mesh_shape: tuple[int, int]
) -> None:
    saved = run_ranks(save_strided, math.prod(mesh_shape), str(tmp_path), num_rows, mesh_shape)
    assert all(all(equal) and len(equal) == 5 for equal, _ in saved)
    values = saved[0][1]
    assert values[-1].tolist() == [3.0] * num_rows and len(values) == 5
    elsewhere = run_ranks(load_strided, 4, str(tmp_path), num_rows, (1, 4))[0]
    assert all(torch.equal(a, b) for a, b in zip(values, elsewhere, strict=True))
    in_one_process = CheckpointStore(tmp_path / "step-000001").read("experts.weight")
    assert torch.equal(in_one_process, values[0])


def load_another_shape(rank: int, folder: str) -> str:
    model = build_strided(2, 9, (1, 2)).model
    model.bias = torch.zeros(8)
    with pytest.raises(ValueError) as caught:
        load_model(Path(folder) / "step-000001", model)
    return str(caught.value)


def test_a_checkpoint_of_another_shape_is_refused_by_name(run_ranks, tmp_path: Path) -> None:
    run_ranks(save_strided, 4, str(tmp_path), 8, (2, 2))
    message = run_ranks(load_another_shape, 2, str(tmp_path))[0]
    assert "model.experts.weight has shape (8, 5) there, and has shape (9, 5) here" in message
    assert str(tmp_path) in message


class Mixture(Counter):
    """A data position of several sources, each with a name of its own in the checkpoint."""

    def __init__(self, num_sources: int) -> None:
        super().__init__()
        self.num_sources = num_sources

    def state_dict(self) -> dict[str, int]:
        return {"num_sources": self.num_sources} | {f"taken_{number}": 5 for number in range(self.num_sources)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["num_sources"] != self.num_sources:
            raise ValueError(f"num_sources is {self.num_sources} now and was {state['num_sources']}")


def resume_with_another_source(rank: int, folder: str) -> list[str]:
    messages = []
    state = build_state(seed=0)
    for num_saved, num_now in ((1, 2), (2, 1)):
        path = save_checkpoint(Path(folder), replace(state, data=Mixture(num_saved)), step=1)
        with pytest.raises(ValueError) as caught:
            load_checkpoint(path, replace(state, data=Mixture(num_now)))
        messages.append(str(caught.value))
    return messages


def test_a_source_more_or_less_is_refused_in_the_datas_own_words(run_ranks, tmp_path: Path) -> None:
    expected = ["num_sources is 2 now and was 1", "num_sources is 1 now and was 2"]
    assert run_ranks(resume_with_another_source, 2, str(tmp_path)) == [expected] * 2
