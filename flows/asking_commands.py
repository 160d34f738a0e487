"""What `rrl sql` and `rrl export` do."""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import storage
from flows.asking import Question, ask
from flows.cli import EXIT_DAMAGED, name_damaged, print_result
from flows.waiting import bar_after
from storage.errors import QueryError

BAR_AFTER_S = 2.0


def sql(question: Question, output: Path | None) -> None:
    """Answer one SELECT, on stdout or in a new file."""
    if question.format_ == "parquet" and output is None:
        raise QueryError(
            "format parquet: expected a file to write, came none; name one with `--output FILE`"
        )
    if output is not None:
        _check_new(output)
    answer = ask(question)
    name_damaged(answer.damaged)
    if output is None:
        text = answer.data.decode().rstrip("\r\n")
        if sys.stdout.isatty():  # a bare \r of a completion would write over its line
            text = text.replace("\r\n", "\n").replace("\r", "\\r")
        print_result(text)
    else:
        _write_new(output, answer.data)
        print_result(f"{output.absolute()}: {len(answer.data)} bytes")
    if answer.damaged:
        sys.exit(EXIT_DAMAGED)


def export(folder: Path, as_of: int | None, store_path: Path) -> None:
    """Write the history as a plain DuckDB database; say what was written."""
    store = storage.open(store_path)
    num_rows = num_tables = 0
    with bar_after(BAR_AFTER_S, "export") as advance:
        for copied in storage.export_duckdb(store, folder, as_of=as_of):
            advance(copied.done_frac, copied.table)
            num_rows += copied.rows
            num_tables += 1
    number = store.number(as_of)
    print_result(f"store {store.path}, as of commit {number}: {num_tables} tables, {num_rows} rows")
    for path in sorted(folder.absolute().iterdir()):
        print_result(f"{path}: {path.stat().st_size} bytes")


def export_sft(
    what: Path, query: str | None, output: Path | None, as_of: int | None, store_path: Path
) -> None:
    """Write the rollouts a query names as JSON lines in a new file; say how many."""
    if str(what) != "sft" or query is None or output is None:
        raise QueryError(
            f"expected `rrl export sft --query SQL --output FILE`, or `rrl export FOLDER` without "
            f"these options; came `{what}`"
        )
    _check_new(output)
    store = storage.open(store_path)
    examples = storage.sft_examples(store, query, as_of)
    first = next(examples)  # a query that is refused leaves no file behind
    num_lines = 0
    try:
        with (
            output.open("x", encoding="utf-8") as file,
            bar_after(BAR_AFTER_S, "export") as advance,
        ):
            for done_frac, example in chain([first], examples):
                file.write(_sft_line(example) + "\n")
                num_lines += 1
                advance(done_frac, f"{num_lines} lines")
    except FileExistsError:
        _check_new(output)
    except BaseException:
        output.unlink(missing_ok=True)
        raise
    print_result(f"{output.absolute()}: {num_lines} lines, {output.stat().st_size} bytes")


def _sft_line(example: dict[str, Any]) -> str:
    line = {
        "prompt_id": example["prompt_id"],
        "messages": json.loads(example["messages_json"]),
        "completion": example["completion"],
        "reward": example["reward"],
    }
    if "turns_json" in example:
        line["turns"] = [message for said in json.loads(example["turns_json"]) for message in said]
    return json.dumps(line, ensure_ascii=False)


def _check_new(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise QueryError(f"--output: expected a new file, but `{output}` exists; name another")
    if not output.parent.is_dir():
        raise QueryError(
            f"--output: expected a file in an existing folder, came `{output}`; create "
            f"`{output.parent}` first"
        )


def _write_new(output: Path, data: bytes) -> None:
    try:
        with output.open("xb") as file:
            file.write(data)
    except FileExistsError:
        _check_new(output)
    except OSError as error:
        raise QueryError(f"--output: could not write `{output}`: {error.strerror}") from error
