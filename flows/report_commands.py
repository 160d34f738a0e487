"""What `rrl report` does."""

import sys
from dataclasses import dataclass
from pathlib import Path

import storage
from flows.cli import EXIT_DAMAGED, name_damaged, print_result
from flows.waiting import bar_after
from storage.errors import QueryError

BAR_AFTER_S = 2.0
_HEAD_BYTES = 2_048


@dataclass(frozen=True)
class ReportRequest:
    """What the command line asked for."""

    run_ids: tuple[str, ...]
    output: Path
    as_of: int | None
    num_rollouts: int
    allow_damaged: bool


def report(request: ReportRequest, store_path: Path) -> None:
    """Write the report of some runs as one HTML file; say what it holds."""
    from flows.report.page import make_page

    _check_output(request.output)
    store = storage.open(store_path)
    damaged = store.damaged() if request.allow_damaged else {}
    name_damaged(damaged)
    moment = storage.Moment(store, store.number(request.as_of), request.allow_damaged)
    run_ids = list(dict.fromkeys(request.run_ids))
    with bar_after(BAR_AFTER_S, "report") as advance:
        page = make_page(moment, run_ids, request.num_rollouts, advance)
    data = page.html.encode()
    try:
        request.output.write_bytes(data)
    except OSError as error:
        raise QueryError(
            f"--output: could not write `{request.output}`: {error.strerror}; name another file"
        ) from error
    print_result(
        f"{request.output.absolute()}: {page.num_plots} plots, {page.num_shown:,} of "
        f"{page.num_rollouts:,} rollouts, {len(data):,} bytes"
    )
    if damaged:
        sys.exit(EXIT_DAMAGED)


def _check_output(output: Path) -> None:
    """Refuse to write where no file can be, or over a file that is no report."""
    if not output.parent.is_dir():
        raise QueryError(
            f"--output: expected a file in an existing folder, came `{output}`; create "
            f"`{output.parent}` first"
        )
    if output.exists() and not (output.is_file() and _is_report(output)):
        raise QueryError(
            f"--output: expected a new file or an earlier report, but `{output}` is neither; name "
            "another"
        )


def _is_report(path: Path) -> bool:
    from flows.report.markup import GENERATOR

    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(_HEAD_BYTES)
