"""Opening a store, asking it, and what importing the package costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import storage
from tests.storage.rows import OPENED, rollout


def test_a_folder_without_a_store_is_not_one(tmp_path: Path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(storage.StoreNotFoundError, match="rrl init"):
            storage.open(path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_created_once_and_then_opened(tmp_path: Path):
    created = storage.open(tmp_path / "a" / "b", create=True)
    created.open_stream("r1", OPENED)
    assert storage.open(tmp_path / "a" / "b", create=True).head() == created.head()
    assert storage.open(str(tmp_path / "a" / "b")).path == tmp_path / "a" / "b"


def test_a_store_is_not_created_among_other_files(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(storage.StoreNotFoundError, match="holds other files"):
        storage.open(tmp_path, create=True)


def test_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    store = storage.open("here", create=True)
    assert store.path == tmp_path / "here"


@pytest.mark.parametrize("name", ["with space", "it's", "a[1]*?", "ünï", "{a,b}", "a,b;c", "$x"])
def test_a_store_may_live_anywhere(tmp_path: Path, name: str):
    store = storage.open(tmp_path / name, create=True)
    for number in range(2):
        store.open_stream("r1", OPENED).append({"rollouts": [rollout(f"p{number}")]}, "b")
    query = "select count(*), max(_commit) from rollouts"
    assert store.sql(query).fetchall() == [(2, 4)]
    assert storage.console.run_query(store, query).rows == [(2, 4)]
    assert not storage.verify(store, deep=True)


def test_answers_are_relations_that_stay(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"rollouts": [rollout("p1"), rollout("p2")]}, "b")
    relation = store.sql(
        "select prompt_id, temperature from rollouts where prompt_id > $least order by all",
        {"least": "p1"},
    )
    writer.append({"rollouts": [rollout("p3")]}, "c")
    assert relation.columns == ["prompt_id", "temperature"]
    assert relation.fetchall() == [("p2", 1.0)]
    assert relation.pl().to_dicts() == [{"prompt_id": "p2", "temperature": 1.0}]
    assert store.sql("select count(*) from rollouts").fetchall() == [(3,)]


def test_moments_are_utc(store: storage.Store, writer: storage.StreamWriter):
    [[stored, zone]] = store.sql(
        "select recorded_at, current_setting('TimeZone') from runs"
    ).fetchall()
    assert zone == "UTC"
    assert stored == store.read("runs")[0]["recorded_at"]
    assert stored.utcoffset().total_seconds() == 0


def test_a_wrong_query_is_a_query_error(store: storage.Store):
    table_that_is_a_variable = store
    assert table_that_is_a_variable
    for query in ("select nothing from rollouts", "from table_that_is_a_variable", "selec", ""):
        with pytest.raises(storage.QueryError):
            store.sql(query)


def test_several_threads_may_ask_at_once(store: storage.Store, writer: storage.StreamWriter):
    from concurrent.futures import ThreadPoolExecutor

    writer.append({"rollouts": [rollout(f"p{i}") for i in range(50)]}, "b")
    query = "select count(*) from rollouts r join rollouts s using (event_id)"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: store.sql(query).fetchall(), range(24)))
    assert answers == [[(50,)]] * 24


def test_a_held_run_is_seen_until_its_holder_is_gone(store: storage.Store):
    assert not storage.is_run_held(store, "Run 1")
    with storage.hold_run(store, "Run 1"):
        assert storage.is_run_held(store, "Run 1")
        assert not storage.is_run_held(store, "run 1")
        with storage.hold_run(store, "Run 1"):
            pass
        assert storage.is_run_held(store, "Run 1")
    assert not storage.is_run_held(store, "Run 1")


def test_all_names_are_exported():
    for name in storage.__all__:
        assert getattr(storage, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        storage.nothing  # noqa: B018
    assert issubclass(storage.DiskFullError, storage.StorageError)
    assert issubclass(storage.StorageError, ValueError)


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{code}\nprint(*{{m.split('.')[0] for m in sys.modules}})",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_storage_loads_nothing_heavy():
    assert not loaded_by("import storage") & {"pyarrow", "polars", "duckdb", "numpy", "pandas"}


def test_a_query_loads_duckdb_and_nothing_else(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"rollouts": [rollout()]}, "b")
    code = (
        "import storage\n"
        f"store = storage.open({str(store.path)!r})\n"
        "storage.console.answer(store, 'from training_history')\n"
        "store.view('run_overview')\n"
    )
    loaded = loaded_by(code)
    assert "duckdb" in loaded
    assert not loaded & {"pyarrow", "polars", "numpy", "pandas", "torch"}
