"""Stands in for packages that SGLang imports for accelerators, images and sound, and that a text model on a CPU never
calls. Python imports this file by its name where its folder is on PYTHONPATH, in a server's child processes too.

What is asked of a stub is another stub, callable and false. It makes the imports work and nothing else: a server that
runs like this is not one that SGLang supports.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence

NAMES = frozenset(
    "av decord decord2 deep_ep deep_gemm flash_attn flash_mla flashinfer humming kernels modelscope sgl_kernel"
    " smg_grpc_servicer soundfile tilelang timm torch_memory_saver torchaudio torchvision".split()
)


class StubType(type):
    """A class whose attributes are stubs."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class Stub(metaclass=StubType):
    """Whatever was asked for. As a decorator it changes nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Stub()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __getitem__(self, key: object) -> object:
        return Stub()

    def __or__(self, other: object) -> object:
        return Stub()

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class StubModule(types.ModuleType):
    """A package whose names are stubs: classes where they begin with a capital."""

    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubType(name, (Stub,), {}) if name[:1].isupper() else Stub()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: what is installed is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_stub = fullname.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(StubFinder())
