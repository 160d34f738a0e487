"""Rows of one table, read straight from its segments."""

from collections.abc import Sequence
from itertools import pairwise
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
    held = sorted(
        (s for s in live if s.first_commit <= as_of and _may_hold(s, run_id, iteration)),
        key=lambda s: s.first_commit,
    )
    found = []
    for segment in held:
        rows = segments.read_positioned(files, segment)
        if segment.last_commit > as_of:
            rows = rows.filter(pc.field("_commit") <= as_of)
        if run_id is not None:
            rows = rows.filter(pc.field("run_id") == run_id)
        if iteration is not None:
            rows = rows.filter(pc.field("iteration") == iteration)
        if event_ids is not None:
            rows = rows.filter(pc.field("event_id").isin(pa.array(event_ids, pa.string())))
        found.append(rows)
    if not found:
        return []
    together = pa.concat_tables(found)
    if any(a.last_commit > b.first_commit for a, b in pairwise(held)):
        together = together.sort_by([(name, "ascending") for name in segments.POSITIONS])
    rows_of_all: list[dict[str, Any]] = together.drop_columns(list(segments.POSITIONS)).to_pylist()
    return rows_of_all


def _may_hold(segment: LiveSegment, run_id: str | None, iteration: int | None) -> bool:
    if run_id is not None and segment.run_id != run_id:
        return False
    low, high = segment.min_iteration, segment.max_iteration
    return iteration is None or low is None or high is None or low <= iteration <= high
