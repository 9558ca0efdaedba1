"""Vectors: what another implementation gives for known inputs, frozen in one file that says how it was made.

A file is safetensors. Its header's metadata has ``made_by`` (versions, seed) and ``cases``; each case names the tensors
that it takes and gives, and equal tensors lie in the file once.

Inputs are multiples of 1/1024, from integers drawn by a seeded generator: they are the same bits on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STEPS_OF_ONE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the other implementation.

    Attributes:
        kind: what was called: the formula.
        name: which call of it.
        options: its settings, under the other implementation's names; JSON.
        inputs: tensors that it was given.
        outputs: what came of it.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """One file.

    Attributes:
        made_by: versions of what made it, and the seed.
    """

    made_by: Mapping[str, str]
    cases: Sequence[Case]

    def of_kind(self, kind: str) -> dict[str, Case]:
        """The cases of one kind by name; there is at least one."""
        found = {case.name: case for case in self.cases if case.kind == kind}
        assert found, f"no case of {kind}"
        return found


def save_vectors(path: Path, vectors: Vectors) -> None:
    """Write the file, in the order of the cases: the same vectors give the same bytes."""
    keys: dict[tuple[str, torch.Size, bytes], str] = {}
    tensors: dict[str, Tensor] = {}

    def key_of(tensor: Tensor) -> str:
        tensor = tensor.detach().contiguous()
        identity = (str(tensor.dtype), tensor.shape, tensor.numpy().tobytes())
        if identity not in keys:
            keys[identity] = f"{len(keys)}"
            tensors[keys[identity]] = tensor.clone()
        return keys[identity]

    cases = [
        {
            "kind": case.kind,
            "name": case.name,
            "options": dict(case.options),
            "inputs": {name: key_of(tensor) for name, tensor in case.inputs.items()},
            "outputs": {name: key_of(tensor) for name, tensor in case.outputs.items()},
        }
        for case in vectors.cases
    ]
    # Sorted by safetensors; one entry of metadata, because the order of several isn't kept.
    metadata = json.dumps({"made_by": dict(vectors.made_by), "cases": cases}, separators=(",", ":"), sort_keys=True)
    save_file(tensors, path, metadata={"vectors": metadata})


def load_vectors(path: Path) -> Vectors:
    """Read what ``save_vectors`` wrote; no two tensors share memory."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["vectors"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    cases = [
        Case(
            kind=case["kind"],
            name=case["name"],
            options=case["options"],
            inputs={name: tensors[key].clone() for name, key in case["inputs"].items()},
            outputs={name: tensors[key].clone() for name, key in case["outputs"].items()},
        )
        for case in header["cases"]
    ]
    return Vectors(made_by=header["made_by"], cases=cases)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| / max |expected|; 0 if both are 0 throughout, infinite for another shape or a NaN."""
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    off = float((found - expected).abs().max())
    return 0.0 if off == 0 else off / max(float(expected.abs().max()), 1e-30)


def differences(found: Vectors, expected: Vectors, tolerance: float) -> list[str]:
    """What of ``found`` isn't as ``expected``, a line each: cases, options, inputs bit by bit, outputs to tolerance."""
    problems = []
    there = {(case.kind, case.name): case for case in expected.cases}
    made = {(case.kind, case.name): case for case in found.cases}
    problems += [f"{kind}/{name}: not in the file" for kind, name in made.keys() - there.keys()]
    problems += [f"{kind}/{name}: only in the file" for kind, name in there.keys() - made.keys()]
    for key in made.keys() & there.keys():
        one, other = asdict(made[key]), asdict(there[key])
        label = "/".join(key)
        if json.loads(json.dumps(one["options"])) != other["options"]:
            problems.append(f"{label}: options {one['options']}, in the file {other['options']}")
        for part, allowed in (("inputs", 0.0), ("outputs", tolerance)):
            if one[part].keys() != other[part].keys():
                problems.append(f"{label}: {part} {sorted(one[part])}, in the file {sorted(other[part])}")
                continue
            for name, tensor in one[part].items():
                error = relative_error(tensor, other[part][name])
                if tensor.dtype != other[part][name].dtype or error > allowed:
                    problems.append(f"{label}: {part}.{name} differs by {error:.1e} (relative; allowed {allowed:.0e})")
    return sorted(problems)


class Draw:
    """Inputs from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int, low: float, high: float) -> Tensor:
        """fp32 multiples of 1/1024 in [low, high], evenly."""
        steps = torch.randint(
            round(low * STEPS_OF_ONE), round(high * STEPS_OF_ONE) + 1, shape, generator=self._generator
        )
        return steps.float() / STEPS_OF_ONE

    def integers(self, *shape: int, high: int) -> Tensor:
        """int64 in [0, high)."""
        return torch.randint(high, shape, generator=self._generator)

    def choice(self, *shape: int, of: Sequence[float]) -> Tensor:
        """fp32, each one of a few numbers."""
        return torch.tensor(of)[self.integers(*shape, high=len(of))]


def rounded(computed: Tensor) -> Tensor:
    """To multiples of 1/1024: an input that was computed, without what a machine's rounding puts into it."""
    return (computed * STEPS_OF_ONE).round() / STEPS_OF_ONE


def ragged_mask(lengths: Sequence[int], num_tokens: int) -> Tensor:
    """[B, T] int64: so many ones in each row, from the left."""
    return (torch.arange(num_tokens) < torch.tensor(lengths)[:, None]).long()
