"""The rows of one table in one append: checked, with their identity, on the way into a segment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa

from storage.errors import ClosedIterationError, ConflictError, RowError
from storage.identity import find_table, identify
from storage.rows import Columns, Rows, to_arrow
from storage.schemas import Table


class Event(NamedTuple):
    """The commit that has the event, its iteration if its place has one, and its content's hash."""

    commit: int
    iteration: int | None
    content_sha256: str


@dataclass(frozen=True)
class Batch:
    """Rows of one table as they were given; the lists run along them.

    `iterations` are those the rows count towards (None for tables without), whether or not the
    iteration is part of the place.
    """

    table: Table
    rows: pa.Table
    ids: list[str]
    hashes: list[str]
    iterations: list[int | None]

    def ends_by(self, iteration: int) -> bool:
        """Tell whether the iteration is part of the place, and of no row later than the given."""
        has_iteration = "iteration" in self.table.place_columns
        return has_iteration and all(i is not None and i <= iteration for i in self.iterations)

    def is_derived(self, number: int) -> bool:
        """Tell whether the row is a function of committed rows, see `storage.schemas`."""
        kinds = self.table.observed_kinds
        observed = bool(kinds) and self.rows.column("kind")[number].as_py() in kinds
        return self.table.nature == "derived" and not observed

    def complete(self, numbers: Sequence[int], epoch: int, recorded_at: datetime) -> pa.Table:
        """Return the rows `numbers` with the common columns, as they are stored."""
        ids, hashes, own = self.ids, self.hashes, self.rows
        if len(numbers) < len(ids):
            ids, hashes = [ids[n] for n in numbers], [hashes[n] for n in numbers]
            own = own.take(pa.array(numbers, pa.int64()))
        schema = self.table.arrow_schema
        common = {
            "event_id": pa.array(ids, pa.string()),
            "content_sha256": pa.array(hashes, pa.string()),
            "epoch": pa.repeat(pa.scalar(epoch, pa.int32()), len(ids)),
            "recorded_at": pa.repeat(
                pa.scalar(recorded_at, schema.field("recorded_at").type), len(ids)
            ),
        }
        columns = [common[n] if n in common else own.column(n) for n in schema.names]
        return pa.Table.from_arrays(columns, schema=schema)


def make_batch(table_name: str, rows: Rows, run_id: str) -> Batch:
    """Check `rows` against their table, fill in the run, and identify them."""
    table = find_table(table_name)
    for number, came in enumerate(_run_ids(rows, run_id)):
        if came != run_id:
            raise RowError(
                f"row {number} of `{table_name}`: expected run_id {run_id!r} or none, came "
                f"{came!r}; a stream holds the events of one run"
            )
    arrow = to_arrow(table, rows, run_id)
    ids, hashes = identify(table, arrow)
    has_iteration = "iteration" in arrow.column_names
    iterations = arrow["iteration"].to_numpy().tolist() if has_iteration else [None] * len(ids)
    return Batch(table, arrow, ids, hashes, iterations)


def _run_ids(rows: Rows, missing: str) -> Iterable[object]:
    """Return the run ids that rows came with."""
    if isinstance(rows, pa.Table):
        return rows.column("run_id").to_pylist() if "run_id" in rows.column_names else ()
    if isinstance(rows, Columns):
        return rows.values.get("run_id", [rows.same.get("run_id", missing)])
    return (row.get("run_id", missing) for row in rows)


def fresh_rows(batch: Batch, committed: Mapping[str, Event], closed: int) -> Sequence[int]:
    """Return the numbers of the rows that must be written: the first of each new place.

    Args:
        batch: the rows.
        committed: the events among them that are in the log already.
        closed: the last closed iteration, -1 for none.

    Raises:
        ConflictError: a derived row has the place of another one and another content.
        ClosedIterationError: a new row belongs to a closed iteration.
    """
    is_open = all(iteration is None or iteration > closed for iteration in set(batch.iterations))
    if is_open and not committed and len(set(batch.ids)) == len(batch.ids):
        return range(len(batch.ids))
    first = {event_id: event.content_sha256 for event_id, event in committed.items()}
    fresh = []
    for number, (event_id, content) in enumerate(zip(batch.ids, batch.hashes, strict=True)):
        if event_id not in first:
            _check_open(batch, number, closed)
            first[event_id] = content
            fresh.append(number)
        elif first[event_id] != content and batch.is_derived(number):
            where = "the same append"
            if event_id in committed:
                where = f"commit {committed[event_id].commit}"
            raise ConflictError(
                f"row {number} of `{batch.table.name}` at {_place(batch, number)}: `{event_id}` is "
                f"in {where} with content {first[event_id]}, came {content}. The same computation "
                "gave another result: keep the committed one, or record the new one as another "
                "place (a new scorer version or attempt)"
            )
    return fresh


def _check_open(batch: Batch, number: int, closed: int) -> None:
    iteration = batch.iterations[number]
    if iteration is not None and iteration <= closed:
        raise ClosedIterationError(
            f"row {number} of `{batch.table.name}` at {_place(batch, number)}: expected an "
            f"iteration after {closed}, which is closed; a closed iteration takes no new events"
        )


def _place(batch: Batch, number: int) -> dict[str, object]:
    row: dict[str, object] = batch.rows.slice(number, 1).to_pylist()[0]
    return {name: row[name] for name in batch.table.place_columns}
