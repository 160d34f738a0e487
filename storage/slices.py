"""What a condition selects of history, as of a commit, cut into shards that are read one by one.

Invariant: a slice and its shards follow from the commits up to `as_of`, the condition and the
scorer version alone, so whoever comes back to a slice finds the same shards. A shard reads the
segments, and of large ones the row groups, that its positions lie in. In memory are the positions
of the shards, the rows of one, and where states are wanted an id per prompt.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from storage.answers import printable_lines
from storage.errors import QueryError
from storage.gate import check_is_one_select, check_is_repeatable
from storage.schemas import TABLES
from storage.state import LiveSegment, State
from storage.store import Store
from storage.views import Views, names_in, quoted, table_sql, view_sql

Row = dict[str, Any]
Position = tuple[int, int]  # commit and row
MEMORY_LIMIT = "2GB"


@dataclass(frozen=True)
class Wanted:
    """What is to be judged: rollouts themselves, or the states their responses are cut into.

    `where` is an SQL condition over the columns of `rollouts`; None selects all, `run_id` those of
    one run. Final verdicts of (`scorer`, `scorer_version`) as of the commit `as_of` are kept.
    Responses of `unfit_runs` have no states that it could judge.
    """

    as_of: int
    scorer: str
    scorer_version: str
    target_kind: Literal["rollout", "state"]
    where: str | None = None
    run_id: str | None = None
    unfit_runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """How many rollouts a slice holds; `unfit` are those that cannot be judged, by reason."""

    num_rollouts: int
    num_judged: int
    num_left: int
    unfit: dict[str, int]


@dataclass(frozen=True)
class Shard:
    """The rollouts left between two positions, both included."""

    first: Position
    last: Position
    num_left: int

    def overlaps(self, segment: LiveSegment) -> bool:
        """Tell whether a segment may hold one of its commits."""
        return segment.first_commit <= self.last[0] and segment.last_commit >= self.first[0]


@dataclass(frozen=True)
class ShardRows:
    """What a shard holds, in the order of commits; the columns are told in `sql/slice/shard_*.sql`.

    `states` is empty for target kind "rollout". Otherwise these are the states of the rollouts, and
    those of their prompts alone; `is_first_of_prompt` tells of a rollout whether it is the first
    that the slice has left of its prompt.
    """

    rollouts: list[Row]
    states: list[Row]


class Slice:
    """A slice of the history in `store`; one thread at a time may use it."""

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self._store = store
        self._wanted = wanted
        self._views: Views | None = None
        self._paths: list[str] = []
        self._is_sliced_defined = False
        self._first_of_prompts: frozenset[str] | None = None
        condition = f"({wanted.where}\n)" if wanted.where is not None else "true"
        if wanted.run_id is not None:
            condition += f" and rollouts.run_id = {quoted(wanted.run_id)}"
        self._values = {
            "as_of": str(wanted.as_of),
            "scorer": quoted(wanted.scorer),
            "scorer_version": quoted(wanted.scorer_version),
            "where": condition,
            "unfit_runs": ", ".join(quoted(run_id) for run_id in wanted.unfit_runs),
        }

    def shards(self, shard_rollouts: int) -> tuple[Contents, list[Shard]]:
        """Return what the slice holds, and what is left of it in shards of at most so many.

        Raises:
            QueryError: the condition is not one, or does more than read.
            DamagedError: a segment that has to be read is missing or was changed.
        """
        if self._wanted.where is not None:
            check_condition(self._wanted.where)
        self._values["block_rows"] = str(shard_rollouts)
        blocks = self._ask("blocks")
        unfit: dict[str, int] = {}
        for block in blocks:
            if block["reason"] is not None:
                unfit[block["reason"]] = unfit.get(block["reason"], 0) + block["num_rollouts"]
        total = {
            name: sum(block[name] for block in blocks)
            for name in ("num_rollouts", "num_judged", "num_left")
        }
        left = [block for block in blocks if block["num_left"]]
        return Contents(**total, unfit=unfit), _merged(left, shard_rollouts)

    def read(self, shard: Shard) -> ShardRows:
        """Return what has to be known to judge a shard.

        Raises:
            QueryError: the condition fails on one of its rows.
            DamagedError: a segment that has to be read is missing or was changed.
        """
        if self._wanted.target_kind == "rollout":
            return ShardRows(self._ask("shard_rollouts", shard), [])
        if self._first_of_prompts is None:
            firsts = self._ask("first_of_prompts")
            self._first_of_prompts = frozenset(row["rollout_id"] for row in firsts)
        responses = self._ask("shard_responses", shard)
        if any(row["completion_ids"] is None for row in responses):  # in another commit
            responses = self._ask("shard_responses", shard, are_tokens_near=False)
        for row in responses:
            row["is_first_of_prompt"] = row["event_id"] in self._first_of_prompts
        ids = {
            "rollout_ids": [row["event_id"] for row in responses],
            "prompt_ids": list({row["prompt_id"]: None for row in responses}),
        }
        return ShardRows(responses, self._ask("shard_states", shard, ids))

    def _ask(
        self,
        name: str,
        shard: Shard | None = None,
        params: dict[str, list[str]] | None = None,
        are_tokens_near: bool = True,
    ) -> list[Row]:
        """Return the rows of `sql/slice/<name>.sql` over the slice, or one shard of it."""

        def ask(state: State) -> list[Row]:
            query = self._filled(name)
            views = self._views_over(state, query)
            try:
                self._define(views, state, shard, are_tokens_near)
                rows = views.connection.sql(query, params=params or {}).to_arrow_table()
            except duckdb.Error as error:
                self._store.check_whole(again=True)
                raise QueryError(
                    f"the slice cannot be read: {printable_lines(str(error))}"
                ) from error
            found: list[Row] = rows.to_pylist()
            return found

        return self._store.answered(ask)

    def _views_over(self, state: State, query: str) -> Views:
        """Return the connection, with what the slice and `query` name.

        It is made anew when segments were compacted; what is committed later is of no interest.
        """
        live = self._live(state)
        text = self._sliced() + query
        names = names_in(text)
        self._store.check_whole()
        self._store.check_hashes(s for s in live if s.table in names)
        paths = sorted(s.path for s in live)
        if self._views is None or paths != self._paths:
            self._views, self._paths = Views(str(self._store.path), live, self._wanted.as_of), paths
            _lock(self._views)
            self._is_sliced_defined = False
        self._views.define(text)
        return self._views

    def _define(
        self, views: Views, state: State, shard: Shard | None, are_tokens_near: bool
    ) -> None:
        """Define `sliced_rollouts` and `sliced_tokens`: those of a shard, or all."""
        run_id = self._wanted.run_id
        rollouts = [s for s in self._live(state, "rollouts") if run_id in (None, s.run_id)]
        if shard is not None:
            rollouts = [s for s in rollouts if shard.overlaps(s)]
        self._define_rows(views, "rollouts", rollouts, _positions(shard))
        if not self._is_sliced_defined:
            _define_macro(views, "sliced()", self._sliced())
            self._is_sliced_defined = True
        if shard is None or self._wanted.target_kind == "rollout":
            return
        tokens = self._live(state, "rollout_tokens")
        if are_tokens_near:
            tokens = [s for s in tokens if shard.overlaps(s)]
        self._define_rows(views, "tokens", tokens, _commits(shard) if are_tokens_near else "true")

    def _define_rows(
        self, views: Views, what: str, live: Iterable[LiveSegment], condition: str
    ) -> None:
        table = TABLES["rollouts" if what == "rollouts" else "rollout_tokens"]
        in_order = sorted(live, key=lambda s: s.first_commit)
        rows = table_sql(table, str(self._store.path), in_order)
        _define_macro(views, f"live_{what}(as_of)", rows)
        select = f"select * from live_{what}({self._wanted.as_of}) as r where {condition}"  # noqa: S608
        _define_macro(views, f"sliced_{what}()", select)

    def _live(self, state: State, table: str | None = None) -> list[LiveSegment]:
        """Return the segments, all or those of a table, that may hold rows as of the commit."""
        return [
            s
            for s in state.segments.values()
            if s.first_commit <= self._wanted.as_of and table in (None, s.table)
        ]

    def _sliced(self) -> str:
        kind = self._wanted.target_kind
        return self._filled("rollouts" if kind == "rollout" else "responses")

    def _filled(self, name: str) -> str:
        """Return an SQL text without its comments and with what is known filled in."""
        text = re.sub("--.*", "", view_sql(f"slice/{name}"))
        return re.sub(r"\$(\w+)", lambda m: self._values.get(m[1], m[0]), text)


def check_condition(where: str) -> None:
    """Raise `QueryError` unless `where` is one condition over `rollouts` that can only read.

    What it says of a rollout must be the same whenever it is asked: no `random()`, no `now()`.
    """
    with duckdb.connect(":memory:") as connection:
        try:
            duckdb.SQLExpression(where)
        except duckdb.Error as error:
            raise QueryError(
                "expected one SQL condition over the columns of `rollouts`, such as "
                f"\"role = 'attempt' and iteration > 3\"; {printable_lines(str(error))}"
            ) from error
        query = f"select 1 from rollouts where ({where}\n)"  # noqa: S608 - that is what is checked
        check_is_one_select(connection, query)
        check_is_repeatable(connection, query)


def _lock(views: Views) -> None:
    """Leave a connection the files of its views, and one thread: the judge needs the others."""
    allowed = ", ".join(quoted(path) for path in views.paths())
    for setting in (
        "threads = 1",
        f"memory_limit = '{MEMORY_LIMIT}'",
        "temp_directory = ''",
        f"allowed_paths = [{allowed}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        views.connection.execute(f"set {setting}")


def _define_macro(views: Views, name: str, select: str) -> None:
    views.connection.execute(f"create or replace macro {name} as table {select}")


def _merged(blocks: Sequence[Row], shard_rollouts: int) -> list[Shard]:
    """Put neighbouring blocks together as long as they hold at most so many rollouts."""
    shards: list[Shard] = []
    for block in blocks:
        first = (block["_commit"], block["first_row"])
        last, num_left = (block["_commit"], block["last_row"]), block["num_left"]
        if shards and shards[-1].num_left + num_left <= shard_rollouts:
            before = shards.pop()
            first, num_left = before.first, before.num_left + num_left
        shards.append(Shard(first, last, num_left))
    return shards


def _positions(shard: Shard | None) -> str:
    """Return the condition that a row lies in a shard."""
    if shard is None:
        return "true"
    (first, first_row), (last, last_row) = shard.first, shard.last
    if first == last:
        return f"r._commit = {first} and r._row between {first_row} and {last_row}"
    return (
        f"{_commits(shard)} and (r._commit > {first} or r._row >= {first_row}) "
        f"and (r._commit < {last} or r._row <= {last_row})"
    )


def _commits(shard: Shard | None) -> str:
    if shard is None:
        return "true"
    return f"r._commit between {shard.first[0]} and {shard.last[0]}"
