"""New weights for a vLLM model that serves: in place, layer by layer, by vLLM's own reload.

vLLM puts a layer's parameters back to their load-time layout, counts what its loaders bring, and once a layer is whole
converts it to its kernels' format into the memory that it had. Two things may be brought: whole tensors of a checkpoint
(``load``), or parameters of this rank as a plan has filled them (``sink``).

On the CPU two conversions run only on the first load, so they are repeated here: the experts' prepacking, and the
packed copy of an output layer that shares the embedding's weight. Without them a reload leaves 2.9 nats and 1 nat of
error. And experts whose size the kernels have padded (to a multiple of 32, on each rank) can't be reloaded at all
without ``unpad_for_cpu``.

Written for vLLM 0.32, like all of ``vllm_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moesaic.engines.base import Sources
from moesaic.engines.vllm_layout import find_missing_biases, zero_biases
from moesaic.reshard.layout import TargetLayout


class LiveModel:
    """A model that serves, from ``begin`` to ``finish`` of an update.

    Args:
        model: a worker's, as ``get_model`` gives it.
        vllm_config: that worker's.
        sources: the checkpoint's keys, with shapes and dtypes.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, sources: Sources) -> None:
        self._model = model
        self._config = vllm_config
        self._sources = sources
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        self._missing_biases = find_missing_biases(model, sources)
        # Parameters whose loader was replaced, and the one that they had.
        self._replaced: list[tuple[torch.Tensor, Callable[..., Any]]] = []
        self._due: set[str] = set()  # keys of files or names of parameters, still to come
        self.is_updating = False

    def begin(self) -> None:
        """Put every parameter back to its load-time layout; their values stay with vLLM until a layer is whole."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.is_updating:
            self.abort()
        if self._on_cpu:
            unpad_for_cpu(self._model)
        initialize_layerwise_reload(self._model)
        self._due = set(self._sources)
        self.is_updating = True

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Whole tensors of the checkpoint; vLLM keeps references to them until their layers are whole.

        Raises:
            ValueError: one isn't of the checkpoint, or came before.
        """
        names = [name for name, _ in weights]
        unknown = [name for name in names if name not in self._due]
        if unknown:
            raise ValueError(f"{unknown[0]}: not a tensor of the checkpoint, or it came twice in this update.")
        is_first = len(self._due) == len(self._sources)
        zeros = zero_biases(self._missing_biases, self._sources) if is_first else []
        self._model.load_weights([*zeros, *weights])  # type: ignore[operator]
        self._due.difference_update(names)

    def sink(self, layout: TargetLayout) -> LiveSink:
        """Where a plan puts what arrives for this rank, whose layout is ``layout``."""
        self._due = {tensor.name for tensor in layout.tensors}
        return LiveSink(self, layout)

    def place(self, name: str, values: torch.Tensor) -> None:
        """Hand over a whole parameter of this rank (or a buffer that is loaded), in load-time layout.

        Raises:
            RuntimeError: vLLM takes its layer for whole already, and would drop it.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        layer_name, _, short = name.rpartition(".")
        layer = self._model.get_submodule(layer_name)
        parameter = getattr(layer, short)
        if short in SKIP_LOAD_TENSORS:
            # The reload left it as it is, and doesn't count it: brought last, it would be dropped.
            parameter.data.copy_(values)
        elif not get_layerwise_info(layer).can_load():
            raise RuntimeError(f"{name}: vLLM has ended the reload of its layer before it came")
        else:
            self._replaced.append((parameter, parameter.weight_loader))
            parameter.weight_loader = _copy_whole
            make_online_process_loader(layer, short)(parameter, values)
        self._due.remove(name)

    def finish(self) -> None:
        """All has been brought: convert what is left.

        Raises:
            RuntimeError: something is missing; what wasn't whole is as it was.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._due:
            missing = sorted(self._due)
            self.abort()
            raise RuntimeError(f"the update didn't bring {', '.join(missing[:3])} ({len(missing)} tensors in all)")
        finalize_layerwise_reload(self._model, self._config.model_config)
        self._restore_loaders()
        if self._on_cpu:
            repack_for_cpu(self._model)
        self.is_updating = False

    def abort(self) -> None:
        """Give up: layers that were whole keep their new weights, the others their old ones (padded
        experts on the CPU: none). The engine must not generate before a whole update."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # As if nothing had come: then the reload's end puts the old tensors back.
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self._model, self._config.model_config)
        self._restore_loaders()
        self._due.clear()
        self.is_updating = False

    def _restore_loaders(self) -> None:
        for parameter, loader in self._replaced:
            parameter.weight_loader = loader  # type: ignore[attr-defined]
        self._replaced.clear()


class LiveSink:
    """A plan's destination: local memory in load-time layout, each parameter handed over once it is whole."""

    def __init__(self, live: LiveModel, layout: TargetLayout) -> None:
        self._live = live
        self._tensors = {tensor.name: tensor for tensor in layout.tensors}
        self._open: dict[str, torch.Tensor] = {}

    def open(self, name: str) -> torch.Tensor:
        """Memory for a parameter; the same one until ``close``."""
        if name not in self._open:
            tensor = self._tensors[name]
            self._open[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._open[name]

    def close(self, name: str) -> None:
        """Every element of the parameter has arrived."""
        self._live.place(name, self._open.pop(name))


def unpad_for_cpu(model: torch.nn.Module) -> None:
    """Give experts that vLLM's CPU kernels have padded their load-time shape again; what they hold is lost. vLLM copies
    reloaded values into the memory of the old ones, which here has another shape."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.utils import replace_parameter

    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            for name, described in parameters.items():
                if getattr(layer, name).shape != described.shape:
                    replace_parameter(layer, name, torch.empty(described.shape, dtype=described.dtype))


def repack_for_cpu(model: torch.nn.Module) -> None:
    """What vLLM's CPU kernels keep beside the parameters, made again from new values."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _copy_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """The loader of a parameter whose values are this rank's already. vLLM calls it again with another ``param``, by
    that name."""
    param.data.copy_(loaded_weight)
