"""A store: a folder with the log of everything that happened, and questions to it.

Invariant: what a reader is told `as of N` never changes, whatever is appended later.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage import commits
from storage.artifacts import ArtifactStore
from storage.commits import Head
from storage.errors import DamagedError, QueryError, StoreNotFoundError
from storage.files import Files
from storage.identity import find_table
from storage.integrity import damage, read_checked
from storage.log import Answer, Log
from storage.state import LiveSegment, State

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from storage.views import Views
    from storage.writer import StreamWriter


def open_store(path: str | Path, create: bool = False) -> "Store":
    """Return the store at `path`; nothing of its log is read yet.

    Args:
        path: the folder.
        create: make an empty store where there is no folder, or an empty one.

    Raises:
        StoreNotFoundError: there is no store, and `create` is off or something else is there.
    """
    files = Files(Path(path).absolute())
    is_there = (files.root / commits.FOLDER).is_dir()
    if not is_there and not create:
        raise StoreNotFoundError(
            f"expected a store in `{files.root}`, found none; name another folder with --store, or "
            "create it with `rrl init`"
        )
    if not is_there and files.root.exists() and any(files.root.iterdir()):
        raise StoreNotFoundError(
            f"expected an empty folder to create a store in, but `{files.root}` holds other files; "
            "name another folder with --store"
        )
    if not is_there:
        files.create_root()
    if create:  # also when it is there: its creator may have been killed before it was durable
        files.make_folder(commits.FOLDER)
    return Store(files)


class Store:
    """A store on the local disk; made by `storage.open`."""

    def __init__(self, files: Files) -> None:
        self.path = files.root
        self.artifacts = ArtifactStore(files)
        self.files = files
        self.log = Log(files)
        self._lock = threading.Lock()
        self._views: Views | None = None
        self._views_head = 0  # the commit whose live segments they read
        self._whole: set[str] = set()  # segments whose size and footer were checked
        self._checked: set[str] = set()  # segments whose hash was checked

    def head(self) -> Head:
        """Return number and hash of the newest commit."""
        return self.log.refresh().head

    def open_stream(self, run_id: str, opened: Mapping[str, Any]) -> "StreamWriter":
        """Start the next epoch of a run and return its writer; earlier writers are superseded.

        Args:
            run_id: the run; any text that has a UTF-8 form.
            opened: the columns of `runs` except run_id, run_epoch and what.
        """
        from storage.writer import open_stream

        return open_stream(self.files, self.log, run_id, opened)

    def sql(
        self,
        query: str,
        params: Mapping[str, Any] | None = None,
        as_of: int | None = None,
        allow_damaged: bool = False,
        check_hashes: bool = True,
    ) -> "duckdb.DuckDBPyRelation":
        """Answer a query over the tables and views, and hold the answer in memory.

        `select count(*) from rollouts` reads as of `as_of`, `from rollouts(17)` as of commit 17.
        Segments that are missing or cut are always noticed, a flipped bit only by its hash: without
        it another number may be read. The first question of a process pays for the hashes of the
        tables it reads, a second or two a gigabyte.

        Args:
            query: one SQL statement, with `$name` for parameters.
            params: values of the parameters.
            as_of: commit number; None is the newest.
            allow_damaged: leave out the segments that `damaged` names, and check no hashes.
            check_hashes: compare each segment the query may read with its hash, once a process;
                False is for what a person looks at and nothing is built on.

        Returns:
            a relation: `.pl()` for Polars, `.fetchall()` for tuples, `.columns` for names.

        Raises:
            QueryError: the query is wrong, or `as_of` is no commit.
            DamagedError: a segment the query may read is missing or was changed.
        """
        number = self.number(as_of)

        def ask(state: State) -> "duckdb.DuckDBPyRelation":
            with self._query_errors(allow_damaged):
                return self._relation(
                    state, query, params, number, allow_damaged, check_hashes
                ).materialize()

        return self.answered(ask)

    def batches(
        self,
        query: str,
        params: Mapping[str, Any] | None = None,
        as_of: int | None = None,
        *,
        batch_rows: int = 10_000,
        check_hashes: bool = True,
    ) -> "Iterator[pa.RecordBatch]":
        """Answer a query as `sql` does, some rows at a time, however many there are.

        Only the batch at hand is held in memory, and what the query itself must hold (to sort, join
        or group). There is at least one batch, which may be empty. For a second pass ask again with
        the same `as_of`: the rows are the same, in the same order when the query orders them.

        Args:
            query: one SQL statement, with `$name` for parameters; or the name of a table or view,
                for all of its rows.
            params: values of the parameters; of a view the arguments beside `as_of`.
            as_of: commit number; None is the newest.
            batch_rows: the most rows of a batch.
            check_hashes: as for `sql`.

        Raises:
            QueryError: the query is wrong; `as_of` is no commit; or, in the middle of the answer, a
                file was merged with others and deleted before it was read.
            DamagedError: a segment the query may read is missing or was changed.
        """
        from storage.schemas import TABLES
        from storage.views import VIEWS, source_sql

        number = self.number(as_of)
        if query in TABLES or query in VIEWS:
            query = f"from {source_sql(query, number, params or {})}"

        def begin(state: State) -> "Iterator[pa.RecordBatch]":
            with self._query_errors(allow_damaged=False):
                relation = self._relation(state, query, params, number, False, check_hashes)
                return _begun(relation.to_arrow_reader(batch_rows))

        return self._rest(self.answered(begin), number)

    def _rest(self, batches: "Iterator[pa.RecordBatch]", number: int) -> "Iterator[pa.RecordBatch]":
        try:
            with self._query_errors(allow_damaged=False):
                yield from batches
        except QueryError as error:
            raise QueryError(
                f"{error}; this is not the first batch of the answer: begin again with "
                f"as_of={number} if its files were compacted meanwhile"
            ) from error

    def read(
        self,
        table: str,
        *,
        run_id: str | None = None,
        iteration: int | None = None,
        event_ids: Iterable[str] | None = None,
        as_of: int | None = None,
        check_hashes: bool = True,
    ) -> list[dict[str, Any]]:
        """Return the rows of a table in the order they were committed.

        Args:
            table: its name.
            run_id: only rows of this run.
            iteration: only rows of this iteration.
            event_ids: only these events; of each segment just the row groups that hold some.
            as_of: commit number; None is the newest.
            check_hashes: with `event_ids`, and where a large segment is read for one iteration,
                compare it with its hash first, once a process. Else hashes are always checked.

        Raises:
            DamagedError: a segment that may hold such rows is missing or was changed.
        """
        from storage.reading import Filters, read_rows

        number = self.number(as_of)
        ids = None if event_ids is None else frozenset(event_ids)

        def check(live: Sequence[LiveSegment]) -> None:
            self._raise_damage(self._damage_of(live))
            if check_hashes:
                self.check_hashes(live)

        def read(state: State) -> list[dict[str, Any]]:
            return read_rows(
                self.files,
                [s for s in state.segments.values() if s.table == table],
                find_table(table),
                Filters(run_id, iteration, ids),
                number,
                check,
            )

        return self.answered(read)

    def view(
        self,
        name: str,
        *,
        run_id: str | None = None,
        iteration: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        as_of: int | None = None,
        check_hashes: bool = True,
    ) -> list[dict[str, Any]]:
        """Return the rows of a view, in the view's order.

        Args:
            name: of the view, e.g. "training_history".
            run_id: only rows of this run.
            iteration: only rows of this iteration.
            arguments: those the view takes beside `as_of`, by name.
            as_of: commit number; None is the newest.
            check_hashes: as for `sql`.
        """
        from storage.views import ORDERS, VIEWS, source_sql

        if name not in VIEWS:
            raise QueryError(f"expected one of the views {', '.join(VIEWS)}; came `{name}`")
        filters = {"run_id": run_id, "iteration": iteration}
        used = {column: value for column, value in filters.items() if value is not None}
        condition = " and ".join(f"{column} = ${column}" for column in used) or "true"
        order = f"order by {ORDERS[name]}" if name in ORDERS else ""
        number, given = self.number(as_of), dict(arguments or {})
        source = source_sql(name, number, given)
        query = f"select * from {source} where {condition} {order}"  # noqa: S608 - from this package
        relation = self.sql(query, used | given, number, check_hashes=check_hashes)
        return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]

    def number(self, as_of: int | None) -> int:
        """Return `as_of`, or the newest commit for None; refuse numbers that are no commit."""
        newest = self.head().number
        if as_of is not None and not 0 <= as_of <= newest:
            raise QueryError(f"as_of: expected a commit from 0 to {newest}, came {as_of}")
        return newest if as_of is None else as_of

    def answered(self, ask: Callable[[State], Answer]) -> Answer:
        """Return what `ask` finds in the present state, see `Log.answered`."""
        return self.log.answered(ask)

    def damaged(self) -> dict[str, str]:
        """Return what is wrong with live segments, by path, as far as size and footer show it."""
        return self._damage_of(self.log.refresh().segments.values())

    def _damage_of(self, live: Iterable[LiveSegment]) -> dict[str, str]:
        found = {}
        for segment in live:
            if segment.path in self._whole:
                continue
            if (wrong := damage(self.path, segment)) is None:
                self._whole.add(segment.path)
            else:
                found[segment.path] = wrong
        return found

    def check_whole(self, again: bool = False) -> None:
        """Raise `DamagedError` naming every live segment that is missing or cut.

        `again` looks also at those that were found whole before.
        """
        if again:
            self._whole.clear()
        self._raise_damage(self.damaged())

    def _raise_damage(self, found: Mapping[str, str]) -> None:
        if found:
            listed = "; ".join(f"`{self.path / path}` {wrong}" for path, wrong in found.items())
            raise DamagedError(
                f"{len(found)} segments are damaged: {listed}. Restore them from a backup, or look "
                "at the rest with `--allow-damaged`"
            )

    def check_hashes(self, live: Iterable[LiveSegment]) -> None:
        """Compare segments with their committed hashes, once a process."""
        new = [segment for segment in live if segment.path not in self._checked]
        if not new:
            return
        from concurrent.futures import ThreadPoolExecutor

        def check(segment: LiveSegment) -> None:
            read_checked(self.files, segment)
            self._checked.add(segment.path)

        with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as threads:
            list(threads.map(check, new))

    def _relation(
        self,
        state: State,
        query: str,
        params: Mapping[str, Any] | None,
        number: int,
        allow_damaged: bool,
        check_hashes: bool,
    ) -> "duckdb.DuckDBPyRelation":
        from storage.views import names_in

        names = names_in(query)
        if not allow_damaged:
            self.check_whole()
            if check_hashes:
                self.check_hashes(s for s in state.segments.values() if s.table in names)
        connection = self._connection(state, number, query, allow_damaged)
        relation = connection.sql(query, params=dict(params or {}))
        if relation is None:
            raise QueryError(f"expected a query that has an answer, came {query!r}")
        return relation

    @contextmanager
    def _query_errors(self, allow_damaged: bool) -> Iterator[None]:
        """Say what a failed query failed by: a segment that is not whole, or itself."""
        import duckdb

        try:
            yield
        except (duckdb.Error, OSError) as error:  # Arrow's readers raise the latter
            self._whole.clear()
            self._views = None  # DuckDB gives up a database in which it failed itself
            if not allow_damaged:
                self.check_whole()
            raise QueryError(f"the query failed: {error}") from error

    def _connection(
        self, state: State, number: int, query: str, allow_damaged: bool
    ) -> "duckdb.DuckDBPyConnection":
        """Return a cursor that knows what `query` reads as of `number`.

        Only plain names are read as of `number`: a query without any can share the connection of
        another one. It is kept as the log goes on, since it has read the footers of segments, and
        never goes back: another thread may be about to ask it as of a later commit.
        """
        from storage.views import Views, plain_names_in

        live = state.segments.values()
        with self._lock:
            if allow_damaged:
                without = self.damaged()
                views = Views(str(self.path), [s for s in live if s.path not in without], number)
            else:
                kept = self._views
                if kept is None or (kept.as_of != number and plain_names_in(query)):
                    kept = self._views = Views(str(self.path), live, number)
                    self._views_head = state.head.number
                elif state.head.number > self._views_head:
                    kept.read_from(live)
                    self._views_head = state.head.number
                views = kept
            views.define(query)
            return views.connection.cursor()


def _begun(reader: "pa.RecordBatchReader") -> "Iterator[pa.RecordBatch]":
    """Return the batches of a reader, the first one fetched already; an empty one if none comes."""
    from pyarrow import RecordBatch

    first = next(reader, None)
    return chain([RecordBatch.from_pylist([], reader.schema) if first is None else first], reader)
