"""Where a vLLM engine's own loader puts each element of a checkpoint: any rank's model is built on the CPU, and its
``load_weights`` is traced.

A rank's modules ask ``vllm.distributed.parallel_state`` for sizes and ranks only while they are built and loaded. With
``engine_rank`` stubs stand in for the groups, so that one process builds any rank of any engine:

    with engine_rank(folder, EngineRank(tp_size=2, tp_rank=1), dtype="float32") as model:
        layout = trace_model(model, sources, engine_rank=...)          # inside: the load asks too

A worker of a running engine has real groups and builds another model of its own class with ``fresh_model``. Parameters
are real and empty: memory that nothing touches isn't there. A model that serves already isn't traced: on the CPU, what
follows a load changes shapes.

Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moesaic.engines.base import Sources
from moesaic.reshard.coverage import require_complete
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.trace import trace_loader
from moesaic.weights.export import file_dtypes, find_layout, find_state

PARTS_OF_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """One rank of an engine. With ``expert_parallel`` experts are spread over dp x tp, as vLLM does."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    expert_parallel: bool = False

    @classmethod
    def all_of(
        cls, *, tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, expert_parallel: bool = False
    ) -> list[EngineRank]:
        """Every rank of an engine of these sizes: tp innermost, then pp, then dp, which is how vLLM numbers them."""
        return [
            cls(
                tp_size=tp_size,
                tp_rank=tp_rank,
                pp_size=pp_size,
                pp_rank=pp_rank,
                dp_size=dp_size,
                dp_rank=dp_rank,
                expert_parallel=expert_parallel,
            )
            for dp_rank in range(dp_size)
            for pp_rank in range(pp_size)
            for tp_rank in range(tp_size)
        ]


class _StubDeviceGroup:
    """The two questions that a loader asks a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _StubGroup:
    """What a group coordinator of vLLM tells about itself, and nothing that communicates (AttributeError if asked)."""

    def __init__(self, size: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.rank, self.local_rank = size, rank, rank, rank
        self.ranks = list(range(size))
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = _StubDeviceGroup(size, rank)
        self.use_device_communicator, self.device_communicator = False, None
        self.device = torch.device("cpu")
        self.unique_name = "stub"


def _stub_groups(rank: EngineRank) -> dict[str, _StubGroup | None]:
    """The globals of vLLM's ``parallel_state``."""
    world_size = rank.dp_size * rank.pp_size * rank.tp_size
    tp, one = _StubGroup(rank.tp_size, rank.tp_rank), _StubGroup(1, 0)
    return {
        "_WORLD": _StubGroup(world_size, (rank.dp_rank * rank.pp_size + rank.pp_rank) * rank.tp_size + rank.tp_rank),
        "_TP": tp,
        "_ETP": tp,
        "_PP": _StubGroup(rank.pp_size, rank.pp_rank),
        "_DP": _StubGroup(rank.dp_size, rank.dp_rank),
        "_PCP": one,
        "_DCP": one,
        # vLLM makes this group for every MoE model, expert parallel or not.
        "_EP": _StubGroup(rank.dp_size * rank.tp_size, rank.dp_rank * rank.tp_size + rank.tp_rank),
        "_EPLB": None,
    }


@functools.cache
def _base_config(folder: str, dtype: str) -> Any:
    """An engine's config of one rank, of which every rank's is a copy: it takes seconds to make."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=folder,
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=1,
        max_model_len=64,
        block_size=32,
    ).create_engine_config()


@contextlib.contextmanager
def fresh_model(vllm_config: Any) -> Iterator[torch.nn.Module]:
    """An unloaded model of ``vllm_config``'s class on the CPU, under the process's groups as they are; to be loaded
    inside the context."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models import utils as model_utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Layers register by name in this part of the config ("Duplicate layer name"), so each model has its own.
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # vLLM keeps the names that a pipeline stage lacks by id(model): a freed model's id comes again, and the next loader
    # would silently skip the wrong layers.
    missing_names = model_utils._model_to_pp_missing_layer_names
    kept = dict(missing_names)
    missing_names.clear()
    try:
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            model_class, _ = get_model_architecture(config.model_config)
            with torch.device("cpu"):
                model = model_class(vllm_config=config)
            yield model  # outside of the device's context, which would double a trace's time
    finally:
        missing_names.clear()
        missing_names.update(kept)


@contextlib.contextmanager
def engine_rank(folder: str | Path, rank: EngineRank, *, dtype: str = "float32") -> Iterator[torch.nn.Module]:
    """An unloaded model of one rank of an engine, without process groups; to be loaded inside the context.

    Args:
        folder: a checkpoint, of which the config is read.
        dtype: the engine's.
    """
    from vllm.distributed import parallel_state

    base = _base_config(str(folder), dtype)
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = rank.tp_size, rank.pp_size
    parallel.data_parallel_size, parallel.data_parallel_rank = rank.dp_size, rank.dp_rank
    parallel.enable_expert_parallel = rank.expert_parallel
    parallel.rank = rank.pp_rank * rank.tp_size + rank.tp_rank
    groups = _stub_groups(rank)
    before = {name: getattr(parallel_state, name) for name in groups}
    try:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        with fresh_model(config) as model:
            yield model
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def describe_files(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Sources:
    """The keys, shapes and dtypes that an export of ``model`` would have: what an engine's loader is traced with. Any
    rank may call, alone.

    Args:
        dtype: as in ``export_hf``.
    """
    state, _ = find_state(model)
    grids, shapes = find_layout(model, state)
    dtypes = file_dtypes(model, state, dtype)
    return {tile.key: (shapes[tile.key], dtypes[name]) for name, grid in grids.items() for tile in grid.tiles}


def load_targets(model: torch.nn.Module, sources: Iterable[str]) -> dict[str, torch.Tensor]:
    """What a loader writes to: all parameters, and the persistent buffers that the checkpoint has a tensor for (e.g.
    ``layers.0.layer_scalar`` of Gemma4), known by the last two parts of their names. Were another buffer loaded, its
    key would be one that no rank loads (``require_all_used``)."""
    ends = {_name_end(key) for key in sources}
    return dict(model.named_parameters()) | {
        name: buffer
        for name, buffer in model.named_buffers()
        if _name_end(name) in ends and _is_persistent(model, name)
    }


def _name_end(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _is_persistent(model: torch.nn.Module, name: str) -> bool:
    owner, _, short = name.rpartition(".")
    return short not in model.get_submodule(owner)._non_persistent_buffers_set


def trace_model(model: torch.nn.Module, sources: Sources) -> TargetLayout:
    """Where ``model``'s loader puts the tensors of a checkpoint, in the files' keys. Inside the context that built it.

    Args:
        sources: the checkpoint's keys, with shapes and dtypes.

    Raises:
        ValueError: an element of a target (``load_targets``) is written by nothing, or twice.
    """
    targets = load_targets(model, sources)
    missing_biases = find_missing_biases(model, sources)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name in missing_biases:
            targets[name].zero_()
        model.load_weights(weights)  # type: ignore[operator]

    # What this rank doesn't load, another one must: checked once all are known (``require_all_used``).
    layout = trace_loader(load, targets, sources, may_skip=lambda key: True)
    require_complete(layout, targets)
    return layout


def find_missing_biases(model: torch.nn.Module, sources: Iterable[str]) -> list[str]:
    """Fused biases of attention that the model has and the checkpoint hasn't: vLLM's Qwen2-MoE makes one whatever the
    config says, and leaves it as it came from memory."""
    prefixes = {key.rpartition(".")[0].rpartition(".")[0] for key in sources if key.endswith("q_proj.bias")}
    return [
        name
        for name, _ in model.named_parameters()
        if name.endswith(".qkv_proj.bias") and name.removesuffix(".qkv_proj.bias") not in prefixes
    ]


def zero_biases(names: Iterable[str], sources: Sources) -> list[tuple[str, torch.Tensor]]:
    """The zeros that ``load_weights`` needs for ``find_missing_biases``, under the names that files would have."""
    zeros = []
    for name in names:
        prefix = name.removesuffix(".qkv_proj.bias")
        for part in PARTS_OF_QKV:
            (size, *_), dtype = sources[f"{prefix}.{part}.weight"]
            zeros.append((f"{prefix}.{part}.bias", torch.zeros(size, dtype=dtype)))
    return zeros


def require_all_used(layouts: Sequence[TargetLayout], sources: Iterable[str]) -> None:
    """Each key of the checkpoint is loaded by some rank of the engine.

    Args:
        layouts: of all ranks of one engine, as traced: their copies name keys of files.

    Raises:
        ValueError: the loader ignores keys, so that the engine would go on with old values.
    """
    used = {piece.source for layout in layouts for piece in layout.copies}
    unused = sorted(set(sources) - used)
    if unused:
        raise ValueError(
            f"{unused[0]}{f' and {len(unused) - 1} more' if len(unused) > 1 else ''}: no rank of the engine loads it, "
            "and what it holds would never be updated. Some loaders take experts one by one only: name them so."
        )


def trace_engine(
    folder: str | Path, ranks: Sequence[EngineRank], sources: Sources, *, dtype: str = "float32"
) -> list[TargetLayout]:
    """The layouts of ``ranks``, all of one engine, in the files' keys. In one process, without groups.

    Raises:
        ValueError: from ``trace_model`` and ``require_all_used``.
    """
    layouts = []
    for rank in ranks:
        with engine_rank(folder, rank, dtype=dtype) as model:
            layouts.append(trace_model(model, sources))
    require_all_used(layouts, sources)
    return layouts
