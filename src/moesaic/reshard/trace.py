"""Where an engine's own loader puts every element of the files: one run of it, over tensors without data.

The loader gets meta tensors, and a dispatch mode sees every operation that it does on them. Views run: their geometry
says what they are. ``copy_`` to a parameter isn't executed but recorded, and so are ``fill_`` and ``zero_``; what makes
a new tensor of old ones (``cat``, ``stack``, ``clone``, ``contiguous``, a cast) is a memory that remembers where its
elements are from. Everything else that touches such a tensor raises: a loader that computes values can't be planned.

No process group is needed, and the parameters' memory is never touched: a rank of any engine can be traced anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from moesaic.reshard.coverage import settle
from moesaic.reshard.layout import Copy, Fill, Shape, SourceTensor, TargetLayout, TargetTensor
from moesaic.reshard.lift import lift_copies
from moesaic.reshard.record import Ledger, Memory
from moesaic.reshard.recorder import META, Recorder
from moesaic.reshard.strides import Box


def trace_loader(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, tuple[Shape, torch.dtype]],
    *,
    may_skip: Callable[[str], bool] = lambda key: False,
) -> TargetLayout:
    """Run ``load`` once, and say where each element of ``targets`` is from. No communication; one process.

    Args:
        load: an engine's loader, given (key, tensor) pairs in the order of ``sources``. Freshly built model: what a
            model does to its parameters after loading changes their layout.
        targets: name -> parameter, contiguous: of ``model.named_parameters()``, not their ``.data``, on which a loader
            that gives a parameter other memory couldn't be seen. They are not written to. One that lies in the memory
            of an earlier one (tied weights) isn't in the result.
        sources: key in the files -> shape and dtype there.
        may_skip: whether the rank may leave a key's tensor alone: other ranks' experts, other pipeline stages' layers.

    Returns:
        The copies are in the files' keys (``Copy.source``), target by target, for each in the loader's order; runs of
        equal ones are lifted to one.
        Dims of 1 aren't in them.

    Raises:
        ValueError: the loader does to a tensor what isn't understood (named: the operation and the tensor); an element
            of a target is written never, or twice; a tensor of the files isn't used that has to be; a target isn't
            contiguous, or was replaced by another tensor.
    """
    ledger = Ledger()
    own = _watch_targets(ledger, targets)
    pairs = []
    for key, (shape, dtype) in sources.items():
        tensor = torch.empty(shape, dtype=dtype, device=META)
        ledger.add(Memory("source", key, tensor, tuple(shape)))
        pairs.append((key, tensor))
    recorder = Recorder(ledger)
    before = {name: _place(tensor) for name, tensor in targets.items()}
    with torch.no_grad(), recorder:
        try:
            load(iter(pairs))
        except Exception:
            if recorder.problem is not None:
                raise recorder.problem from None
            raise
    if recorder.problem is not None:  # the loader caught it
        raise recorder.problem
    moved = [name for name, tensor in targets.items() if _place(tensor) != before[name]]
    if moved:
        raise ValueError(
            f"the loader gave {moved[0]} another memory while loading: where its elements are from can't be traced. "
            "Give the parameters that are loaded, before anything converts them."
        )
    layout = _build_layout(ledger, own, sources)
    _require_used(layout, ledger, sources, may_skip)
    return layout


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """What changes when a parameter is given other memory (``param.data = ...``)."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _watch_targets(ledger: Ledger, targets: Mapping[str, torch.Tensor]) -> list[Memory]:
    """Those with memory of their own: a tied one is watched under its first name."""
    own: list[Memory] = []
    known: dict[tuple[object, ...], str] = {}
    ends: dict[object, list[tuple[int, int, str]]] = {}
    for name, tensor in targets.items():
        place = _place(tensor)
        if place in known and tensor.numel():
            continue
        known[place] = name
        if not tensor.is_contiguous() or tensor.is_complex():
            kind = "complex" if tensor.is_complex() else f"laid out with strides {tuple(tensor.stride())}"
            raise ValueError(
                f"the engine's {name} of shape {tuple(tensor.shape)} is {kind}; only contiguous real tensors can be "
                "planned. Give the parameters as they are while weights are loaded."
            )
        start = int(tensor.storage_offset())
        for begin, end, other in ends.setdefault(place[0], []):
            if start < end and begin < start + tensor.numel():
                raise ValueError(f"the engine's {other} and {name} share a part of their memory; give one of them.")
        ends[place[0]].append((start, start + tensor.numel(), name))
        memory = Memory("target", name, tensor.detach(), tuple(tensor.shape), start)
        ledger.add(memory)
        own.append(memory)
    return own


def _build_layout(
    ledger: Ledger, targets: Sequence[Memory], sources: Mapping[str, tuple[Shape, torch.dtype]]
) -> TargetLayout:
    copies: list[Copy] = []
    fills: list[Fill] = []
    for memory in targets:
        dtype = memory.tensor.dtype
        for origin, written in settle(memory, ledger.boxes):
            walk = written.walk(memory.shape)
            if origin.key is None:
                fills.append(
                    Fill(
                        target=memory.name,
                        shape=tuple(count for count, _, _ in walk.dims),
                        target_offset=walk.a,
                        target_strides=tuple(stride for _, stride, _ in walk.dims),
                        value=origin.value,
                    )
                )
                continue
            if origin.lossy and origin.dtype != dtype:
                raise ValueError(
                    f"the loader rounds {origin.key} to {origin.dtype} on its way to {memory.name} of {dtype}. "
                    f"Give the files' tensors as {origin.dtype}, or load into parameters of it."
                )
            boxes = ledger.boxes.split(walk.swap(), tuple(sources[origin.key][0]))
            copies += [_build_copy(origin.key, memory.name, box) for box in boxes]
    tensors = [TargetTensor(name=memory.name, shape=memory.shape, dtype=memory.tensor.dtype) for memory in targets]
    used = {copy.source for copy in copies}
    return TargetLayout(
        tensors=tuple(tensors),
        copies=lift_copies(copies),
        fills=tuple(fills),
        sources=tuple(
            SourceTensor(name=key, shape=tuple(shape), dtype=dtype)
            for key, (shape, dtype) in sources.items()
            if key in used
        ),
    )


def _build_copy(key: str, target: str, box: Box) -> Copy:
    dims = [dim for dim, indices in enumerate(box.ranges) if len(indices) > 1]
    return Copy(
        source=key,
        target=target,
        shape=(*(count for count, _ in box.repeats), *(len(box.ranges[dim]) for dim in dims)),
        source_start=tuple(indices.start for indices in box.ranges),
        source_dims=(*(None for _ in box.repeats), *dims),
        source_steps=(*(1 for _ in box.repeats), *(box.ranges[dim].step for dim in dims)),
        target_offset=box.b,
        target_strides=(*(stride for _, stride in box.repeats), *(box.strides[dim] for dim in dims)),
    )


def _require_used(
    layout: TargetLayout,
    ledger: Ledger,
    sources: Mapping[str, tuple[Shape, torch.dtype]],
    may_skip: Callable[[str], bool],
) -> None:
    used = {copy.source for copy in layout.copies} | ledger.overwritten
    unused = [key for key, (shape, _) in sources.items() if math.prod(shape) and key not in used and not may_skip(key)]
    if unused:
        raise ValueError(
            f"the loader puts {len(unused)} tensors of the files nowhere: {', '.join(unused[:3])}"
            f"{', ...' if len(unused) > 3 else ''}. Either it doesn't know these names, or they go to tensors that "
            "aren't among the targets, or the rank doesn't hold them: then may_skip has to say so."
        )
