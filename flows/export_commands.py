"""What `rrl export jsonl|parquet|hf|verl|trl` does: write rollouts in the shape others read."""

from pathlib import Path

import storage
from flows.cli import print_result
from flows.waiting import bar_after
from storage.errors import QueryError
from storage.export_rollouts import export_rollouts as export

BAR_AFTER_S = 2.0


def export_rollouts(
    shape: str, query: str | None, output: Path | None, as_of: int | None, store_path: Path
) -> None:
    """Write the rollouts a query names, or all, to a new file or folder; say how many."""
    if output is None:
        raise QueryError(
            f"expected `rrl export {shape} --output PATH`, with `--query SQL` for some rollouts "
            "only; a database needs a folder with another name"
        )
    store = storage.open(store_path)
    num_rollouts = 0
    with bar_after(BAR_AFTER_S, "export") as advance:
        for done_frac, num_rollouts in export(store, shape, output, query, as_of):
            advance(done_frac, f"{num_rollouts} rollouts")
    print_result(f"{output.absolute()}: {num_rollouts} rollouts")
