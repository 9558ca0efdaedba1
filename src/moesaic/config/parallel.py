"""Sizes of every parallel axis, derived from the recipe's few numbers. Torch-free.

dp = world / (cp * tp)          mp_shard = dp * cp / mp_replicate       efsdp = dp * cp * tp / (edp * ep)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.config.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Sizes of the three views of the same ranks (data, dense, expert); see ``moesaic.meshes``.

    Attributes:
        world_size: number of ranks.
        cp_size, tp_size: ranks that share samples (other tokens of them), and tokens.
        mp_replicate_size: HSDP replicas of the dense parameters.
        ep_size: ranks over which the experts are split.
        edp_size: HSDP replicas of the experts.

    Example: 8 ranks, tp 2, mp_replicate 2, ep 2, edp 2 make dp 4, mp_shard 2, efsdp 2.

    Raises:
        ValueError: the sizes don't multiply to ``world_size``; all reasons in one message.
    """

    world_size: int
    cp_size: int = 1
    tp_size: int = 1
    mp_replicate_size: int = 1
    ep_size: int = 1
    edp_size: int = 1

    def __post_init__(self) -> None:
        problems = dense_size_problems(
            self.world_size, self.cp_size, self.tp_size, self.mp_replicate_size
        ) + expert_size_problems(self.world_size, self.ep_size, self.edp_size)
        if problems:
            raise ValueError("\n".join(map(str, problems)))

    @property
    def dp_size(self) -> int:
        """Ranks along which samples differ: what cp and tp leave of the world."""
        return self.world_size // (self.cp_size * self.tp_size)

    @property
    def mp_shard_size(self) -> int:
        """Ranks that shard one replica of a dense parameter: ``dp * cp / mp_replicate`` (tp shards it further)."""
        return self.dp_size * self.cp_size // self.mp_replicate_size

    @property
    def efsdp_size(self) -> int:
        """Ranks that shard the same experts between them: all ranks of an expert replica, over ep."""
        return self.world_size // (self.edp_size * self.ep_size)


def dense_size_problems(world: int, cp: int, tp: int, mp_replicate: int) -> list[Problem]:
    """Every way in which the sizes of the data and dense views don't multiply to ``world`` ranks."""
    sizes = {"world_size": world, "cp_size": cp, "tp_size": tp, "mp_replicate_size": mp_replicate}
    problems = _below_one(sizes)
    if problems:
        return problems
    if world % (cp * tp):
        field, value = ("tp_size", tp) if cp == 1 else ("cp_size", cp)
        return [
            Problem(
                field=field,
                value=value,
                rule=f"cp_size * tp_size = {cp} * {tp} = {cp * tp} must divide the {world} ranks",
                remedy=f"choose cp_size and tp_size with a product among {divisors(world)}, or other ranks",
            )
        ]
    if (world // tp) % mp_replicate:
        return [
            Problem(
                field="mp_replicate_size",
                value=mp_replicate,
                rule=f"must divide dp_size * cp_size = {world // tp} (the {world} ranks over tp_size)",
                remedy=f"choose one of {divisors(world // tp)}",
            )
        ]
    return []


def expert_size_problems(world: int, ep: int, edp: int) -> list[Problem]:
    """Every way in which the sizes of the expert view don't multiply to ``world`` ranks."""
    problems = _below_one({"world_size": world, "dist_config.ep_size": ep, "dist_config.edp_size": edp})
    if problems or world % (edp * ep) == 0:
        return problems
    if world % edp:
        return [
            Problem(
                field="dist_config.edp_size",
                value=edp,
                rule=f"replicas of the experts must divide the {world} ranks (unset, they are mp_replicate_size)",
                remedy=f"choose one of {divisors(world)}",
            )
        ]
    return [
        Problem(
            field="dist_config.ep_size",
            value=ep,
            rule=f"ep_size * edp_size = {ep} * {edp} = {ep * edp} must divide the {world} ranks",
            remedy=f"with edp_size {edp} choose ep_size among {divisors(world // edp)}",
        )
    ]


def _below_one(sizes: dict[str, int]) -> list[Problem]:
    return [
        Problem(field=field, value=size, rule="must be at least 1", remedy="remove it, or set 1 or more")
        for field, size in sizes.items()
        if size < 1
    ]


def ep_size_problem(num_experts: int, ep_size: int) -> str | None:
    """``expert_split_problem`` as a sentence, for callers without a recipe."""
    problem = expert_split_problem(num_experts, ep_size)
    return None if problem is None else str(problem)


def expert_split_problem(num_experts: int, ep_size: int) -> Problem | None:
    """Why ``ep_size`` can't split ``num_experts`` so that every rank has at least one expert, or None.

    Experts are split in chunks of ``c = ceil(E / P)``; the last rank may have fewer, none may have none:
    ``ceil(E / c) == P``. Example: 7 experts on 4 ranks are 2, 2, 2, 1; 9 on 4 would be 3, 3, 3, 0.
    """
    if ep_size < 1:
        return _below_one({"dist_config.ep_size": ep_size})[0]
    if is_legal_ep_size(num_experts, ep_size):
        return None
    smaller = max((p for p in range(1, min(ep_size, num_experts + 1)) if is_legal_ep_size(num_experts, p)), default=1)
    larger = next((p for p in range(ep_size + 1, num_experts + 1) if is_legal_ep_size(num_experts, p)), None)
    chunk = math.ceil(num_experts / ep_size)
    return Problem(
        field="dist_config.ep_size",
        value=ep_size,
        rule=f"every rank needs an expert, and {num_experts} experts in chunks of {chunk} fill only "
        f"{math.ceil(num_experts / chunk)} of {ep_size} ranks",
        remedy=f"nearest legal: {smaller} or {larger}" if larger else f"nearest legal: {smaller}",
    )


def is_legal_ep_size(num_experts: int, ep_size: int) -> bool:
    """True where chunks of ``ceil(num_experts / ep_size)`` leave no rank without an expert."""
    return ep_size >= 1 and math.ceil(num_experts / math.ceil(num_experts / ep_size)) == ep_size


def divisors(number: int) -> list[int]:
    """Divisors in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]
