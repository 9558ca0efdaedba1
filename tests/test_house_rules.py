"""The rules that the code keeps by itself. Each rule is shown first to catch what it is there for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest

import moesaic
from tests import house_rules as rules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "moesaic"
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
ALL_FILES = [
    file
    for folder in ("src", "tests", "bench", "quickstart", "tools")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
OPTIONAL_PACKAGES = ("triton", "fla", "vllm", "sglang", "ray", "peft", "wandb")


def broken(rule: rules.Rule, source: str, path: str) -> list[str]:
    return list(rule(path, ast.parse(source)))


def report(found: Iterable[tuple[Path, str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}:{problem}" for path, problem in found)


CAUGHT = [
    (rules.import_order, "ops/x.py", "from moesaic.parallel.apply import parallelize"),
    (rules.import_order, "ops/x.py", "def f():\n    import moesaic.cli"),
    (rules.import_order, "config/x.py", "if TYPE_CHECKING:\n    from moesaic import meshes"),
    (rules.import_order, "train/x.py", "from moesaic import build_meshes"),
    (rules.import_order, "helpers.py", "x = 1"),
    (rules.torch_free, "config/x.py", "def f():\n    import torch"),
    (rules.torch_free, "specs/x.py", "from torch.distributed import init_process_group"),
    (rules.function_size, "x.py", "def f():\n" + "    x = 1\n" * 80),
    (rules.docstrings, "x.py", "x = 1"),
    (rules.docstrings, "x.py", "'''Doc.'''\ndef f(): ..."),
    (rules.docstrings, "x.py", "'''Doc.'''\nclass A:\n    '''Doc.'''\n    def f(self): ..."),
    (rules.host_reads, "ops/x.py", "n = counts.sum().item()"),
    (rules.host_reads, "dispatch/x.py", "n = counts.tolist()"),
    (rules.host_reads, "parallel/x.py", "y = x.cpu()"),
    (rules.host_reads, "parallel/x.py", "y = x.to('cpu')"),
    (rules.host_reads, "ops/x.py", "y = torch.nonzero(x)"),
    (rules.host_reads, "ops/x.py", "y = torch.where(x > 0)"),
    (rules.host_reads, "ops/x.py", "y = x[x > 0]"),
    (rules.host_reads, "ops/x.py", "y = x[:, ~is_padding]"),
    (rules.host_reads, "ops/x.py", "y = x[token_mask]"),
    (rules.host_reads, "dispatch/x.py", "counts = torch.bincount(experts, minlength=8)"),
    (rules.host_reads, "dispatch/x.py", "chosen = experts.unique()"),
    (rules.host_reads, "dispatch/x.py", "rows = torch.repeat_interleave(x, counts)"),
    (rules.host_reads, "dispatch/x.py", "rows = x.repeat_interleave(counts, dim=0)"),
    (rules.silent_excepts, "x.py", "try:\n    f()\nexcept ValueError:\n    pass"),
    (rules.silent_excepts, "x.py", "try:\n    f()\nexcept:\n    g()"),
    (rules.silent_excepts, "x.py", "with contextlib.suppress(Exception):\n    f()"),
    (rules.shard_isinstance, "parallel/x.py", "isinstance(p, Shard)"),
    (rules.shard_isinstance, "parallel/x.py", "isinstance(p, (Replicate, placement_types._StridedShard))"),
    (rules.shard_isinstance, "parallel/x.py", "p.is_shard(0)"),
    (rules.parking, "rl/loop.py", "from moesaic.ops.parking import Parking"),
    (rules.parking, "rl/loop.py", "from moesaic.ops import parking\nparking.Parking(tensors, tier)"),
    (rules.named_attributes, "model/x.py", "hasattr(model, 'lm_head')"),
    (rules.named_attributes, "model/x.py", "getattr(model, 'lm_head', None)"),
    (rules.named_attributes, "model/x.py", "'lm_head' in model.__dict__"),
    (rules.named_attributes, "model/x.py", "if {'lm_head'} <= set(vars(model)): ..."),
    (rules.named_attributes, "model/x.py", "head = model.__dict__.get('lm_head') or vars(model)['head']"),
    (rules.device_names, "ops/x.py", "x.to('cuda')"),
    (rules.device_names, "ops/x.py", "x.to('cuda:0')"),
    (rules.device_names, "ops/x.py", "torch.cuda.synchronize()"),
    (rules.environment, "meshes.py", "os.environ['RANK']"),
    (rules.environment, "meshes.py", "os.getenv('RANK')"),
    (rules.environment, "meshes.py", "from os import environ"),
    (rules.module_state, "meshes.py", "groups = {}"),
    (rules.module_state, "meshes.py", "_groups: dict[str, int] = dict()"),
    (rules.module_state, "meshes.py", "GROUPS = {}\ndef f():\n    GROUPS['a'] = 1"),
    (rules.module_state, "meshes.py", "GROUPS = []\ndef f():\n    GROUPS.append(1)"),
    (rules.module_state, "meshes.py", "current = Meshes()"),
    (rules.module_state, "meshes.py", "MESH = None\ndef f():\n    global MESH"),
    (rules.grad_placements, "parallel/x.py", "y = x.to_local()"),
    (rules.grad_placements, "dispatch/x.py", "with torch.no_grad():\n    pass\ny = x.full_tensor()"),
]  # fmt: skip

PASSED = [
    (
        rules.import_order,
        "parallel/x.py",
        "from moesaic.ops.permute import permute\nfrom moesaic.parallel import outer",
    ),
    (rules.import_order, "__init__.py", "from moesaic.cli import main"),
    (rules.import_order, "cli.py", "import moesaic\nfrom moesaic import runtime"),
    (rules.import_order, "train/x.py", "from moesaic import __version__, runtime"),
    (rules.torch_free, "config/x.py", "import yaml"),
    (rules.function_size, "x.py", "def f():\n" + "    x = 1\n" * 79),
    (rules.docstrings, "x.py", "'''Doc.'''\ndef _f(): ...\nclass A:\n    '''Doc.'''\n    def forward(self): ..."),
    (rules.host_reads, "ops/host.py", "n = counts.tolist()"),
    (rules.host_reads, "weights/x.py", "n = x.cpu()"),
    (rules.host_reads, "ops/x.py", "y = torch.where(mask, a, b)\ny = x[order]\ny = sizes[0]\nfor k in d.items(): ..."),
    (rules.host_reads, "ops/x.py", "y = x.repeat_interleave(counts, output_size=num_rows)\nz = x.repeat_interleave(2)"),
    (rules.host_reads, "ops/x.py", "def f(x: int) -> tuple[Tensor | None, ...]: ..."),
    (rules.silent_excepts, "x.py", "try:\n    f()\nexcept ValueError as error:\n    raise KeyError from error"),
    (rules.shard_isinstance, "ops/placements.py", "isinstance(p, Shard)"),
    (rules.shard_isinstance, "parallel/x.py", "isinstance(p, Replicate)"),
    (rules.parking, "rl/memory.py", "from moesaic.ops.parking import Parking"),
    (rules.parking, "rl/budget.py", "from moesaic.ops.parking import local_tensor"),
    (rules.named_attributes, "specs/x.py", "getattr(config, 'num_experts')"),
    (rules.named_attributes, "parallel/x.py", "getattr(module, name)"),
    (rules.named_attributes, "parallel/x.py", "for name, value in vars(module).items(): ..."),
    (rules.named_attributes, "parallel/experts.py", "'expert_parallel' in module.__dict__"),
    (rules.device_names, "kernels/x.py", "x.to('cuda')"),
    (rules.device_names, "ops/x.py", "x.to(mesh.device_type)"),
    (rules.environment, "runtime.py", "os.environ['RANK']"),
    (
        rules.module_state,
        "x.py",
        "AXES = ('dp', 'cp')\nTABLE = {'a': 1}\n__all__ = ['f']\nlogger = logging.getLogger(__name__)",
    ),
    (rules.grad_placements, "parallel/x.py", "y = x.to_local(grad_placements=[Partial()])"),
    (rules.grad_placements, "train/x.py", "@torch.no_grad()\ndef f(x):\n    return x.to_local()"),
    (rules.grad_placements, "weights/x.py", "y = x.to_local()"),
]


@pytest.mark.parametrize(("rule", "path", "source"), CAUGHT, ids=lambda value: getattr(value, "__name__", None))
def test_rule_catches(rule: rules.Rule, path: str, source: str) -> None:
    assert broken(rule, source, path)


@pytest.mark.parametrize(("rule", "path", "source"), PASSED, ids=lambda value: getattr(value, "__name__", None))
def test_rule_lets_pass(rule: rules.Rule, path: str, source: str) -> None:
    assert broken(rule, source, path) == []


def test_file_size_counts_lines() -> None:
    assert list(rules.file_size("\n" * 501)) and not list(rules.file_size("\n" * 500))


def test_every_rule_is_shown_to_catch_something() -> None:
    assert {rule for rule, *_ in CAUGHT} == {*rules.PACKAGE_RULES, rules.function_size}


@pytest.mark.parametrize("rule", rules.PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: rules.Rule) -> None:
    found = [
        (file, problem)
        for file in PACKAGE_FILES
        for problem in broken(rule, file.read_text(), file.relative_to(PACKAGE).as_posix())
    ]
    assert not found, f"{rule.__doc__}\n{report(found)}"


def test_sizes_of_files_and_functions() -> None:
    found = [
        (file, problem)
        for file in ALL_FILES
        for source in [file.read_text()]
        for problem in [*rules.file_size(source), *broken(rules.function_size, source, file.name)]
    ]
    assert not found, report(found)


def run_fresh(code: str) -> None:
    """Run ``code`` in a fresh interpreter, where nothing is imported yet; its error is this test's."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


WITHOUT_TORCH = """
import sys
import moesaic, moesaic.config, moesaic.specs, moesaic.cli
from moesaic import ModelSpec, load_recipe
found = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "datasets", "safetensors"})
assert not found, f"imported: {found}"
"""

WITHOUT_OPTIONAL = f"""
import importlib, pkgutil, sys
for name in {OPTIONAL_PACKAGES}:
    sys.modules[name] = None  # "import name" raises ModuleNotFoundError
import moesaic
for module in pkgutil.walk_packages(moesaic.__path__, "moesaic."):
    importlib.import_module(module.name)
for name in moesaic.__all__:
    getattr(moesaic, name)
"""


def test_config_specs_and_cli_are_imported_without_torch() -> None:
    run_fresh(WITHOUT_TORCH)


def test_everything_is_imported_where_no_optional_package_is() -> None:
    run_fresh(WITHOUT_OPTIONAL)


def test_fresh_interpreter_reports_what_it_misses() -> None:
    with pytest.raises(AssertionError, match="ModuleNotFoundError.*triton"):
        run_fresh("import sys; sys.modules['triton'] = None; import triton")


def test_lazy_exports_and_their_types_say_the_same() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == dict(moesaic.EXPORTS)
    assert set(moesaic.__all__) == {*moesaic.EXPORTS, "__version__"} == set(dir(moesaic))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moesaic.nothing  # noqa: B018


def test_pytest_skips_no_test_folder(pytestconfig: pytest.Config) -> None:
    """By default it skips folders called ``dist``, and a whole folder of tests would silently not run."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in Path(__file__).parent.rglob("test_*.py")}
    assert {"unit", "dist", "oracle"} <= folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]
