"""What `rrl sql` and `rrl export` do."""

import sys
from pathlib import Path

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
