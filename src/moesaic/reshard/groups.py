"""Copies of one kind on one engine layout: their fragments, planned once, and which holder sends each.

A kind is a geometry and a way to lie: the copies of one layer's weight in all layers are members of one group, and
engines that load alike are its instances. Nothing here grows with members x instances.

Example, a box with three holders, two members (layers), two instances (engines): the sends are taken in the order
member 0 instance 0, member 0 instance 1, member 1 instance 0, member 1 instance 1, and each goes to the next holder,
0 1 2 0. Where the turn begins is chosen so that what is left over goes to whom has least.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moesaic.reshard.fragments import Flags, Fragments, HoldingTable, Ints, cut_fragments, intersect
from moesaic.reshard.layout import Copy, Held, Holding, Shape, TargetLayout


@dataclass(slots=True, eq=False, kw_only=True)
class CopyGroup:
    """Copies that differ in names only.

    Legend: F fragments, R instances.

    Attributes:
        copy: the first member.
        members: indices of all in the layout's ``copies``.
        num_instances: engine ranks that load this layout.
        num_bytes: [F], on the wire.
        local: [F, R], which of a fragment's holders lives in an instance's own process, -1 where none; None where that
            is so everywhere.
        turn: [F], the holder that takes the first send.
        period: after as many sends, every fragment's holder is the first again.
    """

    copy: Copy
    table: HoldingTable
    fragments: Fragments
    wire_dtype: torch.dtype
    members: tuple[int, ...]
    num_instances: int
    num_bytes: Ints
    local: Ints | None
    turn: Ints
    period: int

    @property
    def num_holders(self) -> Ints:
        """[F]."""
        return np.asarray(self.table.num_holders[self.fragments.holding])

    @property
    def num_remote(self) -> Ints:
        """[F]: instances that need a send, of each member."""
        here = 0 if self.local is None else (self.local >= 0).sum(axis=1)
        return np.full(len(self.turn), self.num_instances, np.int64) - here

    def remote(self, instance: int) -> Flags:
        """[F]: what this instance must receive."""
        if self.local is None:
            return np.ones(len(self.turn), np.bool_)
        return np.asarray(self.local[:, instance] < 0)

    def pick_senders(self, member: int, instance: int) -> Ints:
        """[F]: who sends, as rows of the table's holders; -1 where nobody needs to."""
        before: int | Ints = instance
        if self.local is not None:
            before = (self.local[:, :instance] < 0).sum(axis=1)
        turn = self.turn + member * self.num_remote + before
        holders = self.table.first[self.fragments.holding] + turn % self.num_holders
        return np.where(self.remote(instance), holders, -1)

    def pick_local(self, instance: int) -> Ints:
        """[F]: who copies in its own process, as rows of the table's holders; -1 where it isn't there."""
        if self.local is None:
            return np.full(len(self.turn), -1, np.int64)
        slots = self.local[:, instance]
        return np.where(slots >= 0, self.table.first[self.fragments.holding] + slots, -1)

    def pattern(self, member: int, instance: int) -> tuple[int, int]:
        """Equal for members and instances whose senders are equal."""
        if self.local is None:
            return (member * self.num_instances + instance) % self.period, 0
        return member % self.period, instance


@dataclass(slots=True, eq=False, kw_only=True)
class LayoutGroups:
    """What all engine ranks of one layout load.

    Attributes:
        targets: those engine ranks: the instances.
        layers: number of a layer -> (group, member) of each copy in the loader's order.
    """

    layout: TargetLayout
    targets: tuple[int, ...]
    groups: tuple[CopyGroup, ...]
    layers: Mapping[int, Sequence[tuple[CopyGroup, int]]]


class _Kind(NamedTuple):
    """What members of a group have in common."""

    table: HoldingTable
    wire_dtype: torch.dtype
    reads: object
    writes: object


class GroupBuilder:
    """Finds the groups of layouts; geometry that occurs again is intersected once."""

    def __init__(self, tensors: Mapping[str, Held], max_bytes: int, min_bytes: int) -> None:
        """Fragments are cut to ``max_bytes``, and where replicas share them, to no less than ``min_bytes``."""
        self._tensors = tensors
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes
        self._tables_by_id: dict[int, HoldingTable] = {}
        self._tables: dict[tuple[Shape, tuple[Holding, ...]], HoldingTable] = {}
        self._fragments: dict[tuple[HoldingTable, object], Fragments] = {}

    def table_of(self, held: Held) -> HoldingTable:
        """One object for all tensors that lie alike."""
        known = self._tables_by_id.get(id(held.holdings))
        if known is None:
            known = self._tables.get((held.shape, held.holdings))
        if known is None:
            known = HoldingTable(held.holdings, len(held.shape))
            self._tables[held.shape, held.holdings] = known
        self._tables_by_id[id(held.holdings)] = known
        return known

    def build(
        self, layout: TargetLayout, targets: Sequence[int], at_hand: Sequence[int | None], layer_of: Mapping[str, int]
    ) -> LayoutGroups:
        """``at_hand``: for each of ``targets``, the trainer rank in its process."""
        dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
        members: dict[_Kind, list[int]] = defaultdict(list)
        for index, copy in enumerate(layout.copies):
            if copy.num_elements:
                held = self._tensors[copy.source]
                members[self._kind(copy, held, held.wire_dtype_to(dtypes[copy.target]))].append(index)
        groups = tuple(self._build_group(layout, kind, its, targets, at_hand) for kind, its in members.items())
        places = [(index, group, member) for group in groups for member, index in enumerate(group.members)]
        layers: dict[int, list[tuple[CopyGroup, int]]] = defaultdict(list)
        for index, group, member in sorted(places, key=lambda place: place[0]):
            layers[layer_of[layout.copies[index].source]].append((group, member))
        return LayoutGroups(layout=layout, targets=tuple(targets), groups=groups, layers=layers)

    def _kind(self, copy: Copy, held: Held, wire_dtype: torch.dtype) -> _Kind:
        reads = (copy.shape, copy.source_start, copy.source_dims, copy.source_steps)
        return _Kind(self.table_of(held), wire_dtype, reads, (copy.target_offset, copy.target_strides))

    def _build_group(
        self,
        layout: TargetLayout,
        kind: _Kind,
        members: Sequence[int],
        targets: Sequence[int],
        at_hand: Sequence[int | None],
    ) -> CopyGroup:
        table, wire_dtype = kind.table, kind.wire_dtype
        copy = layout.copies[members[0]]
        if (table, kind.reads) not in self._fragments:
            self._fragments[table, kind.reads] = intersect(copy, table)
        fragments = self._fragments[table, kind.reads]
        if fragments.num_elements(copy).sum() != math.prod(
            extent for extent, dim in zip(copy.shape, copy.source_dims, strict=True) if dim is not None
        ):
            raise ValueError(
                f"the holdings of {copy.source} don't cover what {copy.target} reads of it just once: describe every "
                "rank that holds a part, and replicas as one holding with several holders."
            )
        num_sends = len(members) * len(targets)
        num_bytes = fragments.num_elements(copy) * wire_dtype.itemsize
        num_shares = self._count_shares(table.num_holders[fragments.holding], num_bytes, num_sends)
        fragments = cut_fragments(copy, fragments, num_shares, self._max_bytes // wire_dtype.itemsize)
        # An engine rank's own process holds nothing where no trainer rank lives in it.
        slots = [np.full(len(table.first), -1) if rank is None else table.slots_of(rank) for rank in at_hand]
        local = None if at_hand.count(None) == len(at_hand) else np.stack(slots, axis=1)[fragments.holding]
        return CopyGroup(
            copy=copy,
            table=table,
            fragments=fragments,
            wire_dtype=wire_dtype,
            members=tuple(members),
            num_instances=len(targets),
            num_bytes=fragments.num_elements(copy) * wire_dtype.itemsize,
            local=local,
            turn=fragments.holding.copy(),
            period=math.lcm(*set(table.num_holders[fragments.holding].tolist())),
        )

    def _count_shares(self, num_holders: Ints, num_bytes: Ints, num_sends: int) -> Ints:
        """[F]: into how many parts to cut what too few send for all holders to have an equal part."""
        wanted = num_holders // np.gcd(num_holders, num_sends)
        return np.clip(num_bytes // self._min_bytes, 1, wanted)


def balance_senders(groups: Sequence[CopyGroup], num_ranks: int) -> Ints:
    """Choose each fragment's first holder; returns the bytes that each rank sends, [ranks].

    Every holder of a fragment takes an equal number of its sends; the rest goes, the largest fragments first, to
    neighbours in the list of holders that have least.
    """
    sent = np.zeros(num_ranks, np.int64)
    rests: list[tuple[int, int, int, CopyGroup]] = []
    for group in groups:
        holders = group.num_holders
        even, rest = np.divmod(len(group.members) * group.num_remote, holders)
        rows, ranks = _expand(group)
        np.add.at(sent, ranks, (group.num_bytes * even)[rows])
        (left,) = np.nonzero(rest)
        rests.extend((int(group.num_bytes[row]), int(row), int(rest[row]), group) for row in left)
    rests.sort(key=lambda entry: -entry[0])
    for num_bytes, row, num_left, group in rests:
        holding = group.fragments.holding[row]
        first, count = group.table.first[holding], group.table.num_holders[holding]
        ranks = group.table.rank[first : first + count]
        load = sent[ranks]
        sums = np.cumsum(np.concatenate([[0], load, load[: num_left - 1]]))
        turn = int(np.argmin(sums[num_left : num_left + count] - sums[:count]))
        group.turn[row] = turn
        sent[ranks[(turn + np.arange(num_left)) % count]] += num_bytes
    return sent


def largest_message(plan: LayoutGroups, num_ranks: int) -> int:
    """Bytes of one layer that one trainer rank may send to one engine rank; no more, less where holders take turns."""
    largest = 0
    by_group: dict[CopyGroup, Ints] = {}
    for group in plan.groups:
        rows, ranks = _expand(group)
        by_group[group] = np.bincount(ranks, group.num_bytes[rows], num_ranks).astype(np.int64)
    for groups in {tuple(group for group, _ in copies) for copies in plan.layers.values()}:
        largest = max(largest, int(np.sum([by_group[group] for group in groups], axis=0).max()))
    return largest


def _expand(group: CopyGroup) -> tuple[Ints, Ints]:
    """(fragment, rank) of every fragment and every holder of it."""
    holders = group.num_holders
    rows = np.repeat(np.arange(len(holders)), holders)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(holders) - holders, holders)
    return rows, group.table.rank[group.table.first[group.fragments.holding[rows]] + within]
