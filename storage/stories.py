"""Everything the log says about one event."""

import json
from typing import Any

from storage.errors import QueryError
from storage.identity import ID_HEX_DIGITS
from storage.schemas import TABLES
from storage.store import Store

Rows = list[dict[str, Any]]

_REFERENCES = {  # the prefixes of what a column may name; None: any
    "rollout_id": ("ro", "di"),
    "attempt_id": ("ro",),
    "review_id": ("ro",),
    "target_id": None,
    "parent_id": None,
    "score_id": ("sc",),
}
_RUN_TABLES = ("run_overview", "runs", "training_history", "evaluations", "failures")
_MAX_CANDIDATES = 5


def story(store: Store, event_id: str, allow_damaged: bool = False) -> dict[str, Rows]:
    """Return the rows about one event by table: itself and all that name it; or those of a run.

    What a rollout answers and what came of it is added: `parent_rollouts`, nearest first,
    `parent_reviews` as they were read, `shown_reviews` (the earlier ones that were shown to the
    review), `child_scores`.

    Args:
        store: what to ask.
        event_id: an event id or a run id, or the beginning of one that no other shares.
        allow_damaged: tell what is left when segments are missing or cut.

    Raises:
        QueryError: nothing, or more than one thing, begins like that.
    """
    teller = _Teller(store, allow_damaged)
    found = teller.beginning(event_id)
    if len(found) != 1:
        raise QueryError(
            f"expected the id of an event or a run, or the beginning of just one; {event_id!r} "
            f"begins {', '.join(name for _, name in found) or 'none'}. `rrl runs` lists the runs"
        )
    [(kind, name)] = found
    rows = teller.of_run(name) if kind == "run" else teller.of_event(name)
    return {table: of_table for table, of_table in rows.items() if of_table}


class _Teller:
    def __init__(self, store: Store, allow_damaged: bool) -> None:
        self._store = store
        self._allow_damaged = allow_damaged

    def beginning(self, start: str) -> list[tuple[str, str]]:
        """Return (event or run, id) of what begins with `start`; an exact match stands alone."""
        table = next((t.name for t in TABLES.values() if t.prefix == start[:2]), "runs")
        if len(start) == len(TABLES[table].prefix) + ID_HEX_DIGITS and self._ask(
            table, "event_id = $id", start, "event_id"
        ):
            return [("event", start)]  # found by a Bloom filter, without looking at every id
        begins = f"starts_with(event_id, $id) limit {_MAX_CANDIDATES}"
        events = self._ask(table, begins, start, "event_id")
        runs = self._ask("runs", "starts_with(run_id, $id)", start, "distinct run_id")
        found = [("event", row["event_id"]) for row in events]
        found += [("run", row["run_id"]) for row in runs]
        exact = [pair for pair in found if pair[1] == start]
        return exact or found

    def of_run(self, run_id: str) -> dict[str, Rows]:
        return {name: self._ask(name, "run_id = $id", run_id) for name in _RUN_TABLES}

    def of_event(self, event_id: str) -> dict[str, Rows]:
        """Return the rows by table, asked column by column: an `or` would read every row."""
        rows = {}
        for name, table in TABLES.items():
            columns = ["event_id"] if event_id.startswith(table.prefix) else []
            columns += [c.name for c in table.columns if _may_name(c.name, event_id)]
            found = [row for c in columns for row in self._ask(name, f"{c} = $id", event_id)]
            rows[name] = list({row["event_id"]: row for row in found}.values())
        for distilled in rows["distillations"]:
            if distilled["rollout_id"] == event_id:  # what it was learned from as
                for name in ("replays", "learned_samples"):
                    rows[name] += self._ask(name, "rollout_id = $id", distilled["event_id"])
        return rows | self._around(event_id, rows) if event_id.startswith("ro") else rows

    def _around(self, event_id: str, rows: dict[str, Rows]) -> dict[str, Rows]:
        """Return what a rollout answers, and how the answers to it were judged."""
        parents = self._parents(event_id, rows["rollouts"])
        reviews = [row for row in rows["reviews"] if row["rollout_id"] == event_id]
        of_parents = [r for i in parents for r in self._ask("reviews", "rollout_id = $id", i)]
        shown = [s["review_id"] for r in reviews + of_parents for s in json.loads(r["memory_json"])]
        children = [row["event_id"] for row in rows["rollouts"] if row["parent_id"] == event_id]
        return {
            "parent_rollouts": list(parents.values()),
            "parent_reviews": of_parents,
            "shown_reviews": [
                r for i in shown for r in self._ask("reviews", "rollout_id = $id", i)
            ],
            "child_scores": [
                r for i in children for r in self._ask("scores", "target_id = $id", i)
            ],
        }

    def _parents(self, event_id: str, rollouts: Rows) -> dict[str, dict[str, Any]]:
        """Return the rollouts that one of `rollouts` answers, by id, nearest first."""
        found: dict[str, dict[str, Any]] = {}
        wanted = [row["parent_id"] for row in rollouts if row["event_id"] == event_id]
        while wanted and wanted[0].startswith("ro"):
            rows = self._ask("rollouts", "event_id = $id", wanted[0])
            found |= {row["event_id"]: row for row in rows}
            wanted = [row["parent_id"] for row in rows]
        return found

    def _ask(self, name: str, condition: str, value: str, columns: str = "*") -> Rows:
        query = f"select {columns} from {name} where {condition}"  # noqa: S608 - both come from this file
        relation = self._store.sql(query, {"id": value}, allow_damaged=self._allow_damaged)
        return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def _may_name(column: str, event_id: str) -> bool:
    prefixes = _REFERENCES.get(column, ())
    return prefixes is None or event_id.startswith(prefixes)
