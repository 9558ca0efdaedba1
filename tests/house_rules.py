"""The house rules as functions from a file's path and source to what breaks them. Pure: nothing is imported or run.

``path`` is the file's place under ``src/moesaic``, e.g. ``ops/permute.py``. Heuristics lean to letting things pass;
what they do catch is a fault or needs a better name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeGuard

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# A file may import from its own package and from those before it. Some are planned and not there yet.
IMPORT_ORDER = (
    "specs",
    "config",
    "runtime",
    "meshes",
    "ops",
    "kernels",
    "model",
    "dispatch",
    "weights",
    "reshard",
    "parallel",
    "checkpoint",
    "data",
    "train",
    "engines",
    "rl",
    "planner",
    "verify",
    "report",
    "cli",
)

# The package's own files, which may reach everything.
FACADES = ("__init__.py", "__main__.py")

# Where device values must not reach the host, but through ops/host.py.
HOST_READ_SCOPE = ("ops", "dispatch", "parallel")
HOST_READ_METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select"}
# Operators whose result has a size that depends on values, which therefore wait for the device.
VALUE_SIZED_METHODS = {"bincount", "unique", "unique_consecutive", "repeat_interleave"}
# Where DTensor gradients flow.
GRAD_PLACEMENTS_SCOPE = ("ops", "model", "dispatch", "parallel", "train")

# (file, name): state at module level that is meant to be there.
ALLOWED_MODULE_STATE = {
    ("specs/registry.py", "_SPECS"),  # the table that register_spec extends
    ("cli.py", "app"),
    ("cli.py", "console"),
}
# Files outside specs/ that may ask by a string's name whether an attribute is there: adapters, which find again what
# they, or transformers' seams, have put on a module of transformers.
ALLOWED_NAMED_GETATTR = {
    "model/seam.py",
    "parallel/context.py",
    "parallel/tensor.py",
    "parallel/experts.py",
    "kernels/bind.py",
    "weights/conversions.py",
    "weights/source.py",
    "weights/stream.py",
}
# Who may take memory from tensors, for nobody may read them while it is away: rl/memory.py the roles' parameters,
# gradients and optimizer state, engines/hf_weights.py a sleeping engine's weights.
ALLOWED_PARKING = {"ops/parking.py", "rl/memory.py", "engines/hf_weights.py"}

MUTABLE_BUILDERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "bytearray"}
MUTATING_METHODS = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear",
}  # fmt: skip

Rule = Callable[[str, ast.Module], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Import:
    """``from module import name`` (or ``import module``, without a name) at a line."""

    module: str
    name: str | None
    line: int


def package_of(path: str) -> str:
    """``ops`` of ``ops/permute.py``, ``meshes`` of ``meshes.py``."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Every import of the file, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(node.module or "", alias.name, node.lineno) for alias in node.names)


def import_order(path: str, tree: ast.Module) -> Iterator[str]:
    """Imports go one way, down IMPORT_ORDER."""
    if path in FACADES:
        return
    own = package_of(path)
    if own not in IMPORT_ORDER:
        yield f"1: {own} has no place in IMPORT_ORDER"
        return
    for found in imports_of(tree):
        parts = found.module.split(".")
        if parts[0] != "moesaic":
            continue
        target = parts[1] if len(parts) > 1 else found.name
        if found.module == "moesaic" and (found.name == "__version__" or own == IMPORT_ORDER[-1]):
            continue  # the version is the facade's own; the last in the order may use the package as its users do
        if target not in IMPORT_ORDER:
            yield f"{found.line}: import {found.name or found.module} from the file that defines it, not from moesaic"
        elif IMPORT_ORDER.index(target) > IMPORT_ORDER.index(own):
            yield f"{found.line}: {own} comes before {target} and can't import from it"


def torch_free(path: str, tree: ast.Module) -> Iterator[str]:
    """specs and config know nothing of torch, not even inside a function."""
    if package_of(path) in ("specs", "config"):
        for found in imports_of(tree):
            if found.module.split(".")[0] in ("torch", "transformers", "safetensors", "datasets"):
                yield f"{found.line}: {package_of(path)} imports {found.module}"


def file_size(source: str) -> Iterator[str]:
    """No file over MAX_FILE_LINES."""
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"1: {num_lines} lines, limit {MAX_FILE_LINES}"


def function_size(path: str, tree: ast.Module) -> Iterator[str]:
    """No function over MAX_FUNCTION_LINES, docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {num_lines} lines, limit {MAX_FUNCTION_LINES}"


def docstrings(path: str, tree: ast.Module) -> Iterator[str]:
    """Every file, public class, public function and public method says what it is for."""
    if tree.body and not ast.get_docstring(tree):
        yield "1: the file has no docstring"
    undocumented_by_nature = {"forward", "backward", "setup_context"}  # torch calls them; their class says it
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{node.lineno}: {node.name} has no docstring"
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if (
                    isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and method.name not in undocumented_by_nature
                    and not {decorator_name(d) for d in method.decorator_list} & {"override", "overload", "setter"}
                    and not ast.get_docstring(method)
                ):
                    yield f"{method.lineno}: {node.name}.{method.name} has no docstring"


def host_reads(path: str, tree: ast.Module) -> Iterator[str]:
    """Device values reach the host through ops/host.py alone, and no shape depends on them."""
    if package_of(path) not in HOST_READ_SCOPE or path == "ops/host.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in HOST_READ_METHODS:
                yield f"{node.lineno}: .{node.func.attr}() reads the device; ops/host.py::read_ints does"
            elif node.func.attr == "to" and any(is_text(argument, "cpu") for argument in node.args):
                yield f"{node.lineno}: .to('cpu') reads the device; ops/host.py::read_ints does"
            elif node.func.attr in VALUE_SIZED_METHODS and not is_size_given(node):
                yield f"{node.lineno}: {node.func.attr}() has a size that only the device knows"
            elif node.func.attr == "where" and len(node.args) == 1 and not node.keywords:
                yield f"{node.lineno}: where() of one argument is nonzero()"
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not is_type(node.value):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(looks_like_mask(part) for part in parts):
                yield f"{node.lineno}: indexing by a mask has a size that only the device knows"


def is_size_given(node: ast.Call) -> bool:
    """``repeat_interleave`` with an ``output_size``, or with a number of repeats written out."""
    numbers = [argument for argument in node.args if isinstance(argument, ast.Constant)]
    return called_name(node) == "repeat_interleave" and (
        bool(numbers) or "output_size" in {keyword.arg for keyword in node.keywords}
    )


def is_type(node: ast.expr) -> bool:
    """``tuple`` of ``tuple[int | None]``, ``Callable``: a subscript of it is an annotation."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name[:1].isupper() or name in ("tuple", "list", "dict", "set", "frozenset", "type")


def looks_like_mask(node: ast.expr) -> bool:
    """``x > 0``, ``~x``, ``a & b``, or a name that says mask."""
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return True
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "mask" in name.lower()


def silent_excepts(path: str, tree: ast.Module) -> Iterator[str]:
    """No bare except, none that only passes, no suppressing of everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{node.lineno}: bare except"
            elif all(isinstance(line, ast.Pass) or is_ellipsis(line) for line in node.body):
                yield f"{node.lineno}: an except that hides the error"
        elif isinstance(node, ast.Call) and called_name(node) == "suppress":
            if any(isinstance(a, ast.Name) and a.id in ("Exception", "BaseException") for a in node.args):
                yield f"{node.lineno}: suppresses every error"


def shard_isinstance(path: str, tree: ast.Module) -> Iterator[str]:
    """Only ops/placements.py may tell Shard from _StridedShard; the rest asks its shard_dim."""
    if path == "ops/placements.py":
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if called_name(node) == "is_shard":
            yield f"{node.lineno}: is_shard() is False on _StridedShard; ask ops.placements.shard_dim"
        elif called_name(node) == "isinstance" and len(node.args) == 2:
            named = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node.args[1]) if is_named(n)}
            if named & {"Shard", "_StridedShard"}:
                yield f"{node.lineno}: isinstance(..., Shard) misses _StridedShard; ask ops.placements.shard_dim"


def parking(path: str, tree: ast.Module) -> Iterator[str]:
    """Parameters, gradients and optimizer state are moved on and off the device by one file."""
    if path in ALLOWED_PARKING:
        return
    imported = [found.line for found in imports_of(tree) if found.name == "Parking"]
    named = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "Parking"]
    for line in (*imported, *named):
        yield f"{line}: takes memory from tensors; rl/memory.py does that, in turns that all ranks know of"


def named_attributes(path: str, tree: ast.Module) -> Iterator[str]:
    """No hasattr/getattr by a constant name outside specs/, nor a look into an object's ``__dict__``: types say what is
    there."""
    if package_of(path) == "specs" or path in ALLOWED_NAMED_GETATTR:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            if len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
                yield f"{node.lineno}: {node.func.id}(..., {node.args[1].value!r})"
        if is_attribute_lookup(node):
            yield f"{node.lineno}: a name looked up in an object's attributes is hasattr or getattr by another name"


def is_attribute_lookup(node: ast.AST) -> TypeGuard[ast.expr]:
    """``'x' in m.__dict__``, ``names <= set(vars(m))``, ``vars(m)['x']``, ``m.__dict__.get('x')``; not ``.items()``."""
    if isinstance(node, ast.Compare):
        return any(is_attributes(part) for part in ast.walk(node))
    if isinstance(node, ast.Subscript):
        return is_attributes(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "get" and is_attributes(node.func.value)
    return False


def is_attributes(node: ast.AST) -> bool:
    """``m.__dict__`` or ``vars(m)``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars" and bool(node.args)
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def device_names(path: str, tree: ast.Module) -> Iterator[str]:
    """``cuda`` is named in runtime.py, kernels/ and transports only."""
    if path in ("runtime.py", "reshard/transports.py") or package_of(path) == "kernels":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            yield f"{node.lineno}: the literal {node.value!r}"
        elif isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield f"{node.lineno}: .cuda; use torch.accelerator or the mesh's device type"


def environment(path: str, tree: ast.Module) -> Iterator[str]:
    """The environment is read and set in runtime.py only."""
    if path == "runtime.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield f"{node.lineno}: os.{node.attr} outside runtime.py"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}:
                yield f"{node.lineno}: the environment outside runtime.py"


def module_state(path: str, tree: ast.Module) -> Iterator[str]:
    """No state at module level: no ``global``, no container that functions change or that isn't named as a constant, no
    object kept under a variable's name."""
    containers, mutated = set[str](), mutated_names(tree)
    for name, value, line in module_assignments(tree):
        if (path, name) in ALLOWED_MODULE_STATE or name.startswith("__"):
            continue
        is_constant = name.strip("_").isupper()
        if is_container(value):
            containers.add(name)
            if not is_constant:
                yield f"{line}: {name} is a container at module level; a constant has an UPPER_CASE name"
            elif name in mutated:
                yield f"{line}: {name} at module level is changed later"
        elif isinstance(value, ast.Call) and called_name(value)[:1].isupper() and not is_constant:
            if called_name(value) not in ("TypeVar", "ParamSpec", "NewType"):
                yield f"{line}: {name} keeps a {called_name(value)} at module level"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """(name, value, line) of each plain assignment at module level."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value, node.lineno) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value, node.lineno


def mutated_names(tree: ast.Module) -> set[str]:
    """Names whose items are set or deleted, or on which a changing method is called."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names |= {node.value.id} if isinstance(node.value, ast.Name) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
            names |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
    return names


def is_container(value: ast.expr) -> bool:
    """A literal, a comprehension or a call that makes a mutable container."""
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and called_name(value) in MUTABLE_BUILDERS


def grad_placements(path: str, tree: ast.Module) -> Iterator[str]:
    """Each to_local/full_tensor says ``grad_placements``, or stands where no gradient flows."""
    if package_of(path) in GRAD_PLACEMENTS_SCOPE:
        yield from _grad_placements_below(tree, is_no_grad=False)


def _grad_placements_below(node: ast.AST, is_no_grad: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        is_no_grad = is_no_grad or any(decorator_name(d) in ("no_grad", "inference_mode") for d in node.decorator_list)
    elif isinstance(node, ast.With):
        is_no_grad = is_no_grad or any(
            decorator_name(i.context_expr) in ("no_grad", "inference_mode") for i in node.items
        )
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("to_local", "full_tensor") and not is_no_grad:
            if "grad_placements" not in {keyword.arg for keyword in node.keywords}:
                yield f"{node.lineno}: {node.func.attr}() without grad_placements, not under no_grad"
    for child in ast.iter_child_nodes(node):
        yield from _grad_placements_below(child, is_no_grad)


def called_name(node: ast.Call) -> str:
    """``c`` of ``a.b.c(...)``, or '' for a call of a call."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def decorator_name(node: ast.expr) -> str:
    """``c`` of ``@a.b.c`` and ``@a.b.c(...)``."""
    if isinstance(node, ast.Call):
        return called_name(node)
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def is_named(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    """A name or an attribute."""
    return isinstance(node, ast.Name | ast.Attribute)


def is_text(node: ast.expr, text: str) -> bool:
    """The string constant ``text``."""
    return isinstance(node, ast.Constant) and node.value == text


def is_ellipsis(node: ast.stmt) -> bool:
    """The statement ``...``."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis


# Rules for src/moesaic; function_size and file_size are for every Python file of the repository.
PACKAGE_RULES: tuple[Rule, ...] = (
    import_order,
    torch_free,
    docstrings,
    host_reads,
    silent_excepts,
    shard_isinstance,
    parking,
    named_attributes,
    device_names,
    environment,
    module_state,
    grad_placements,
)
