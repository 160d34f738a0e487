"""The export: DuckDB alone gives the answers of the store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.schemas import TABLES
from storage.views import VIEWS
from tests.storage.rows import (
    OPENED,
    failure,
    learned,
    pin,
    planned,
    prompt,
    rollout,
    score,
    tokens,
    update,
)

ALONE = """
import json, sys
import duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute(open(sys.argv[2]).read()) if sys.argv[2] else None
connection.execute("set TimeZone = 'UTC'")
queries = json.load(sys.stdin)
answers = [sorted(map(repr, connection.execute(query).fetchall())) for query in queries]
assert not {"storage", "flows"} & {name.split(".")[0] for name in sys.modules}
print(json.dumps(answers))
"""


@pytest.fixture
def filled(store: storage.Store) -> storage.Store:
    """A store with two iterations; its rollouts of the first are compacted."""
    writer = store.open_stream("r1", OPENED)
    writer.append({"prompts": [prompt("p1")], "failures": [failure("x")]}, "p")
    for iteration in (1, 2):
        rows = [rollout("p1", i, iteration) for i in range(3)]
        ids = [writer.event_id_of("rollouts", row) for row in rows]
        writer.append({"views_pinned": [pin(iteration)]}, f"pin-{iteration}")
        for i, row in enumerate(rows):
            writer.append({"rollouts": [row]}, f"b-{iteration}-{i}")
        writer.append(
            {
                "rollout_tokens": [tokens(i, iteration) for i in ids],
                "scores": [score(i, n / 2, iteration) for n, i in enumerate(ids)],
                "replays": [planned(i, n, iteration) for n, i in enumerate(ids)],
            },
            f"s-{iteration}",
        )
        writer.append(
            {"updates": [update(iteration)], "learned_samples": [learned(ids[0], iteration)]},
            f"u-{iteration}",
        )
        if iteration == 1:
            assert list(storage.compact(store, min_segments=2))
    return store


def exported(store: storage.Store, folder: Path, as_of: int | None = None) -> Path:
    done = list(storage.export_duckdb(store, folder, as_of=as_of))
    assert [step.table for step in done] == list(TABLES)
    assert done[-1].done_frac == 1.0
    return folder


def answered_alone(folder: Path, by: str, queries: list[str]) -> list[list[str]]:
    """The answers of a process that knows only DuckDB, from the database or the definitions."""
    files = [str(folder / "rrl.duckdb"), ""]
    if by == "views.sql":
        files = [":memory:", str(folder / "views.sql")]
    child = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *files],
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
    )
    assert child.returncode == 0, child.stderr
    answers: list[list[str]] = json.loads(child.stdout)
    return answers


def answers_of(store: storage.Store, queries: list[str], as_of: int | None) -> list[list[str]]:
    return [sorted(map(repr, store.sql(query, as_of=as_of).fetchall())) for query in queries]


@pytest.mark.parametrize("as_of", [None, 13])
def test_duckdb_alone_gives_every_answer(filled: storage.Store, tmp_path: Path, as_of: int | None):
    folder = exported(filled, tmp_path / "out", as_of)
    assert sorted(os.listdir(folder)) == ["rrl.duckdb", "views.sql"]
    names = [*TABLES, *VIEWS]
    queries = [f"select * from {name}" for name in names]
    queries += [f"select * from {name}(10)" for name in names]
    expected = answers_of(filled, queries, as_of)
    assert sum(map(bool, expected)) > len(names)  # most hold something
    for by in ("rrl.duckdb", "views.sql"):
        assert answered_alone(folder, by, queries) == expected, by


def test_columns_are_those_of_the_tables(filled: storage.Store, tmp_path: Path):
    folder = exported(filled, tmp_path / "out")
    queries = [f"select column_name, column_type from (describe {name})" for name in TABLES]
    assert answered_alone(folder, "rrl.duckdb", queries) == answers_of(filled, queries, None)


@pytest.mark.parametrize("what", ["folder", "file", "broken link"])
def test_an_existing_target_is_refused(filled: storage.Store, tmp_path: Path, what: str):
    target = tmp_path / "out"
    if what == "folder":
        target.mkdir()
    elif what == "file":
        target.write_text("x")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(storage.QueryError, match="expected a new folder"):
        next(storage.export_duckdb(filled, target))


def test_a_commit_that_is_none_is_refused(filled: storage.Store, tmp_path: Path):
    with pytest.raises(storage.QueryError, match="as_of"):
        next(storage.export_duckdb(filled, tmp_path / "out", as_of=99))
    with pytest.raises(storage.QueryError, match="does not exist"):
        next(storage.export_duckdb(filled, tmp_path / "nowhere" / "out"))


def test_damage_stops_the_export_and_leaves_nothing(filled: storage.Store, tmp_path: Path):
    segment: Any = next((filled.path / "events" / "scores").rglob("*.parquet"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 4] ^= 1
    segment.chmod(0o644)
    segment.write_bytes(data)
    with pytest.raises(storage.DamagedError, match="was changed"):
        list(storage.export_duckdb(storage.open(filled.path), tmp_path / "out"))
    assert os.listdir(tmp_path) == ["store"]


def test_an_export_that_is_left_leaves_nothing(filled: storage.Store, tmp_path: Path):
    steps = storage.export_duckdb(filled, tmp_path / "out")
    next(steps)
    steps.close()
    assert os.listdir(tmp_path) == ["store"]


def test_a_hostile_folder_name_stays_a_comment(tmp_path: Path):
    store = storage.open(tmp_path / "a'b\nselect;[x]*", create=True)
    store.open_stream("r1", OPENED)
    folder = exported(store, tmp_path / "out")
    for by in ("rrl.duckdb", "views.sql"):
        assert answered_alone(folder, by, ["select run_id from runs"]) == [["('r1',)"]]
