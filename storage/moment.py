"""A store as of one commit: what a report is made from.

Invariant: everything read through a moment is as of its commit, whatever is appended meanwhile.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import QueryError
from storage.schemas import TABLES
from storage.store import Store
from storage.views import ORDERS, VIEWS, source_sql

Row = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """A store as of commit `number`; with `allow_damaged` what is left of it."""

    store: Store
    number: int
    allow_damaged: bool = False

    @property
    def sha256(self) -> str:
        """Hash of the commit; empty before the first."""
        commit = self.store.log.read(self.number)
        return commit.sha256 if commit is not None else ""

    def read(
        self,
        name: str,
        *,
        run_id: str | None = None,
        iteration: int | None = None,
        among: Mapping[str, Collection[Any]] | None = None,
        columns: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Row]:
        """Return rows of a table, in the order they were committed, or of a view, in its own.

        Args:
            name: of the table or view.
            run_id: only rows of this run.
            iteration: only rows of this iteration.
            among: only rows whose column has one of these values, by column.
            columns: those wanted; all without any.
            arguments: those the view takes beside `as_of`, by name.

        Raises:
            QueryError: there is no such table, view, column or argument.
            DamagedError: a segment is damaged, and `allow_damaged` is off.
        """
        if name not in TABLES and name not in VIEWS:
            raise QueryError(f"expected a table or view, came `{name}`; see `show tables`")
        wanted, given = dict(among or {}), dict(arguments or {})
        equal = {"run_id": run_id, "iteration": iteration}
        params = {column: value for column, value in equal.items() if value is not None}
        conditions = [f"{column} = ${column}" for column in params]
        conditions += [f"{column} in (select unnest(${column}))" for column in wanted]
        everything = "* exclude (_commit, _row)" if name in TABLES else "*"
        order = "_commit, _row" if name in TABLES else ORDERS.get(name)
        selected = ", ".join(columns) or everything
        source = source_sql(name, self.number, given)
        query = f"select {selected} from {source}"  # noqa: S608 - names from this package
        query += f" where {' and '.join(conditions) or 'true'}"
        query += f" order by {order}" if order else ""
        params |= given | {column: sorted(values) for column, values in wanted.items()}
        relation = self.store.sql(query, params, self.number, self.allow_damaged)
        return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
