"""The plan of a reshard: which trainer rank sends which elements to which engine rank, in which order. Pure.

describe (blocks.py, trace.py): who holds what, and what each engine rank's loader reads
group (groups.py): copies that differ in names, layers and engines only are planned once
intersect, cut (fragments.py): every element of a copy lies in one fragment, each within one holding
balance: each fragment's holders take turns
number: every process finds its own messages, and no process ever makes the list of all

Every process makes the plan for itself from equal descriptions, or is sent it (a pickle of it is small, one of a large
plan's views is not); ``fingerprint`` tells whether it is the same plan.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.reshard.bound import lower_bound
from moesaic.reshard.fragments import Ints
from moesaic.reshard.groups import CopyGroup, GroupBuilder, LayoutGroups, balance_senders, largest_message
from moesaic.reshard.layout import Fill, Message, Piece, Shape, SourceLayout, TargetLayout, TargetTensor
from moesaic.reshard.messages import (
    Packer,
    find_local_shapes,
    local_pieces,
    number_layers,
    pause_collector,
    require_fitting,
)
from moesaic.reshard.plan_table import PlanSummary, Traffic

# Processes with different versions of this package may meet. Raise it when anything that the two ends of a message must
# agree on changes: the order, numbers or cutting of messages, who sends, how pieces lie in a message, its checksum.
PLAN_FORMAT = 1
DEFAULT_MESSAGE_BYTES = 16 * 2**20
DEFAULT_SHARE_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """All that one process has to do. At most one trainer rank and one engine rank live in a process.

    Attributes:
        fingerprint: of the whole plan; the same on all processes.
        num_processes: that the plan speaks of: their numbers lie below it. ``process`` is this one's.
        source_rank, target_rank: who lives in the process; None where it has no part on that side.
        source_process, target_process: of each trainer rank, of each engine rank: where a message comes from, goes to.
        sends, receives: in the order of their numbers. A process that has both posts them merged by number.
        local: pieces copied in the process, in the order of layers.
        tensors: of this engine rank (as its TargetLayout says); what ``local``, ``receives`` and ``fills`` make whole.
        fills: constants of this engine rank.
        source_shards: (name, shape of the local tensor, dtype as stored) of each tensor that this process gives a part
            of, as the plan takes it.
    """

    fingerprint: str
    process: int
    num_processes: int
    source_rank: int | None
    target_rank: int | None
    source_process: tuple[int, ...]
    target_process: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    local: tuple[Piece, ...]
    tensors: tuple[TargetTensor, ...]
    fills: tuple[Fill, ...]
    source_shards: tuple[tuple[str, Shape, torch.dtype], ...]


def plan_transfers(
    source: SourceLayout,
    targets: Sequence[TargetLayout],
    *,
    source_process: Sequence[int] | None = None,
    target_process: Sequence[int] | None = None,
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    min_share_bytes: int = DEFAULT_SHARE_BYTES,
) -> ReshardPlan:
    """Plan the transfers from a trained model into the engine ranks ``targets``. Pure: every process gets the same.

    An engine rank receives each element once for each of its tensors that reads it: one that two tensors read (an
    embedding and a head that are tied in the trained model and not in the engine) is sent twice.

    Args:
        targets: one layout per engine rank, of all engines. Equal ones (the same rank of several engines) are planned
            once.
        source_process, target_process: where each trainer rank and each engine rank lives; default: trainer rank r is
            process r, engine rank t is process ``source.num_ranks + t``.
        max_message_bytes: of one message.
        min_share_bytes: what replicas share between them isn't cut into less.

    Raises:
        ValueError: two trainer ranks, or two engine ranks, in one process; a copy of a tensor that isn't in ``source``
            or out of its bounds; one whose shape isn't that of the layout's ``sources``, or whose values their dtype
            doesn't hold; a tensor that the holdings don't cover.
    """
    if max_message_bytes < 16 or min_share_bytes < 16:
        raise ValueError(
            f"max_message_bytes={max_message_bytes}, min_share_bytes={min_share_bytes}: each must be 16 or more, "
            f"for any number to fit; the defaults are {DEFAULT_MESSAGE_BYTES} and {DEFAULT_SHARE_BYTES}."
        )
    source_process = _find_processes("source_process", source_process, source.num_ranks, 0)
    target_process = _find_processes("target_process", target_process, len(targets), source.num_ranks)
    tensors = {held.name: held for held in source.tensors}
    layer_of, num_layers = number_layers(tensors)
    at_hand = [_index_or_none(source_process, process) for process in target_process]
    builder = GroupBuilder(tensors, max_message_bytes, min_share_bytes)
    layouts = []
    for layout, its_targets in _distinct(targets):
        require_fitting(layout, tensors)
        layouts.append(builder.build(layout, its_targets, [at_hand[target] for target in its_targets], layer_of))
    sent = balance_senders([group for layout in layouts for group in layout.groups], source.num_ranks)
    settings = (source_process, target_process, max_message_bytes, min_share_bytes)
    return ReshardPlan(
        source=source,
        layouts=tuple(layouts),
        num_layers=num_layers,
        source_process=source_process,
        target_process=target_process,
        max_message_bytes=max_message_bytes,
        sent=sent,
        digest=_digest(source, layouts, builder, settings),
    )


class ReshardPlan:
    """What ``plan_transfers`` makes: asked for one process's messages, for sums of bytes, for a table.

    Attributes:
        num_processes: one more than the largest number of a process.
    """

    def __init__(
        self,
        *,
        source: SourceLayout,
        layouts: tuple[LayoutGroups, ...],
        num_layers: int,
        source_process: tuple[int, ...],
        target_process: tuple[int, ...],
        max_message_bytes: int,
        sent: Ints,
        digest: str,
    ) -> None:
        """By ``plan_transfers``. ``sent``: bytes per trainer rank. ``digest``: of all that was planned from."""
        self.num_processes = 1 + max((*source_process, *target_process), default=-1)
        self._tensors = {held.name: held for held in source.tensors}
        self._layouts = layouts
        self._num_layers = num_layers
        self._source_process = source_process
        self._target_process = target_process
        self._max_message_bytes = max_message_bytes
        self._sent = sent
        self._digest = digest
        self._place = {target: (layout, i) for layout in layouts for i, target in enumerate(layout.targets)}
        self._largest = max((largest_message(layout, len(source_process)) for layout in layouts), default=0)
        self._bounds: dict[tuple[int, int | None], int] = {}

    @property
    def fingerprint(self) -> str:
        """Equal on all processes that planned from equal descriptions, or were sent the plan, and that make the same
        messages of it: not where versions of this package differ in that."""
        return f"{PLAN_FORMAT}-{self._digest}"

    @property
    def num_ranks(self) -> int:
        """Trainer ranks."""
        return len(self._source_process)

    @property
    def num_targets(self) -> int:
        """Engine ranks."""
        return len(self._target_process)

    @property
    def peak_buffer_bytes(self) -> int:
        """No message is larger: what one message in flight takes, on either side."""
        return min(self._max_message_bytes, self._largest)

    @property
    def imbalance(self) -> float:
        """Bytes sent by the trainer rank that sends most, over the mean of all; 1 where nothing is sent."""
        return float(self._sent.max() / self._sent.mean()) if self._sent.any() else 1.0

    def bytes_sent(self, rank: int) -> int:
        """By a trainer rank, on the wire."""
        return int(self._sent[rank])

    def bytes_received(self, target: int) -> int:
        """By an engine rank, on the wire."""
        return self._count_bytes(target, remote=True)

    def bytes_local(self, target: int) -> int:
        """What an engine rank gets within its process."""
        return self._count_bytes(target, remote=False)

    def lower_bound(self, target: int) -> int:
        """The least that this engine rank must receive: the distinct elements that it reads and its process doesn't
        hold, in the dtype that travels. What two of its tensors read, and it therefore gets twice, counts once."""
        layout, _ = self._place[target]
        at_hand = self._rank_in(self._target_process[target])
        key = (layout.targets[0], at_hand)
        if key not in self._bounds:
            self._bounds[key] = lower_bound(layout.layout, self._tensors, at_hand)
        return self._bounds[key]

    def messages_of(self, process: int) -> ProcessView:
        """What ``process`` sends, receives and copies. Costs memory and time for its own messages only.
        Python's garbage collector pauses meanwhile, in the whole process."""
        with pause_collector():
            return self._view(process)

    def _view(self, process: int) -> ProcessView:
        rank, target = self._rank_in(process), _index_or_none(self._target_process, process)
        sends: list[Message] = []
        if rank is not None:
            for layout in self._layouts:
                sends.extend(self._messages(layout, range(len(layout.targets)), rank))
        receives: list[Message] = []
        local: tuple[Piece, ...] = ()
        layout_of_target = TargetLayout(tensors=(), copies=(), fills=())
        if target is not None:
            groups, instance = self._place[target]
            layout_of_target = groups.layout
            receives.extend(self._messages(groups, [instance], None))
            local = tuple(local_pieces(groups, instance))
        given = {piece.source.name for pieces in (*(message.pieces for message in sends), local) for piece in pieces}
        return ProcessView(
            fingerprint=self.fingerprint,
            process=process,
            num_processes=self.num_processes,
            source_rank=rank,
            target_rank=target,
            source_process=self._source_process,
            target_process=self._target_process,
            sends=tuple(sorted(sends, key=lambda message: message.number)),
            receives=tuple(sorted(receives, key=lambda message: message.number)),
            local=local,
            tensors=layout_of_target.tensors,
            fills=layout_of_target.fills,
            source_shards=() if rank is None else self._source_shards(rank, given),
        )

    def traffic(self) -> Ints:
        """[trainer ranks, engine ranks]: bytes on the wire."""
        result = np.zeros((self.num_ranks, self.num_targets), np.int64)
        for layout in self._layouts:
            for group in layout.groups:
                for instance, target in enumerate(layout.targets):
                    for pattern, count in _count_patterns(group, instance):
                        senders = group.pick_senders(pattern, instance)
                        there = senders >= 0
                        num_bytes = group.num_bytes[there] * count
                        np.add.at(result[:, target], group.table.rank[senders[there]], num_bytes)
        return result

    def summary(self) -> PlanSummary:
        """The sums that the table and the JSON show."""
        targets = range(self.num_targets)
        kinds: dict[tuple[str, str], int] = defaultdict(int)
        for layout in self._layouts:
            for group in layout.groups:
                num_bytes = int((group.num_bytes * group.num_remote).sum())
                for index in group.members:
                    name = re.sub(r"\d+", "*", layout.layout.copies[index].source)
                    kinds[name, str(group.wire_dtype).removeprefix("torch.")] += num_bytes
        return PlanSummary(
            fingerprint=self.fingerprint,
            num_layouts=len(self._layouts),
            sent=tuple(self._sent.tolist()),
            received=tuple(map(self.bytes_received, targets)),
            local=tuple(map(self.bytes_local, targets)),
            lower_bounds=tuple(map(self.lower_bound, targets)),
            imbalance=self.imbalance,
            peak_buffer_bytes=self.peak_buffer_bytes,
            kinds=tuple((*kind, num_bytes) for kind, num_bytes in kinds.items()),
            traffic=Traffic.from_array(self.traffic()),
        )

    def to_json(self) -> str:
        """The summary, as text."""
        return self.summary().to_json()

    def table(self) -> str:
        """The summary, to read."""
        return self.summary().to_text()

    def _rank_in(self, process: int) -> int | None:
        return _index_or_none(self._source_process, process)

    def _source_shards(self, rank: int, names: Collection[str]) -> tuple[tuple[str, Shape, torch.dtype], ...]:
        tensors = [held for held in self._tensors.values() if held.name in names]
        shapes = find_local_shapes(tensors, rank)
        return tuple((held.name, shape, held.dtype) for held, shape in zip(tensors, shapes, strict=True))

    def _count_bytes(self, target: int, *, remote: bool) -> int:
        layout, instance = self._place[target]
        return sum(
            len(group.members) * int(group.num_bytes[group.remote(instance) == remote].sum()) for group in layout.groups
        )

    def _messages(self, layout: LayoutGroups, instances: Iterable[int], rank: int | None) -> Iterator[Message]:
        """Messages to some instances of a layout: of one trainer rank, or of all."""
        packer = Packer(layout, self._max_message_bytes, rank)
        num_rounds = max(self.num_ranks, self.num_targets)
        max_parts = 1 + 2 * -(-self._largest // self._max_message_bytes)
        for instance in instances:
            target = layout.targets[instance]
            for layer in layout.layers:
                for sender, messages in packer.pack(layer, instance).items():
                    # Round by round, in each of which a rank meets another partner.
                    round_index = (target - sender) % num_rounds
                    place = ((layer * num_rounds + round_index) * self.num_ranks + sender) * max_parts
                    for part, pieces in enumerate(messages):
                        yield Message(number=place + part, source_rank=sender, target_rank=target, pieces=pieces)


def _count_patterns(group: CopyGroup, instance: int) -> list[tuple[int, int]]:
    """(a member, how many members have the same senders as it), for one instance."""
    counts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for member in range(len(group.members)):
        counts[group.pattern(member, instance)].append(member)
    return [(members[0], len(members)) for members in counts.values()]


def _find_processes(field: str, given: Sequence[int] | None, count: int, first: int) -> tuple[int, ...]:
    processes = tuple(range(first, first + count)) if given is None else tuple(given)
    if len(processes) != count or len(set(processes)) != count or min(processes, default=0) < 0:
        raise ValueError(
            f"{field}={list(processes)}: {count} different numbers from 0 are needed, one per rank; in a process lives "
            "one trainer rank and one engine rank at most."
        )
    return processes


def _index_or_none(values: Sequence[int], value: int) -> int | None:
    return values.index(value) if value in values else None


def _distinct(targets: Sequence[TargetLayout]) -> list[tuple[TargetLayout, list[int]]]:
    """Layouts and the targets that have each. By identity first: comparing large ones takes long."""
    first_of: dict[int, TargetLayout] = {}
    by_value: dict[TargetLayout, TargetLayout] = {}
    result: dict[int, tuple[TargetLayout, list[int]]] = {}
    for target, layout in enumerate(targets):
        if id(layout) not in first_of:
            first_of[id(layout)] = by_value.setdefault(layout, layout)
        first = first_of[id(layout)]
        result.setdefault(id(first), (first, []))[1].append(target)
    return list(result.values())


def _digest(source: SourceLayout, layouts: Sequence[LayoutGroups], builder: GroupBuilder, settings: object) -> str:
    """Equal on every process: made from values, in the plan's own order, not from Python's hashes."""
    digest = hashlib.sha256(repr(settings).encode())
    tables: dict[int, int] = {}
    for held in source.tensors:
        table = builder.table_of(held)
        if id(table) not in tables:
            tables[id(table)] = len(tables)
            digest.update(table.as_bytes())
        digest.update(repr((held.name, held.shape, held.dtype, held.wire_dtype, tables[id(table)])).encode())
    for layout in layouts:
        digest.update(repr((layout.targets, layout.layout)).encode())
    return digest.hexdigest()
