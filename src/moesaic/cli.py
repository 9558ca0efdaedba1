"""The command line: thin. A recipe is checked before torch is imported and before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

import moesaic
from moesaic import runtime
from moesaic.config import (
    Fsdp2Config,
    ParallelSizes,
    Recipe,
    RecipeError,
    load_recipe,
    load_saved_recipe,
    num_micro_batches,
    resolve_sizes,
)
from moesaic.config.case import MODEL_FILES
from moesaic.config.foreign import TOOLS, render, translate
from moesaic.config.load import apply_overrides, build_recipe, read_mapping
from moesaic.config.roles import RoleName, active_roles, role_recipe
from moesaic.config.run_folder import is_complete

EXIT_DIFFERENT = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 1
# Fields that a verification doesn't look at: it makes its own documents, and a folder of its own.
UNREAD_BY_VERIFY = frozenset(
    {"train_dataset", "eval_dataset", "resume_from_checkpoint", "max_steps", "dump", MODEL_FILES}
)

app = typer.Typer(
    name="moesaic",
    help="Post-train Hugging Face mixture-of-experts models on FSDP2, expert parallelism and expert-FSDP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe fields to set, e.g. dist_config.ep_size=4.")
]
EngineName = Literal["hf", "vllm", "sglang"]
Against = Literal["hf", "single"]
Shrink = Literal["auto", "always", "never"]
Nproc = Annotated[int | None, typer.Option("--nproc", min=1, help="Local processes to start; not under a launcher.")]


def main() -> None:
    """Entry point of the ``moesaic`` command."""
    app()


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"moesaic {moesaic.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="Ranks; default: as the recipe implies.")] = None,
    tool: Annotated[
        str | None, typer.Option("--from", help=f"RECIPE is another tool's file: {' or '.join(TOOLS)}.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="With --from: the recipe's file; default: stdout.")] = None,
) -> None:
    """Check a recipe without starting anything: exit code 2 and every problem at once, or the resolved sizes.

    With --from, first translate another tool's file: a table of its fields (as a comment, where the recipe goes to
    stdout) and the recipe. Exit code 0 where all of it has an equivalent here, 1 where something has none or isn't
    known, 2 where the recipe has problems.
    """
    if tool is not None:
        _check_foreign(recipe, tool, out, overrides or [], world)
        return
    if out is not None:
        _fail("--out goes with --from: a recipe is checked where it is.")
    checked = _load(recipe, overrides, world)
    world = world or _implied_world_size(checked)
    typer.echo(f"{recipe}: ok")
    if world is None:
        typer.echo("The number of ranks isn't known: give --world N to check and see the sizes.")
    else:
        typer.echo(_sizes_table(checked, resolve_sizes(checked, world)))


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    nproc: Nproc = None,
    is_verbose: Annotated[bool, typer.Option("--verbose", help="Print what shards each parameter.")] = False,
) -> None:
    """Train. Starts local processes (--nproc, else as many as the recipe implies, else 1), or runs under torchrun."""
    if runtime.under_launcher():
        _refuse_nproc(nproc)
        nproc = runtime.world_size_from_launcher()
    checked = _load(recipe, overrides, nproc, default_world_size=1)
    world = nproc or _implied_world_size(checked) or 1
    command = ["-m", "moesaic.cli", "train", str(recipe), *(overrides or []), *(["--verbose"] if is_verbose else [])]
    if world > 1 and not runtime.under_launcher():
        raise typer.Exit(runtime.launch(command, world, Path(checked.output_dir) / "logs"))
    if checked.stage == "rl":
        from moesaic.rl.loop import train_rl

        runtime.run_rank(train_rl, checked)
        return
    from moesaic.train.loop import train as train_rank

    runtime.run_rank(train_rank, checked, is_verbose)


@app.command()
def verify(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="Ranks; default: as the recipe implies.")] = None,
    against: Annotated[
        Against, typer.Option("--against", help="hf: plain transformers. single: moesaic. Both in one process.")
    ] = "hf",
    shrink: Annotated[
        Shrink, typer.Option("--shrink", help="A small copy of the model: auto (where it doesn't fit), always, never.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
) -> None:
    """Prove that a recipe's topology computes what one process computes, in fp32, on generated documents.

    Loss, every gradient, the norm, weights after two steps, and a checkpoint's way out and back. Starts local
    processes, or runs under torchrun. Exit code 0: proven, 1: not (what differs, and which axis explains it), 2:
    nothing was compared.
    """
    if runtime.under_launcher():
        if world is not None and world != runtime.world_size_from_launcher():
            _fail(f"--world {world}: a launcher has started {runtime.world_size_from_launcher()} processes; drop it.")
        world = runtime.world_size_from_launcher()
    checked, world = _load_to_verify(recipe, overrides, world)
    from moesaic.verify.report import REPORT, load_verdict
    from moesaic.verify.run import folder_of, prepare, run_on_rank

    if not runtime.under_launcher():
        try:
            prepare(checked, against=against, shrink=shrink, world_size=world)
        except (ValueError, OSError) as error:
            _fail(str(error))
    if world > 1 and not runtime.under_launcher():
        options = [f"--world={world}", f"--against={against}", f"--shrink={shrink}", *(["--json"] if as_json else [])]
        command = ["-m", "moesaic.cli", "verify", str(recipe), *(overrides or []), *options]
        code = runtime.launch(command, world, folder_of(checked) / "logs")
        if code:  # a rank failed, and has said so: nothing was compared
            raise typer.Exit(EXIT_USAGE if code == 1 else code)
        raise typer.Exit(0 if load_verdict(folder_of(checked) / REPORT) else EXIT_DIFFERENT)
    try:
        runtime.run_rank(run_on_rank, checked, against, shrink, as_json)
    except SystemExit as end:
        if isinstance(end.code, str):
            _fail(end.code)
        raise


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, e.g. outputs/step-000100.")],
    out: Annotated[Path, typer.Argument(help="New or empty folder for the Hugging Face model.")],
    nproc: Nproc = None,
) -> None:
    """Turn a checkpoint into Hugging Face safetensors. The run's recipe.yaml is read from beside the checkpoint."""
    if runtime.under_launcher():
        _refuse_nproc(nproc)
    try:
        saved = load_saved_recipe(checkpoint.absolute().parent / "recipe.yaml")
    except RecipeError as error:
        _fail(str(error))
    if not is_complete(checkpoint):
        _fail(f"{checkpoint}: is no complete checkpoint: no .metadata in it; name one of {checkpoint.parent}/step-*.")
    world = nproc or 1
    if world > 1 and not runtime.under_launcher():
        command = ["-m", "moesaic.cli", "export", str(checkpoint), str(out)]
        raise typer.Exit(runtime.launch(command, world, checkpoint.absolute().parent / "logs"))
    from moesaic.train.loop import export_checkpoint

    runtime.run_rank(export_checkpoint, saved, checkpoint, out)


@app.command()
def rollout(
    model: Annotated[Path, typer.Argument(help="Model folder, or a checkpoint of a run, e.g. outputs/step-000100.")],
    prompts: Annotated[Path, typer.Argument(help=".txt (a prompt per line), .jsonl, .json or .parquet.")],
    engine: Annotated[EngineName, typer.Option(help="What generates.")] = "hf",
    out: Annotated[Path | None, typer.Option(help="New JSONL file; default: stdout.")] = None,
    limit: Annotated[int | None, typer.Option(help="So many prompts, from the start.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Per completion.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token always.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1: all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="For the same completions again.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A token (or its id) that ends a completion; repeatable.")
    ] = None,
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="The model's own end of text doesn't end it.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts that are text are users' turns.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Write token ids and log-probabilities.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: as in the files.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts at a time; written as they are done.")] = 32,
    tp_size: Annotated[int, typer.Option(help="Processes that share the model (not hf).")] = 1,
) -> None:
    """Let a model go on with prompts: lines of text, or rows with prompt or messages (through its chat template)."""
    from moesaic.engines.base import Sampling
    from moesaic.engines.rollout import RolloutOptions
    from moesaic.engines.rollout import rollout as run_rollout

    try:
        drawing = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, n=n, seed=seed)
        options = RolloutOptions(
            model=model,
            prompts=prompts,
            out=out,
            engine=engine,
            sampling=drawing,
            stops=tuple(stop or ()),
            ignore_end=ignore_end,
            limit=limit,
            is_chat=chat,
            with_tokens=tokens,
            dtype=dtype,
            batch_size=batch_size,
            tp_size=tp_size,
        )
        count = run_rollout(options)
    except (ValueError, OSError) as error:
        _fail(str(error))
    typer.echo(f"{count} completions{'' if out is None else f' in {out}'}", err=True)


@app.command()
def upcycle(
    dense: Annotated[Path, typer.Argument(help="Folder of a dense llama, qwen2 or mistral model.")],
    out: Annotated[Path, typer.Argument(help="New or empty folder for the mixture of experts.")],
    family: Annotated[str, typer.Option(help="qwen2_moe or mixtral.")] = "qwen2_moe",
    num_experts: Annotated[int, typer.Option(help="Experts of each sparse layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts that each token visits.")] = 2,
    layers: Annotated[str, typer.Option(help="all, every:N, or numbers from 0: 4,9,14.")] = "all",
    noise: Annotated[float, typer.Option(help="Noise on expert weights, relative to their spread.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of routers and noise.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the source's.")] = None,
) -> None:
    """Turn a dense model into a mixture of experts whose experts are copies of its MLPs."""
    from moesaic.model.upcycle import upcycle as write_upcycled

    try:
        report = write_upcycled(
            dense,
            out,
            family=family,
            num_experts=num_experts,
            top_k=top_k,
            layers=layers,
            noise=noise,
            seed=seed,
            dtype=dtype,
        )
    except ValueError as error:
        _fail(str(error))
    layer_list = ", ".join(map(str, report.sparse_layers))
    typer.echo(f"{out}: {report.num_parameters / 1e6:.1f}M parameters, {report.num_bytes / 2**30:.2f} GiB")
    typer.echo(f"sparse layers: {layer_list}")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a dump, an export, or a checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same of the run to compare with.")],
    tol: Annotated[
        float, typer.Option(min=0, help="Largest max|a-b| / max|b| that passes. 0: every bit counts.")
    ] = 0.0,
    rows: Annotated[int, typer.Option(min=0, help="Tensors to list, the worst first.")] = 20,
) -> None:
    """Compare two folders tensor by tensor, whatever topology wrote them. Exit code 0: equal, 1: different."""
    from rich.console import Console

    from moesaic.verify.diff import build_table
    from moesaic.verify.diff import diff as compare

    try:
        report = compare(a, b)
    except ValueError as error:
        _fail(str(error))
    console = Console(soft_wrap=True, highlight=False)
    if report.differences:
        console.print(build_table(report, rows))
    for name in report.only_a:
        console.print(f"only in {a}: {name}", markup=False)
    for name in report.only_b:
        console.print(f"only in {b}: {name}", markup=False)
    worse = report.worse_than(tol)
    limit = "not bit-equal" if tol == 0 else f"beyond {tol:g}"
    console.print(f"{len(report.differences)} tensors on both sides, {len(worse)} {limit}", markup=False)
    raise typer.Exit(0 if report.is_equal(tol) else EXIT_DIFFERENT)


def _check_foreign(path: Path, tool: str, out: Path | None, overrides: list[str], world: int | None) -> None:
    """Translate, write, check."""
    if tool not in TOOLS:
        _fail(f"--from {tool}: must be {' or '.join(TOOLS)}.")
    if out is not None and out.exists():
        _fail(f"--out {out}: is there already, and is never overwritten. Name a new file, or delete it.")
    try:
        data, problems = read_mapping(path)
        if problems:
            raise RecipeError(problems, source=str(path))
        translation = translate(tool, data, world_size=world)
        fields = translation.recipe()
        problems = apply_overrides(fields, overrides)
        text = render(translation, fields, path)
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")
            typer.echo(translation.table())
        build_recipe(fields, problems, f"the recipe made of {path}", world_size=world)
    except (RecipeError, OSError) as error:
        _fail(str(error))
    if not translation.is_complete:
        typer.echo("Not all of it has an equivalent here: see NO EQUIVALENT and UNKNOWN above.", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)


def _load(
    path: Path, overrides: list[str] | None, world_size: int | None, default_world_size: int | None = None
) -> Recipe:
    """The checked recipe; every problem and exit code 2 where there are any."""
    try:
        return load_recipe(path, overrides or [], world_size=world_size, default_world_size=default_world_size)
    except RecipeError as error:
        _fail(str(error))


def _load_to_verify(path: Path, overrides: list[str] | None, world: int | None) -> tuple[Recipe, int]:
    """The recipe, without its data and the state of its folder, which nothing here reads; and the number of ranks."""
    try:
        checked = load_recipe(path, overrides or [], world_size=world, ignored=UNREAD_BY_VERIFY)
    except RecipeError as error:
        _fail(str(error))
    world = world or _implied_world_size(checked)
    if world is None:
        _fail("The number of ranks isn't known, and all of this is about them: give --world N.")
    num_devices = runtime.count_local_devices()
    if not runtime.under_launcher() and world > num_devices:
        _fail(
            f"{world} ranks would start here, which has {num_devices} accelerators or processors: give --world N with "
            "as few as show each axis once (e.g. 8), and overrides that make the recipe's sizes fit "
            "(mp_shard_size=null dist_config.ep_size=4), or start it under torchrun."
        )
    return checked, world


def _refuse_nproc(nproc: int | None) -> None:
    """Under a launcher."""
    if nproc is not None:
        world = runtime.world_size_from_launcher()
        _fail(f"--nproc {nproc}: a launcher has started {world} processes already; leave --nproc out.")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_USAGE)


def _implied_world_size(recipe: Recipe) -> int | None:
    """Ranks that the recipe's own sizes imply, if they do."""
    try:
        return resolve_sizes(recipe).world_size
    except ValueError:
        return None


def _sizes_table(recipe: Recipe, sizes: ParallelSizes) -> str:
    """The three views' axes, and how a global batch is cut."""
    rows = [
        ("ranks", f"{sizes.world_size}"),
        ("data", f"dp {sizes.dp_size} x cp {sizes.cp_size} x tp {sizes.tp_size}"),
        ("dense", f"mp_replicate {sizes.mp_replicate_size} x mp_shard {sizes.mp_shard_size} x tp {sizes.tp_size}"),
        ("expert", f"edp {sizes.edp_size} x efsdp {sizes.efsdp_size} x ep {sizes.ep_size}"),
        ("batch", _batch_text(recipe, sizes)),
    ]
    if recipe.stage == "rl":
        rows += [(role, _role_text(recipe, role, sizes.world_size)) for role in active_roles(recipe)]
        rows.append(("rollout", _rollout_text(recipe, sizes.world_size)))
    return "\n".join(f"  {name:<8}{text}" for name, text in rows)


def _role_text(recipe: Recipe, role: RoleName, world_size: int) -> str:
    """How a role lies on the ranks."""
    laid = role_recipe(recipe, role)
    sizes = resolve_sizes(laid, world_size)
    experts = "" if isinstance(laid.dist_config, Fsdp2Config) else f", efsdp {sizes.efsdp_size} x ep {sizes.ep_size}"
    return f"dp {sizes.dp_size} x cp {sizes.cp_size} x tp {sizes.tp_size}{experts}, {laid.model}"


def _rollout_text(recipe: Recipe, world_size: int) -> str:
    """How the engines lie on the ranks."""
    rollout = recipe.rollout
    if rollout.ep_size > 1:
        return f"{rollout.engine}, all ranks together, ep {rollout.ep_size}"
    return f"{rollout.engine}, {world_size // (rollout.tp_size * rollout.pp_size)} x tp {rollout.tp_size}"


def _batch_text(recipe: Recipe, sizes: ParallelSizes) -> str:
    if recipe.stage == "rl":
        prompts, n, mini = (
            recipe.global_batch_size or 0,
            recipe.rollout.sampling.n,
            recipe.algorithm.ppo_mini_batch_size,
        )
        updates = prompts // (mini or prompts) * recipe.algorithm.ppo_epochs
        return f"{prompts} prompts x {n} completions a step, in {updates} update{'s' if updates > 1 else ''}"
    if recipe.micro_batch_tokens is not None:
        count, most = recipe.global_batch_size, recipe.micro_batch_tokens
        return f"{count} samples over dp {sizes.dp_size}, in micro-batches of at most {most} tokens"
    micro, count = recipe.micro_batch_size, num_micro_batches(recipe, sizes)
    return f"{micro * sizes.dp_size * count} sequences = micro {micro} x dp {sizes.dp_size} x {count} micro-batches"


if __name__ == "__main__":
    main()
