"""What `rrl report` does."""

import sys
from dataclasses import dataclass
from pathlib import Path

import storage
from flows.cli import EXIT_DAMAGED, name_damaged, print_result
from flows.waiting import bar_after
from storage.errors import QueryError

BAR_AFTER_S = 2.0


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

    if not request.output.parent.is_dir():
        raise QueryError(
            f"--output: expected a file in an existing folder, came `{request.output}`; create "
            f"`{request.output.parent}` first"
        )
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
