"""Rows of one table, read straight from its segments."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage import segments
from storage.errors import RowError
from storage.files import Files
from storage.schemas import Table
from storage.state import LiveSegment


def read_rows(
    files: Files,
    live: Sequence[LiveSegment],
    table: Table,
    *,
    run_id: str | None,
    iteration: int | None,
    event_ids: set[str] | None,
    as_of: int,
) -> list[dict[str, Any]]:
    """Return the rows of `live`, oldest commit first, that fit every filter that is not None.

    `iteration` must be None for a table without that column.
    """
    if iteration is not None and "iteration" not in table.arrow_schema.names:
        raise RowError(f"table `{table.name}` has no column `iteration` to filter by")
    rows: list[dict[str, Any]] = []
    for segment in sorted(live, key=lambda s: s.first_commit):
        if segment.first_commit > as_of or not _may_hold(segment, run_id, iteration):
            continue
        found = segments.read(files, segment, as_of=as_of)
        if run_id is not None:
            found = found.filter(pc.field("run_id") == run_id)
        if iteration is not None:
            found = found.filter(pc.field("iteration") == iteration)
        if event_ids is not None:
            found = found.filter(pc.field("event_id").isin(pa.array(event_ids, pa.string())))
        rows += found.to_pylist()
    return rows


def _may_hold(segment: LiveSegment, run_id: str | None, iteration: int | None) -> bool:
    if run_id is not None and segment.run_id != run_id:
        return False
    low, high = segment.min_iteration, segment.max_iteration
    return iteration is None or low is None or high is None or low <= iteration <= high
