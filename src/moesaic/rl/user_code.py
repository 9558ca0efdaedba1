"""A function of the user's own, by the name that a recipe gives it: ``rewards.py:score``."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_callable(name: str, field: str) -> Callable[..., Any]:
    """What ``file.py:name`` stands for. The file is seen from the working folder.

    Args:
        field: of the recipe, for messages.

    Raises:
        ValueError: no such file, it can't be imported, it has no such name, or what has it can't be called.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not attribute.isidentifier():
        raise ValueError(f"{field}={name!r}: a function is named as file.py:name, e.g. rewards.py:score.")
    try:
        module = import_file(Path(path))
    except ValueError as error:
        raise ValueError(f"{field}={name!r}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        there = [each for each in dir(module) if not each.startswith("_") and callable(getattr(module, each))]
        near = difflib.get_close_matches(attribute, there, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(there) or 'no function'}."
        raise ValueError(f"{field}={name!r}: {path} has no {attribute}; {hint}")
    if not callable(found):
        raise ValueError(f"{field}={name!r}: {attribute} is of type {type(found).__name__}, which can't be called.")
    return found


def import_file(path: Path) -> ModuleType:
    """The file as a module; run once in a process, however often it is asked for and by whatever path.

    It isn't part of a package, and its folder isn't searched for imports.

    Raises:
        ValueError: no such file, or what went wrong in it, and where.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path} (seen from {Path.cwd()}).")
    path = path.resolve()
    name = f"moesaic_user_{zlib.crc32(str(path).encode()):08x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):  # a file that exits would end the run, without a word
            raise
        raise ValueError(f"{path} can't be imported: {describe_error(error)}") from error
    return module


def describe_error(error: BaseException) -> str:
    """Type and message, and the line it comes from. Example: ``KeyError: 'x' (rewards.py:3)``."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
