"""What verl and TRL give for known inputs, made anew and compared with the files in tests/unit/vectors.

    python -m tools.make_vectors [--write]

Runs in a venv that has both (``make peers``), and imports nothing of this package. Without ``--write`` any difference
fails: in cases, in options, in the bits of inputs, in outputs by more than 1e-7 of each tensor's largest number.

Sums and exponentials round otherwise where a CPU has wider registers (up to 4e-7 was seen), so torch is held to what
every x86-64 CPU has. Another architecture may still differ.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

# Before torch is imported: operations of one width and sums of one order; nothing that a library would fetch or say.
os.environ.update(
    ATEN_CPU_CAPABILITY="default",
    MKL_CBWR="COMPATIBLE",
    DNNL_MAX_CPU_ISA="SSE41",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
    VERL_LOGGING_LEVEL="ERROR",
)
warnings.filterwarnings("ignore")

import torch  # noqa: E402  (the environment comes first)
import transformers  # noqa: E402

from tools import trl_losses, trl_steps, verl_formulas, verl_inputs, verl_steps, verl_updates  # noqa: E402
from tools.vectors import Case, Vectors, differences, load_vectors, save_vectors  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "unit" / "vectors"
TOLERANCE = 1e-7


def made_by(*packages: str, seed: int) -> dict[str, str]:
    """Versions, the seed, and the kind of machine."""
    versions = {package: version(package) for package in ("torch", "transformers", *packages)}
    return {
        **versions,
        "seed": str(seed),
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def make_all() -> dict[str, Vectors]:
    """Every file's vectors, by its name."""
    step = verl_inputs.build_step()
    verl_cases: list[Case] = [
        *verl_formulas.aggregation_cases(step),
        *verl_formulas.advantage_cases(step),
        *verl_formulas.policy_loss_cases(step),
        *verl_formulas.kl_cases(step),
        *verl_formulas.value_loss_cases(step),
        *verl_formulas.logits_cases(),
        *verl_steps.correction_cases(step),
        *verl_steps.kl_in_reward_cases(step),
        *verl_steps.distillation_cases(step),
        *verl_steps.overlong_cases(),
        *verl_steps.filter_cases(step),
        *verl_steps.data_metric_cases(step),
        *verl_updates.update_cases(step),
    ]
    trl_cases = [*trl_losses.loss_cases(step), *trl_losses.overlong_cases(), *trl_steps.rollout_cases()]
    by_verl = made_by("verl", "tensordict", seed=verl_inputs.SEED)
    return {
        "verl": Vectors(made_by=by_verl, cases=verl_cases),
        "trl": Vectors(made_by=made_by("trl", seed=verl_inputs.SEED), cases=trl_cases),
        "trl_steps": Vectors(made_by=made_by("trl", seed=trl_steps.SEED), cases=list(trl_steps.step_cases())),
    }


def compare(name: str, vectors: Vectors) -> bool:
    """Print what differs from the file; whether anything does."""
    path = FOLDER / f"{name}.safetensors"
    if not path.exists():
        print(f"{path}: not there; --write makes it")
        return True
    there = load_vectors(path)
    problems = differences(vectors, there, TOLERANCE)
    changed = {
        key: f"{there.made_by.get(key)} -> {value}"
        for key, value in vectors.made_by.items()
        if there.made_by.get(key) != value
    }
    print(f"{path.name}: {len(vectors.cases)} cases, {len(problems)} differences" + (f"; {changed}" if changed else ""))
    print("".join(f"  {problem}\n" for problem in problems), end="")
    return bool(problems)


def main() -> int:
    """1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files instead of comparing with them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    made = make_all()
    if not arguments.write:
        return int(any([compare(name, vectors) for name, vectors in made.items()]))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, vectors in made.items():
        path = FOLDER / f"{name}.safetensors"
        save_vectors(path, vectors)
        print(f"{path}: {len(vectors.cases)} cases, {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
