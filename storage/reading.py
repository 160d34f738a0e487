"""Rows of one table, read straight from its segments."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage import segments
from storage.errors import RowError
from storage.files import Files
from storage.schemas import Table
from storage.state import LiveSegment

LARGE_BYTES = 2**18  # above, reading a segment whole takes longer than choosing its row groups


@dataclass(frozen=True)
class Filters:
    """Which rows are wanted; None leaves a filter out."""

    run_id: str | None = None
    iteration: int | None = None
    event_ids: frozenset[str] | None = None


def read_rows(
    files: Files,
    live: Sequence[LiveSegment],
    table: Table,
    filters: Filters,
    as_of: int,
    check: Callable[[Sequence[LiveSegment]], None],
) -> list[dict[str, Any]]:
    """Return the rows of `live`, oldest commit first, that fit every filter.

    Args:
        files: the store.
        live: all segments of the table.
        table: to read; without a column `iteration` it cannot be filtered by it.
        filters: which rows.
        as_of: only rows that were committed up to then.
        check: raises when a segment that is read in part is damaged.
    """
    if filters.iteration is not None and "iteration" not in table.arrow_schema.names:
        raise RowError(f"table `{table.name}` has no column `iteration` to filter by")
    held = sorted(
        (s for s in live if s.first_commit <= as_of and _may_hold(s, filters)),
        key=lambda s: s.first_commit,
    )
    if not held:
        return []
    if filters.event_ids is None:
        if large := [s for s in held if _is_read_in_part(s, filters)]:
            check(large)
        found = [_filtered(_rows(files, s, filters), filters, as_of) for s in held]
    else:
        check(held)
        ids = filters.event_ids
        with ThreadPoolExecutor(min(len(held), os.cpu_count() or 1)) as threads:
            parts = threads.map(lambda segment: segments.read_events(files, segment, ids), held)
            found = [_filtered(part, filters, as_of) for part in parts]
    together = pa.concat_tables(found)
    if any(a.last_commit > b.first_commit for a, b in pairwise(held)):
        together = together.sort_by([(name, "ascending") for name in segments.POSITIONS])
    rows: list[dict[str, Any]] = together.drop_columns(list(segments.POSITIONS)).to_pylist()
    return rows


def _rows(files: Files, segment: LiveSegment, filters: Filters) -> pa.Table:
    """Return the rows of a segment, those of an iteration alone where reading all takes long."""
    if filters.iteration is not None and _is_read_in_part(segment, filters):
        return segments.read_iteration(files, segment, filters.iteration)
    return segments.read_positioned(files, segment)


def _is_read_in_part(segment: LiveSegment, filters: Filters) -> bool:
    return filters.iteration is not None and segment.size_bytes > LARGE_BYTES


def _filtered(rows: pa.Table, filters: Filters, as_of: int) -> pa.Table:
    is_wanted = pc.less_equal(rows.column("_commit"), as_of)
    for name, value in (("run_id", filters.run_id), ("iteration", filters.iteration)):
        if value is not None:
            is_wanted = pc.and_(is_wanted, pc.equal(rows.column(name), value))
    return rows.filter(is_wanted)


def _may_hold(segment: LiveSegment, filters: Filters) -> bool:
    if filters.run_id is not None and segment.run_id != filters.run_id:
        return False
    iteration, low, high = filters.iteration, segment.min_iteration, segment.max_iteration
    return iteration is None or low is None or high is None or low <= iteration <= high
