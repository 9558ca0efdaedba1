"""What the documents name exists, and their tables say what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

from moesaic.dispatch import DISPATCHERS
from moesaic.ops.placements import blocks_at, local_shape
from moesaic.specs import refusal
from tests.families.configs import MODEL_TYPES
from tests.families.matrix import TOPOLOGIES, build_cells
from tests.families.pages import render_composed
from tests.oracle.cells import TOLERANCES
from tests.oracle.test_parity import CELLS
from tests.oracle.test_transformers import UNSUPPORTED

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "docs" / name for name in ("tour.md", "numerics.md", "faults.md", "verify.md", "rollout.md")]
MAX_LINE_LENGTH = 120


def resolve(path: str) -> Path:
    """A file as the documents write it: from the repository's root, or from the package."""
    return ROOT / path if path.startswith("tests/") else ROOT / "src" / "moesaic" / path


def defined_names(path: Path) -> set[str]:
    """Functions, classes, ``Class.member`` and assigned names at a file's top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= names_of(node)
        for inner in node.body if isinstance(node, ast.ClassDef) else []:
            names |= {f"{node.name}.{name}" for name in names_of(inner)}
    return names


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def missing_references(text: str) -> list[str]:
    """``path.py::name`` references whose file or name isn't there."""
    found = set(re.findall(r"`([\w./]+\.py)::([\w.]+)`", text)) - {("file.py", "function")}
    return [
        f"{path}::{name}"
        for path, name in sorted(found)
        if not resolve(path).is_file() or name not in defined_names(resolve(path))
    ]


def rows_below(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins with ``first_cell``, header and rule left out."""
    lines = text[text.index(f"| {first_cell} |") :].splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_named_function_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert len(re.findall(r"\.py::", text)) > (5 if document.name in ("verify.md", "rollout.md") else 20)
    assert missing_references(text) == []


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.name)
def test_every_named_file_exists(document: Path) -> None:
    """Code, recipes and other pages."""
    text = document.read_text(encoding="utf-8")
    code = set(re.findall(r"`((?:\w+/)+\w+\.py)", text))
    assert [path for path in code if not resolve(path).is_file() and not (ROOT / path).is_file()] == []
    linked = {path.partition("#")[0] for path in re.findall(r"\]\((?!https?://)([^)]+)\)", text)} - {""}
    assert [path for path in linked if not (document.parent / path).exists()] == []
    recipes = set(re.findall(r"recipes/\w+/\w+\.yaml", text))
    assert [path for path in recipes if not (ROOT / path).is_file()] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    gone = "`train/step.py::train_step` `train/step.py::other` `train/gone.py::x` `meshes.py::Meshes.tokens`"
    assert missing_references(gone) == ["train/gone.py::x", "train/step.py::other"]


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_lines_are_short(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE_LENGTH] == []


def test_numerics_has_the_tolerances_of_the_tests() -> None:
    rows = rows_below((ROOT / "docs" / "numerics.md").read_text(encoding="utf-8"), "quantity")
    assert {name.strip("`"): float(bound) for name, bound, _ in rows} == TOLERANCES


def test_numerics_lists_every_parity_cell() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = rows_below(text, "cell")
    assert [(name.strip("`"), int(ranks)) for name, ranks, *_ in rows] == [
        (name, cell.world_size) for name, (_, cell) in CELLS.items()
    ]
    reasons = dict(re.findall(r"^- \((\w)\) (.+)$", text, flags=re.MULTILINE))
    written = {name.strip("`"): reasons[cell[4]] for name, *_, cell in rows if cell != "yes"}
    assert written == in_full(UNSUPPORTED)


def family_rows(page: str) -> list[list[str]]:
    return rows_below((ROOT / "docs" / page).read_text(encoding="utf-8"), "family")


def test_the_pages_of_families_have_them_all() -> None:
    """`make matrix` writes them; a new family, or one that is refused now, needs it again."""
    families, parity = family_rows("families.md"), family_rows("parity.md")
    assert [row[0].strip("`") for row in families] == list(MODEL_TYPES)
    assert [row[0].strip("`") for row in parity[:-1]] == list(MODEL_TYPES)
    for (name, lm_class, special), (_, *cells) in zip(families, parity[:-1], strict=True):
        reason = refusal(name.strip("`"))
        assert (lm_class == "-") == (reason is not None), name
        if reason is not None:
            assert special == f"refused: {reason}" and all(cell.startswith("refused: ") for cell in cells)


def test_parity_has_every_cell_within_its_bound() -> None:
    """Where rounding alone moves gradients further, (f), the floor below the table makes the bound."""
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    header, *_ = [line for line in text.splitlines() if line.startswith("| family |")]
    assert [cell.strip() for cell in header.strip("|").split("|")][1:] == list(build_cells(TOPOLOGIES, DISPATCHERS))
    floors = {
        name: float(floor)
        for name, floor in re.findall(r"^- \(f\) `(\w+)`: floor ([^\s,]+), of weights", text, flags=re.MULTILINE)
    }
    numbers = {row[0] for row in rows_below(text, "refused")}
    for name, *cells in family_rows("parity.md")[:-1]:
        bound = max(TOLERANCES["grads"], 2 * floors.get(name.strip("`"), 0.0))
        for cell in cells:
            is_refused = cell.startswith("refused: ")
            assert cell.removeprefix("refused: ") in numbers if is_refused else float(cell.split()[0]) <= bound, name


def test_parity_lists_the_composed_topologies() -> None:
    assert (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").endswith(render_composed())


def in_full(reasons: dict[str, str]) -> dict[str, str]:
    """Each reason written out where it says that it is the same as the one before."""
    written, last = {}, ""
    for name, reason in reasons.items():
        last = last if reason == "the same" else reason
        written[name] = last
    return written


def test_tour_says_who_holds_which_experts() -> None:
    shape, placements = (8, 64, 64), (Shard(1), Shard(0))
    rows = rows_below((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), "rank | efsdp | ep")
    assert [int(rank) for rank, *_ in rows] == [0, 1, 2, 3]
    for rank, efsdp, ep, experts, expert_rows, local in rows:
        assert (int(efsdp), int(ep)) == divmod(int(rank), 2)
        (block,) = blocks_at(shape, (2, 2), (int(efsdp), int(ep)), placements)
        held = [f"{held.start}..{held.stop - 1}" for held in block.global_slices]
        assert [experts, expert_rows] == held[:2]
        assert local == str(list(local_shape([block], 3)))
