"""Ranks that take turns: what is parked leaves memory and comes back bit for bit, and the budget is what is there."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache

from moesaic.config import Recipe
from moesaic.data.shard import shard_batch
from moesaic.engines.base import Sampling
from moesaic.engines.hf import HfEngine
from moesaic.engines.states import EngineStateError
from moesaic.ops.parking import FileTier, build_tier, local_tensor, return_freed_memory
from moesaic.rl.budget import Row, State, budget_text, count_resident, optimizer_tensors
from moesaic.rl.memory import HandOver, HandOverError
from moesaic.rl.roles import Role, Roles, build_roles
from moesaic.rl.rollout_engines import build_rollout
from moesaic.train.setup import start
from moesaic.weights.agree import state_tensors
from tests.dist.test_rl_roles import batch_of, rl_recipe, rows_of
from tests.pool import RankFailed, RunRanks
from tests.unit.tiny_checkpoints import save_tiny

# Tens of MB on each of 4 ranks, so that the process's own noise is small beside it.
LARGE = {
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
UNEVEN = {"vocab_size": 49, "tie_word_embeddings": True}


def resident_bytes() -> int:
    """Of this process, after what can be given back was."""
    gc.collect()
    return_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def update(role: Role, seed: int, *, steps: bool = True) -> None:
    """One forward and backward on other tokens for each seed, and the optimizer's step."""
    ids, weights = rows_of(seed)
    logits = role.model(**batch_of(ids, False).model_inputs()).logits
    logits = logits if isinstance(logits, Tensor) else logits.to_local()
    (logits.mean(-1) * weights).sum().backward()
    if steps:
        assert role.optimizer is not None and role.scheduler is not None
        role.optimizer.step()
        role.scheduler.step()
        role.optimizer.zero_grad(set_to_none=True)


def build(recipe: Recipe, folder: Path, **options: Any) -> tuple[Roles, HandOver]:
    """Roles, each parked as soon as it is built."""
    hand_over = HandOver(tier=build_tier("cpu", folder), **options)
    return build_roles(recipe, when_built=hand_over.add), hand_over


def planned(rows: tuple[Row, ...], state: State, role: str | None) -> dict[tuple[str, str], int]:
    return {(row.owner, row.what): row.num_bytes for row in rows if (row.state, row.role) == (state, role)}


# ------------------------------------------------------------------------------------------------------------- memory


def measure(rank: int, model: Path, folder: Path) -> list[float]:
    """How much of the bytes that are parked, and brought back, the process's memory falls and rises by."""
    recipe = rl_recipe(model, algorithm={}, kl_config={"use": "off"})
    start(recipe)
    roles, hand_over = build(recipe, folder)
    shares = []
    with hand_over:
        hand_over.enter(State.TRAIN, "actor")
        update(roles.actor, rank)  # buffers of collectives, once
        for _ in range(2):
            before = resident_bytes()
            hand_over.enter(State.ASLEEP)
            parked, asleep = hand_over.num_parked, resident_bytes()
            assert parked == sum(row.num_parked for row in hand_over.budget() if row.state is State.ASLEEP) > 15 * 2**20
            hand_over.enter(State.TRAIN, "actor")
            shares += [(before - asleep) / parked, (resident_bytes() - asleep) / parked]
    return shares


def test_memory_falls_by_what_is_parked_and_returns(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **LARGE)
    for shares in run_ranks(measure, 4, tmp_path / "model", tmp_path / "scratch"):
        assert all(0.9 <= share <= 1.1 for share in shares), shares


def cycle(rank: int, model: Path, folder: Path) -> tuple[int, int, int, list[str]]:
    recipe = rl_recipe(model)
    start(recipe)
    roles, hand_over = build(recipe, folder, is_synced=True)
    engine = HfEngine.load(model, dtype=torch.float32, device=torch.device("cpu"), parking_folder=folder)
    hand_over.add_engines([engine])
    once = Sampling(max_tokens=2, temperature=0)
    expected: Any = None
    memory, files = [], []
    with hand_over:
        for number in range(23):
            hand_over.enter(State.ROLLOUT)
            got = engine.generate([[1, 2, 3]], once)
            expected = expected or got
            assert got == expected
            for role in ("ref", "critic"):
                hand_over.enter(State.TRAIN, role)
            if number >= 2:
                memory.append(resident_bytes())
                files.append(open_files())
    return max(memory) - memory[0], max(files) - files[0], engine_bytes(engine), os.listdir(folder)


def engine_bytes(engine: HfEngine) -> int:
    return sum(local_tensor(each).untyped_storage().nbytes() for each in state_tensors(engine.model).values())


@pytest.mark.slow
def test_twenty_cycles_take_no_more_memory_than_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **{**LARGE, "num_hidden_layers": 1, "moe_intermediate_size": 128})
    for grown, files, left, names in run_ranks(cycle, 4, tmp_path / "model", tmp_path / "scratch"):
        assert grown < 2 * 2**20, "an eighth of what a cycle moves"
        assert files == 0 and left == 0 and names == []


# ------------------------------------------------------------------------------------------------------------- values


def run_with_turns(rank: int, recipe: Recipe, folder: Path) -> None:
    """Updates with hand-overs in between, one of them between two backwards of one update; and without any."""
    start(recipe)
    moved, hand_over = build(recipe, folder)
    still = build_roles(recipe)
    assert moved.critic is not None and still.critic is not None
    pairs = ((moved.actor, still.actor), (moved.critic, still.critic))
    identities = [[id(each) for each in things_of(role)] for role in moved.present]
    with hand_over:
        for seed in range(3):
            for mine, other in pairs:
                hand_over.enter(State.TRAIN, mine.name)
                update(mine, seed * 4 + rank, steps=False)
                hand_over.enter(State.TRAIN, "ref")
                assert count_resident([mine]) == {
                    (mine.name, what): 0 for what in ("weights", "optimizer", "gradients")
                }
                hand_over.enter(State.TRAIN, mine.name)
                update(mine, 100 + seed * 4 + rank)
                update(other, seed * 4 + rank, steps=False)
                update(other, 100 + seed * 4 + rank)
        hand_over.enter(State.SYNC)
        assert moved.ref is not None and still.ref is not None
        for mine, other in (*pairs, (moved.ref, still.ref)):
            hand_over.enter(State.TRAIN, mine.name)
            for a, b in zip(things_of(mine), things_of(other), strict=True):
                assert torch.equal(local_tensor(a), local_tensor(b))
                assert padding_of(a) == padding_of(b)
        assert [[id(each) for each in things_of(role)] for role in moved.present] == identities


def padding_of(tensor: Tensor) -> list[float]:
    """All of the storage, with what FSDP adds behind the shard."""
    storage = local_tensor(tensor).untyped_storage()
    return list(torch.empty(0, dtype=tensor.dtype).set_(storage).tolist()) if tensor.dtype == torch.float32 else []


def things_of(role: Role) -> list[Tensor]:
    moments = [] if role.optimizer is None else optimizer_tensors(role.optimizer)
    return [*state_tensors(role.model).values(), *moments]


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ep2, fsdp4, ep4": {},
    "tp2, ep2, cp2": {"tp_size": 2, "critic": {"tp_size": 1, "ep_size": 2}, "ref": {"tp_size": 1, "cp_size": 2}},
    "foreach, bf16": {"optim_config": {"implementation": "foreach"}, "bf16": True, "master_dtype": "bf16"},
}


@pytest.mark.parametrize("topology", ["ep2, fsdp4, ep4", pytest.param("foreach, bf16", marks=pytest.mark.slow)])
def test_updates_with_turns_are_those_without(run_ranks: RunRanks, tmp_path: Path, topology: str) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **UNEVEN)
    recipe = rl_recipe(tmp_path / "model", **TOPOLOGIES[topology])
    run_ranks(run_with_turns, 4, recipe, tmp_path / "scratch")


# ------------------------------------------------------------------------------------------------------------- budget


def count_in_every_state(rank: int, recipe: Recipe, folder: Path, parks: bool, sleeps: bool) -> tuple[list[str], str]:
    """Through all states, with a real sync and real completions: what is counted, against what is planned."""
    start(recipe)
    roles, hand_over = build(recipe, folder, parks=parks, sleeps=sleeps)
    rollout = build_rollout(recipe, roles.actor)
    hand_over.add_engines(rollout.engines)
    rows, wrong = hand_over.budget(), []

    def check(state: State, role: str | None) -> None:
        counted, plan = count_resident(roles.present, rollout.engines), planned(rows, state, role)
        if state is not State.TRAIN:
            assert not any(size for (_, what), size in counted.items() if what == "gradients")
        differ = {key: (counted[key], plan[key]) for key in plan | counted if counted[key] != plan[key]}
        wrong.extend(f"{state} {role} {key}: {its}" for key, its in differ.items())

    def go(state: State, role: str | None = None) -> None:
        hand_over.enter(state, role)
        assert all(is_sharded(each) for each in roles.present), "what FSDP gathered in the turn before is gone"

    with hand_over:
        for version in range(1, 3):
            for role in roles.present:
                go(State.TRAIN, role.name)
                run_forward(role, rank)
                check(State.TRAIN, role.name)
                if role.optimizer is None:
                    run_forward(role, rank)
                    assert not is_sharded(role), "after a forward alone the root stays gathered"
                else:
                    role.optimizer.step()
                    role.optimizer.zero_grad(set_to_none=True)
            go(State.SYNC)
            rollout.sync(version)
            check(State.SYNC, None)
            go(State.ROLLOUT)
            rollout.engine.generate([[1, 2]], Sampling(max_tokens=2))
            check(State.ROLLOUT, None)
        go(State.ASLEEP)
        check(State.ASLEEP, None)
        text = budget_text(rows, parks=parks)
    rollout.close()
    return wrong, text


def run_forward(role: Role, rank: int) -> None:
    """And backward, where the role is trained."""
    batch = shard_batch(batch_of(rows_of(rank)[0], False), role.meshes)
    with torch.set_grad_enabled(role.optimizer is not None):
        loss = role.model(**batch.model_inputs()).logits.square().mean()
    if role.optimizer is not None:
        loss.backward()


def is_sharded(role: Role) -> bool:
    return all(isinstance(param, DTensor) for param in role.model.parameters())


@pytest.mark.parametrize(
    "topology", [pytest.param(each, marks=[pytest.mark.slow] if each == "foreach, bf16" else []) for each in TOPOLOGIES]
)
def test_the_budget_is_what_is_there_in_every_state(run_ranks: RunRanks, tmp_path: Path, topology: str) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **{**UNEVEN, "num_key_value_heads": 4})
    recipe = rl_recipe(tmp_path / "model", **TOPOLOGIES[topology])
    for wrong, text in run_ranks(count_in_every_state, 4, recipe, tmp_path / "scratch", True, True):
        assert wrong == []
        assert "TRAIN critic" in text and "engine 0" in text and "park_idle_roles" not in text


@pytest.mark.parametrize(("parks", "sleeps"), [(False, True), (True, False)])
def test_what_is_told_to_stay_stays(run_ranks: RunRanks, tmp_path: Path, parks: bool, sleeps: bool) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **UNEVEN)
    recipe = rl_recipe(tmp_path / "model", rollout={"free_cache_engine": sleeps})
    for wrong, text in run_ranks(count_in_every_state, 4, recipe, tmp_path / "scratch", parks, sleeps):
        assert wrong == []
        assert ("park_idle_roles: false" in text) == (not parks)


# ------------------------------------------------------------------------------------------------------------- engine


def sleep_and_measure(rank: int, folder: Path, scratch: Path) -> tuple[float, float, float, int, int]:
    # Values of its own memory: of a mapped file's the process has as much as it has read.
    engine = HfEngine.load(folder, dtype=torch.float32, device=torch.device("cpu"), parking_folder=scratch)
    engine.sleep(1)
    engine.wake()
    size = engine_bytes(engine)
    prompts = [[1 + number % 40] * 200 for number in range(16)]
    engine.generate(prompts, Sampling(max_tokens=8))  # what the first forward of this size takes for good
    before = resident_bytes()
    expected = engine.generate(prompts, Sampling(max_tokens=8, seed=1))
    kept = resident_bytes() - before
    caches = sum(isinstance(each, Cache) for each in gc.get_objects())
    awake = resident_bytes()
    engine.sleep(1)
    asleep = resident_bytes()
    engine.wake()
    again = resident_bytes()
    assert engine.generate(prompts, Sampling(max_tokens=8, seed=1)) == expected
    engine.sleep(2)
    dropped = resident_bytes()
    engine.close()
    return (awake - asleep) / size, (again - asleep) / size, (awake - dropped) / size, kept, caches


def test_a_sleeping_engine_has_no_weights_and_no_keys_and_values(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **{**LARGE, "max_position_embeddings": 512})
    falls, rises, drops, kept, caches = run_ranks(sleep_and_measure, 1, tmp_path / "model", tmp_path)[0]
    assert min(falls, rises, drops) >= 0.9 and max(falls, rises) < 1.1, (falls, rises, drops)
    # 16 sequences of 208 tokens, 3 layers of 2 heads of 64, keys and values: 9.75 MiB while it generated.
    assert caches == 0 and kept < 3 * 2**20, (caches, kept)


# ------------------------------------------------------------------------------------------------- rules and failures


def refused(action: Callable[[], Any], kind: type[Exception] = HandOverError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def break_the_rules(rank: int, model: Path, folder: Path) -> list[str]:
    recipe = rl_recipe(model)
    start(recipe)
    roles, hand_over = build(recipe, folder)
    messages = [
        refused(lambda: hand_over.enter(State.ROLLOUT)),
        refused(lambda: hand_over.enter(State.TRAIN)),
        refused(lambda: hand_over.enter(State.TRAIN, "teacher")),
        refused(lambda: hand_over.enter(State.SYNC, "actor")),
        refused(lambda: hand_over.add(roles.actor)),
    ]
    assert hand_over.state is State.ASLEEP
    hand_over.enter(State.SYNC)
    hand_over.enter(State.ROLLOUT)
    hand_over.enter(State.TRAIN, "critic")
    hand_over.enter(State.ROLLOUT)  # the actor is what it was
    hand_over.enter(State.TRAIN, "actor")
    messages += [refused(lambda: hand_over.enter(State.ROLLOUT)), refused(lambda: hand_over.add(roles.actor))]
    hand_over.enter(State.ASLEEP)
    messages += [refused(lambda: hand_over.enter(State.ROLLOUT))]
    # Ranks that don't do the same.
    apart = ("critic", "actor")[rank % 2]
    refused(lambda: hand_over.enter(State.TRAIN, apart), RuntimeError)
    hand_over.enter(State.TRAIN, "critic")
    assert roles.critic is not None
    run_forward(roles.critic, rank)
    messages += [refused(lambda: run_forward(roles.actor, rank))]  # it has no memory to be read
    hand_over.close()
    run_forward(roles.critic, rank)
    return [*messages, refused(lambda: run_forward(roles.actor, rank)), refused(lambda: hand_over.enter(State.ASLEEP))]


def test_turns_that_can_not_follow_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    messages = run_ranks(break_the_rules, 4, tmp_path / "model", tmp_path / "scratch")[0]
    for message, words in zip(
        messages,
        (
            "ROLLOUT can't follow ASLEEP: the engines don't have the actor's weights: enter SYNC first",
            "TRAIN is one role's turn: one of actor, ref, critic",
            "TRAIN teacher can't follow ASLEEP",
            "SYNC actor can't follow ASLEEP: only TRAIN is a role's turn",
            "actor can't be added",
            "ROLLOUT can't follow TRAIN actor: the engines don't have",
            "actor can't be added in TRAIN actor",
            "ROLLOUT can't follow ASLEEP: the engines don't have",
            "actor: its weights are parked; enter TRAIN actor first",
            "actor: its weights are parked",
            "it is closed",
        ),
        strict=True,
    ):
        assert words in message


class FullTier(FileTier):
    """A disk that becomes full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_full = False

    def keep(self, storages: Any) -> Any:
        kept = super().keep(storages)
        if self.is_full:
            kept.close()
            raise OSError(28, "No space left on device")
        return kept


def fill_a_disk(rank: int, model: Path, folder: Path) -> tuple[str, str, list[str], bool]:
    recipe = rl_recipe(model)
    start(recipe)
    tier = FullTier(folder)
    hand_over = HandOver(tier=tier)
    roles = build_roles(recipe, when_built=hand_over.add)
    hand_over.enter(State.TRAIN, "actor")
    before = [local_tensor(each).clone() for each in things_of(roles.actor)]
    tier.is_full = rank == 2
    failed = refused(lambda: hand_over.enter(State.ASLEEP), OSError if rank == 2 else RuntimeError)
    is_whole = rank != 2 or all(map(torch.equal, before, map(local_tensor, things_of(roles.actor))))
    then = refused(lambda: hand_over.enter(State.TRAIN, "actor"))
    hand_over.close()
    return failed, then, os.listdir(folder), is_whole


def test_a_full_disk_on_one_rank_ends_the_turn_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    for rank, (failed, then, names, is_whole) in enumerate(
        run_ranks(fill_a_disk, 4, tmp_path / "model", tmp_path / "scratch")
    ):
        assert ("No space left" if rank == 2 else "making room for ASLEEP failed on another rank") in failed
        assert "going over to ASLEEP failed" in then
        assert names == [] and is_whole


def die_with_parked_roles(rank: int, model: Path, folder: Path) -> None:
    recipe = rl_recipe(model)
    start(recipe)
    _, hand_over = build(recipe, folder)
    assert hand_over.num_parked > 0
    hand_over.enter(State.TRAIN, "critic")
    if rank == 1:
        os._exit(9)
    raise RuntimeError("the step failed")


def test_ranks_that_fail_or_die_leave_no_files(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    with pytest.raises(RankFailed):
        run_ranks(die_with_parked_roles, 4, tmp_path / "model", tmp_path / "scratch")
    assert os.listdir(tmp_path / "scratch") == []


def test_an_engine_with_requests_stays(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    run_ranks(leave_requests_behind, 2, tmp_path / "model", tmp_path / "scratch")


def leave_requests_behind(rank: int, model: Path, folder: Path) -> None:
    recipe = rl_recipe(model, ref={"ep_size": 2})
    start(recipe)
    _, hand_over = build(recipe, folder, is_synced=True)
    engine = HfEngine.load(model, dtype=torch.float32, device=torch.device("cpu"), parking_folder=folder)
    hand_over.add_engines([engine])
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate([[1]], Sampling(max_tokens=1))
    hand_over.enter(State.ROLLOUT)
    during: list[str] = []
    hook = engine.model.register_forward_hook(
        lambda *_: during.append(
            refused(lambda: hand_over.enter(State.TRAIN, "actor"), HandOverError if rank == 0 else RuntimeError)
        )
    )
    if rank == 0:
        engine.generate([[1]], Sampling(max_tokens=1))
        assert "1 calls of generate are in flight" in during[0]
    else:
        refused(lambda: hand_over.enter(State.TRAIN, "actor"), RuntimeError)
    hook.remove()
    hand_over.enter(State.TRAIN, "actor")
    hand_over.close()
