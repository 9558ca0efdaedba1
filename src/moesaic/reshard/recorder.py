"""Sees what a loader does to tensors of the files, and passes it to the ledger instead of doing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.reshard.record import Ledger

aten = torch.ops.aten
# Views in name that change what the values are.
REINTERPRETING = (
    aten.view.dtype,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten._conj.default,
    aten._neg_view.default,
)
META = torch.device("meta")
# What makes memory -> what is in it: a constant (float); the argument that says so (int); nothing yet (None).
FACTORIES: Mapping[str, float | int | None] = MappingProxyType(
    {
        **dict.fromkeys(("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"), None),
        **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0),
        **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
        "scalar_tensor": 0,
        "full": 1,
        "full_like": 1,
        "new_full": 2,
    }
)


class Recorder(TorchDispatchMode):
    """Passes each operation to what records it; ``problem`` is the first that couldn't be."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.problem: ValueError | None = None
        self._ledger = ledger
        self._views: dict[Any, bool] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {
            aten.copy_.default: self._copy_,
            aten._foreach_copy_.default: self._foreach_copy_,
            aten.fill_.Scalar: self._fill_,
            aten.fill_.Tensor: self._copy_,
            aten.zero_.default: self._zero_,
            aten.clone.default: self._copy,
            aten._to_copy.default: self._copy,
            aten.cat.default: self._cat,
            aten.stack.default: self._stack,
            aten.repeat.default: self._repeat,
            aten.constant_pad_nd.default: self._pad,
            aten.index_select.default: self._index_select,
        }
        for name, value in FACTORIES.items():
            packet = getattr(aten, name)
            for overload in packet.overloads():
                if "out" not in overload:
                    self._handlers[getattr(packet, overload)] = functools.partial(self._create, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of the loader."""
        kwargs = kwargs or {}
        if self._is_view(func):
            return func(*args, **kwargs)
        try:
            handler = self._handlers.get(func)
            if handler is not None:
                return handler(func, args, kwargs)
            watched = self._ledger.describe(_tensors((args, tuple(kwargs.values()))))
            if watched is None:
                return func(*args, **kwargs)
            if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                with self:  # under inference_mode they come as they are
                    return func.decompose(*args, **kwargs)
            raise ValueError("it isn't an operation that only moves values")
        except ValueError as problem:
            if self.problem is None:
                watched = self._ledger.describe(_tensors((args, tuple(kwargs.values()))))
                self.problem = ValueError(
                    f"the loader calls {func} on {watched or 'a tensor'}, which can't be planned: {problem}"
                )
            raise self.problem from problem

    def _is_view(self, func: Any) -> bool:
        found = self._views.get(func)
        if found is None:
            composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            found = func is aten._unsafe_view.default or (func.is_view and not composite and func not in REINTERPRETING)
            self._views[func] = found
        return found

    def _watches(self, *tensors: object) -> bool:
        return self._ledger.describe(_tensors(tensors)) is not None

    def _copy_(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, value = args[:2]
        if not self._watches(target, value):
            return func(*args, **kwargs)
        self._ledger.write(target, value)
        return target

    def _foreach_copy_(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._watches(*args[:2]):
            return func(*args, **kwargs)
        for target, value in zip(args[0], args[1], strict=True):
            self._ledger.write(target, value)
        return None

    def _fill_(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._watches(args[0]):
            return func(*args, **kwargs)
        self._ledger.fill(args[0], float(args[1]))
        return args[0]

    def _zero_(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._watches(args[0]):
            return func(*args, **kwargs)
        self._ledger.fill(args[0], 0.0)
        return args[0]

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``clone`` and casts."""
        if not self._watches(args[0]):
            return func(*args, **kwargs)
        new = _run_on_meta(func, args, kwargs)
        self._ledger.write(new, args[0])
        return new

    def _create(self, value: float | int | None, func: Any, args: Any, kwargs: Any) -> Any:
        """New memory: only what has no values itself needs watching."""
        if self._watches(*args):
            new = _run_on_meta(func, args, kwargs)
        else:
            new = func(*args, **kwargs)
            if not new.is_meta:
                return new
        self._ledger.watch(new)
        if value is not None:
            self._ledger.fill(new, value if isinstance(value, float) else float(args[value]))
        return new

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._watches(args[0]):
            return func(*args, **kwargs)
        new = _run_on_meta(func, args, kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        start = 0
        for tensor in args[0]:
            if tensor.dim() != new.dim():  # an empty list of numbers, which cat lets pass
                continue
            self._ledger.write(new.narrow(dim, start, tensor.shape[dim]), tensor)
            start += tensor.shape[dim]
        return new

    def _stack(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._watches(args[0]):
            return func(*args, **kwargs)
        new = _run_on_meta(func, args, kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for index, tensor in enumerate(args[0]):
            self._ledger.write(new.select(dim, index), tensor)
        return new

    def _repeat(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, repeats = args
        if not self._watches(tensor):
            return func(*args, **kwargs)
        new = _run_on_meta(func, args, kwargs)
        if new.numel():
            once = tensor
            for dim in range(tensor.dim()):
                once = once.unsqueeze(2 * dim)
            sizes = [1] * (len(repeats) - tensor.dim()) + list(tensor.shape)
            self._ledger.write(new.view([n for pair in zip(repeats, sizes, strict=True) for n in pair]), once)
        return new

    def _pad(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, pad = args[:2]
        if not self._watches(tensor):
            return func(*args, **kwargs)
        if min(pad) < 0:
            raise ValueError("padding is negative")
        new = _run_on_meta(func, args, kwargs)
        inner = new
        for index in range(len(pad) // 2):
            dim = tensor.dim() - 1 - index
            inner = inner.narrow(dim, pad[2 * index], tensor.shape[dim])
        self._ledger.fill(new, float(args[2] if len(args) > 2 else kwargs.get("value", 0.0)))
        self._ledger.write(inner, tensor)
        return new

    def _index_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, dim, index = args
        if not self._watches(tensor):
            return func(*args, **kwargs)
        if self._watches(index):
            raise ValueError("the index is made from the files")
        new = _run_on_meta(func, args, kwargs)
        for at, chosen in enumerate(index.tolist()):
            self._ledger.write(new.select(dim, at), tensor.select(dim, chosen))
        return new


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """Those among an operation's arguments, in lists too."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _run_on_meta(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The result's shape, strides and dtype, in memory of its own."""
    kept = {name: _to_meta(value) for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if "device" in kwargs or "pin_memory" in kwargs:
        kept["device"] = META
    result = func(*_to_meta(args), **kept)
    assert isinstance(result, torch.Tensor)
    return result


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (tuple, list)):
        return type(value)(_to_meta(part) for part in value)
    return value
