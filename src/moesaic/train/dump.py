"""Parameters and gradients of chosen steps, whole, for comparing two runs: ``moesaic diff A B``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from moesaic.config import DumpConfig
from moesaic.ops.gather import gather_to_rank_0

FOLDER = "dumps"


class Dumper:
    """Writes ``output_dir/dumps/step-000123/{grad,param}/<parameter>.safetensors``, global tensors in the type in which
    they are stored: the same files for every topology.

    ``param`` is the parameter after the step; ``grad`` the step's gradient, summed over ranks and micro-batches, before
    clipping (also of a step whose gradients aren't finite). A parameter that the step didn't use has zeros for one.

    Args:
        model: sharded.
        num_steps: optimizer steps of the run.

    Raises:
        ValueError: a glob matches no parameter (for ``grad``: none that is trained), or a step never comes.
    """

    def __init__(self, model: nn.Module, config: DumpConfig, output_dir: Path, num_steps: int) -> None:
        beyond = [step for step in config.steps if step > num_steps]
        if beyond:
            raise ValueError(f"dump.steps={beyond[0]}: the run ends after step {num_steps}; name earlier ones.")
        self._folder = output_dir / FOLDER
        self._steps = frozenset(config.steps)
        every = _named_parameters(model)
        self._params = {what: _match(every, config.params, what) for what in config.what}

    def is_due(self, step: int) -> bool:
        """Whether the recipe names ``step``."""
        return step in self._steps

    @torch.no_grad()
    def save(self, step: int, what: str) -> None:
        """Write ``what`` (``param`` or ``grad``) of ``step``, if the recipe asks for it. Every rank must call it.

        One tensor at a time is gathered to rank 0, which writes it; ``grad`` after backward and before clipping.
        """
        if what not in self._params:
            return
        folder = self._folder / f"step-{step:06d}" / what
        scratch = folder.with_name(folder.name + ".tmp")
        if dist.get_rank() == 0:
            for old in (scratch, folder):  # of an interrupted run, or of the same step before a resume
                shutil.rmtree(old, ignore_errors=True)
            scratch.mkdir(parents=True)
        for name, param in self._params[what].items():
            _save_one(scratch / f"{name}.safetensors", name, _value(param, what))
        if dist.get_rank() == 0:
            scratch.rename(folder)
        dist.barrier()


def _save_one(path: Path, name: str, tensor: torch.Tensor) -> None:
    """A function of its own, so that the gathered tensor is freed before the next is."""
    whole = gather_to_rank_0(tensor)
    if whole is not None:
        save_file({name: whole.cpu().contiguous()}, path)


def _value(param: nn.Parameter, what: str) -> torch.Tensor:
    if what == "param":
        return param.detach()
    return torch.zeros_like(param) if param.grad is None else param.grad


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the Hugging Face module's own names; a tied one under its first."""
    # state_dict, not named_parameters: its hooks take the wrappers' prefixes away.
    named: dict[str, nn.Parameter] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) and all(tensor is not other for other in named.values()):
            named[name] = tensor
    return named


def _match(every: Mapping[str, nn.Parameter], globs: tuple[str, ...], what: str) -> dict[str, nn.Parameter]:
    """The parameters that a glob names, in the model's order."""
    named = {name: param for name, param in every.items() if what == "param" or param.requires_grad}
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in named):
            kind = "parameter" if what == "param" else "trained parameter"
            raise ValueError(
                f"dump.params={glob!r} matches no {kind} of the model. Its names are like {next(iter(named), None)!r}; "
                "a * stands for any characters, dots too."
            )
    return {name: param for name, param in named.items() if any(fnmatchcase(name, glob) for glob in globs)}
