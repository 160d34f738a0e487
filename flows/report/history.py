"""What the log says of a run, read once, as of one commit."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.metrics import exploration
from flows.report.figures import Points, evenly
from storage import Moment, StorageError

Row = dict[str, Any]

MAX_EXPLORED = 60  # iterations whose texts are compared with each other
_READ = (
    "views_pinned", "training_history", "reward_spread", "evaluations", "forgetting",
    "learning_by_unit", "replay_plans", "picks", "retries", "value_models", "value_drift",
    "updates", "failures", "review_history", "review_lifts", "sampled_budget",
)  # fmt: skip
_COLUMNS = {
    "picks": ("iteration", "unit", "age", "prompt_id", "pick_kind", "base"),
    "retries": ("iteration", "unit", "outcome"),
    "updates": ("iteration", "step", "loss", "grad_norm", "learn_s", "is_skipped"),
}
_EXPLORED_AT_ONCE = 15
_EXPLORED_COLUMNS = {
    "rollouts": (
        "event_id", "iteration", "role", "status", "completion", "group_id", "prompt_id",
    ),
    "scores": ("iteration", "target_id", "scorer", "scorer_version", "value", "signature"),
}  # fmt: skip


@dataclass(frozen=True)
class History:
    """A run: its rows by table or view, and what its texts say of exploration, by iteration."""

    run_id: str
    opened: Row
    overview: Row
    rows: dict[str, list[Row]]
    explored: dict[int, dict[str, float | None]] = field(default_factory=dict)

    def points(self, name: str, column: str, **equal: Any) -> Points:
        """Return (iteration, value) of a column, of the rows where other columns are `equal`."""
        return [
            (row["iteration"], row[column])
            for row in self.rows[name]
            if all(row[key] == value for key, value in equal.items())
        ]

    def distinct(self, name: str, column: str) -> list[str]:
        """Return the values of a column in the order they appear."""
        return list(dict.fromkeys(row[column] for row in self.rows[name]))

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        found: dict[str, Any] = json.loads(self.opened["config_json"])
        return found


def read_history(moment: Moment, run_id: str) -> History:
    """Read a run.

    Raises:
        StorageError: the store has no such run.
    """
    opened = moment.read("runs", run_id=run_id)
    if not opened:
        known = sorted({row["run_id"] for row in moment.read("runs", columns=("run_id",))})
        raise StorageError(
            f"expected a run of {moment.store.path}, came `{run_id}`; there are "
            f"{', '.join(known) or 'none: start one with `rrl train`'}"
        )
    [overview] = moment.read("run_overview", run_id=run_id)
    rows = {
        name: moment.read(name, run_id=run_id, columns=_COLUMNS.get(name, ())) for name in _READ
    }
    rows["buffer_counts"] = moment.read("buffer_counts", arguments={"run": run_id})
    return History(run_id, opened[0], overview, rows, _explored(moment, run_id, rows))


def _explored(
    moment: Moment, run_id: str, rows: dict[str, list[Row]]
) -> dict[int, dict[str, float | None]]:
    sampled = [row["iteration"] for row in rows["training_history"] if row["num_rollouts"]]
    chosen = [int(iteration) for iteration in evenly(sampled, MAX_EXPLORED)]
    found: dict[int, dict[str, float | None]] = {}
    for first in range(0, len(chosen), _EXPLORED_AT_ONCE):
        some = chosen[first : first + _EXPLORED_AT_ONCE]
        texts = _Texts(moment, run_id, some)
        found |= {iteration: dict(exploration(texts, run_id, iteration)) for iteration in some}
    return found


class _Texts:
    """What `exploration` reads of some iterations, all at once: each query has its price."""

    def __init__(self, moment: Moment, run_id: str, iterations: list[int]) -> None:
        self._rows: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for table in ("rollouts", "scores", "views_pinned"):
            columns = _EXPLORED_COLUMNS.get(table, ())
            among = {"iteration": iterations}
            for row in moment.read(table, run_id=run_id, among=among, columns=columns):
                self._rows[table, row["iteration"]].append(row)

    def read(
        self, table: str, /, *, run_id: str | None = None, iteration: int | None = None
    ) -> list[Row]:
        """Return the rows of an iteration of the run."""
        return [] if iteration is None else self._rows[table, iteration]


def configs_that_differ(runs: Sequence[History]) -> list[list[Any]]:
    """Return the keys in which configurations differ, each with the value of every run."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(one.get(key, "–") for one in flat)] for key in keys]  # noqa: RUF001 - a dash
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(section: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in section.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", json.dumps(value, ensure_ascii=False)))
    return found
