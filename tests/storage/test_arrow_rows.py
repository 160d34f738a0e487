"""Rows that come by column or in Arrow are the rows that dicts would have been."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import storage
from storage.rows import Columns, to_arrow
from storage.schemas import TABLES
from tests.storage.rows import OPENED, rollout, score, tokens

ROWS: dict[str, list[dict[str, Any]]] = {
    "rollouts": [rollout(sample_index=n, completion=f"#### {n}\ud800") for n in range(200)],
    "rollout_tokens": [
        tokens(f"ro{n}", completion_ids=[n] * n, sampler_logprobs=None if n % 3 else [-0.1] * n)
        for n in range(200)
    ],
    "scores": [score(f"ro{n}", n / 3 if n % 5 else None) for n in range(200)],
}


def by_column(rows: Sequence[dict[str, Any]]) -> Columns:
    """The first column as one value where it can be, the others as lists."""
    values = {name: [row[name] for row in rows] for name in rows[0]}
    alike = [n for n, found in values.items() if all(value == found[0] for value in found)]
    return Columns(
        {n: v for n, v in values.items() if n not in alike}, {n: rows[0][n] for n in alike}
    )


def in_arrow(table: str, rows: Sequence[dict[str, Any]]) -> pa.Table:
    return to_arrow(TABLES[table], rows, "r1")


def stored(path: Path, rows: Any) -> dict[str, list[Any]]:
    store = storage.open(path, create=True)
    committed = store.open_stream("r1", OPENED).append(rows, "b")
    assert not storage.verify(store, deep=True)
    found = {name: store.read(name) for name in rows}
    assert {name: committed.tables[name].num_rows for name in rows} == dict.fromkeys(rows, 200)
    for row in (row for of_table in found.values() for row in of_table):
        row.pop("recorded_at")
    return found


def test_rows_are_the_same_however_they_come(tmp_path: Path):
    dicts = stored(tmp_path / "dicts", ROWS)
    columns = {name: by_column(rows) for name, rows in ROWS.items()}
    assert {name: list(found) for name, found in columns.items()} == ROWS
    assert stored(tmp_path / "columns", columns) == dicts
    arrow = {name: in_arrow(name, rows) for name, rows in ROWS.items()}
    assert stored(tmp_path / "arrow", arrow) == dicts
    cut = {name: pa.concat_tables([t[:70], t[70:]]) for name, t in arrow.items()}
    assert stored(tmp_path / "pieces", cut) == dicts


def test_a_slice_is_its_rows(writer: storage.StreamWriter):
    whole = writer.append({n: in_arrow(n, rows) for n, rows in ROWS.items()}, "a").tables
    for name, rows in ROWS.items():
        again = writer.append({name: in_arrow(name, rows)[50:60]}, f"b-{name}").tables[name]
        assert again.equals(whole[name][50:60])


def test_columns_that_are_left_out_are_null_and_the_run_is_filled_in(writer: storage.StreamWriter):
    rows = in_arrow("rollouts", ROWS["rollouts"]).drop_columns(["run_id", "error", "arm"])
    found = writer.append({"rollouts": rows}, "b").rows["rollouts"]
    assert {(row["run_id"], row["error"], row["arm"]) for row in found} == {("r1", None, None)}


def replaced(table: str, **columns: Any) -> pa.Table:
    rows = in_arrow(table, ROWS[table][:2])
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows


def lists(values: list[Any], of: pa.DataType) -> pa.Array:
    return pa.array(values, pa.list_(of))


TWICE = replaced("scores").append_column("value", pa.array([0.0, 0.0]))
NO_TEXT = pa.Array.from_buffers(
    pa.string(),
    2,
    [None, pa.array([0, 3, 3], pa.int32()).buffers()[1], pa.py_buffer(b"\xed\xa0\x80")],
)


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        ("rollouts", replaced("rollouts").append_column("epoch", pa.array([1, 1])), "'epoch'"),
        ("rollouts", replaced("rollouts", run_id=pa.array(["r1", "r2"])), "row 1 .* came 'r2'"),
        ("rollouts", replaced("rollouts").drop_columns("completion"), "expected text, came NULL"),
        ("rollouts", replaced("rollouts", completion=pa.array(["", None])), "row 1: .* came NULL"),
        ("rollouts", replaced("rollouts", sample_index=pa.array([1, 2])), "int32, came int64"),
        ("rollouts", replaced("rollouts", completion=NO_TEXT), "completion`: .*Invalid UTF8"),
        ("rollouts", replaced("rollouts", prompt_id=NO_TEXT), "prompt_id`: .*Invalid UTF8"),
        ("scores", replaced("scores", value=pa.array([1.0, math.nan])), "NaN or an infinity"),
        (
            "rollout_tokens",
            replaced("rollout_tokens", completion_ids=lists([[1], [None]], pa.int32())),
            "one with None in it",
        ),
        (
            "rollout_tokens",
            replaced(
                "rollout_tokens", sampler_logprobs=lists([[], [-math.inf]], pa.float32())
            ),
            "NaN or an infinity",
        ),
        ("scores", TWICE, "two columns `value`"),
        ("rollouts", Columns({"completion": ["a"]}, {"surprise": 1}), "'surprise'"),
        (
            "rollouts",
            Columns({"completion": ["a"], "prompt_id": ["a", "b"]}, {}),
            "`completion` has 1 rows, `prompt_id` 2",
        ),
        ("rollouts", Columns({"completion": ["a"]}, {"run_id": "r2"}), "came 'r2'"),
        ("rollouts", Columns({"completion": ["a"]}, {"iteration": "1"}), "expected int, came '1'"),
    ],
)  # fmt: skip
def test_what_dicts_may_not_hold_arrow_may_not_either(
    store: storage.Store, writer: storage.StreamWriter, table: str, rows: Any, message: str
):
    head = store.head()
    with pytest.raises(storage.RowError, match=message):
        writer.append({table: rows}, "b")
    assert store.head() == head
