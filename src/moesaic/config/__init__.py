"""The recipe: what a run is told, read and checked before anything starts. Never imports torch."""

from moesaic.config.check import check_recipe, num_micro_batches, resolve_sizes
from moesaic.config.load import dump_recipe, load_recipe, load_saved_recipe, save_recipe
from moesaic.config.parallel import ParallelSizes
from moesaic.config.problem import Problem, RecipeError
from moesaic.config.recipe import (
    DatasetConfig,
    DistConfig,
    DumpConfig,
    Fsdp2Config,
    FsdpTurboConfig,
    InitConfig,
    KernelConfig,
    LrSchedulerConfig,
    MoesaicConfig,
    OptimConfig,
    Recipe,
    TrainDatasetConfig,
)

__all__ = [
    "DatasetConfig",
    "DistConfig",
    "DumpConfig",
    "Fsdp2Config",
    "FsdpTurboConfig",
    "InitConfig",
    "KernelConfig",
    "LrSchedulerConfig",
    "MoesaicConfig",
    "OptimConfig",
    "ParallelSizes",
    "Problem",
    "Recipe",
    "RecipeError",
    "TrainDatasetConfig",
    "check_recipe",
    "dump_recipe",
    "load_recipe",
    "load_saved_recipe",
    "num_micro_batches",
    "resolve_sizes",
    "save_recipe",
]
