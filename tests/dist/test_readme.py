"""README's library example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from tests.oracle.reference import Case, load_reference
from tests.pool import RunRanks

README = Path(__file__).parents[2] / "README.md"


def run_example(rank: int, code: str, folder: str, out: str) -> None:
    generator = torch.Generator().manual_seed(rank)
    batches = [
        SimpleNamespace(
            input_ids=torch.randint(0, 96, (2, 8), generator=generator),
            labels=torch.randint(0, 96, (2, 8), generator=generator),
        )
        for _ in range(2)
    ]
    names = {"folder": folder, "batches": batches, "num_global_tokens": 4 * 16}
    exec(compile(code.replace('"trained"', repr(out)), "README.md", "exec"), names)


def test_the_library_example(run_ranks: RunRanks, reference_root: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    reference = load_reference(Case(), reference_root)
    run_ranks(run_example, 4, code, str(reference.folder), str(tmp_path / "trained"))
    before, after = (AutoModelForCausalLM.from_pretrained(f) for f in (reference.folder, tmp_path / "trained"))
    assert any((a != b).any() for a, b in zip(before.parameters(), after.parameters(), strict=True))
