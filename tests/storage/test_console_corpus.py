"""Hostile queries, through the front door and past it: nothing is read, changed or left behind."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

import storage
from flows import asking
from storage import console
from storage.readonly import ROOT
from tests.storage.hostile import BOMBS, CHANGING, HIDING, READING, WRITING
from tests.storage.hostile_child import TIME_LIMIT_S, run_past_the_gate
from tests.storage.rows import OPENED, learned, pin, planned, rollout, score, tokens, update

QUERIES = READING | WRITING | CHANGING | HIDING
SECRET = "canary-5e1f"
HARD_LIMIT_S = 2.0  # start included
MAX_ANSWER_S = 5.0  # the time limit, a second of grace, and a busy machine


@dataclass(frozen=True)
class Scene:
    """A store and what lies around it."""

    folder: Path
    store: storage.Store
    names: dict[str, str]

    def fill_in(self, query: str) -> str:
        for name, value in self.names.items():
            query = query.replace(f"{{{name}}}", value)
        return query

    def contents(self) -> dict[str, str]:
        """Every file and folder around and in the store, with the hash of its content."""
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in sorted(self.folder.rglob("*"))
        }


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A store next to a canary; working, temporary and home folder are there too."""
    folder = tmp_path_factory.mktemp("scene")
    store = storage.open(folder / "store", create=True)
    writer = store.open_stream("r1", OPENED)
    target = writer.event_id_of("rollouts", rollout())
    writer.append({"views_pinned": [pin()]}, "pin")
    writer.append({"rollouts": [rollout()], "rollout_tokens": [tokens(target)]}, "b")
    writer.append({"scores": [score(target, 1.0)], "replays": [planned(target)]}, "s")
    writer.append({"updates": [update()], "learned_samples": [learned(target)]}, "u")
    for name in ("work", "temp", "home"):
        (folder / name).mkdir()
    (folder / "canary.txt").write_text(SECRET)
    (folder / "canary.csv").write_text(f"a,b\n1,{SECRET}\n")
    foreign = folder / "foreign.parquet"
    with duckdb.connect(":memory:") as connection:
        connection.execute(f"copy (select '{SECRET}' as {SECRET.replace('-', '_')}) to '{foreign}'")
        hidden = f"select json_serialize_sql('from read_text(''{folder}/canary.txt'')')"
        [[serialized]] = connection.execute(hidden).fetchall()
    [segment] = (store.path / "events" / "rollouts").rglob("*.parquet")
    names = {
        "segment": str(segment),
        "address": f"{ROOT}/{segment.relative_to(store.path)}",
        "canary": str(folder / "canary.txt"),
        "canary_csv": str(folder / "canary.csv"),
        "foreign": str(foreign),
        "commit": sorted(path.name for path in (store.path / "_log").iterdir())[0],
        "store": str(store.path),
        "out": str(folder / "out"),
        "serialized": serialized.replace("'", "''"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "work")
        patch.setenv("TMPDIR", str(folder / "temp"))
        patch.setenv("HOME", str(folder / "home"))
        yield Scene(folder, store, names)
    assert storage.verify(storage.open(store.path), deep=True) == []


def test_the_corpus_is_large():
    assert len(QUERIES) + len(BOMBS) >= 60


def test_the_attack_on_a_segment_is_real(scene: Scene, tmp_path: Path):
    """DuckDB's own limits do not stop it: this is why segments are read through `readonly`."""
    copy = tmp_path / "segment.parquet"
    copy.write_bytes(Path(scene.names["segment"]).read_bytes())
    with duckdb.connect(":memory:") as connection:
        connection.execute(f"set allowed_paths = ['{copy}']")
        connection.execute("set enable_external_access = false")
        connection.execute("set lock_configuration = true")
        connection.execute(f"copy (select 1) to '{copy}' (use_tmp_file false)")
    assert copy.read_bytes() != Path(scene.names["segment"]).read_bytes()


@pytest.mark.parametrize("name", QUERIES)
def test_the_front_door_holds(scene: Scene, name: str):
    before = scene.contents()
    try:
        shown = repr(console.run_query(scene.store, scene.fill_in(QUERIES[name]), time_limit_s=5))
    except storage.QueryError as error:
        shown = str(error)
    assert SECRET not in shown
    assert scene.contents() == before


@pytest.mark.parametrize("name", QUERIES)
def test_nothing_is_reached_past_the_gate(scene: Scene, name: str):
    before = scene.contents()
    try:
        shown = repr(run_past_the_gate(scene.store, scene.fill_in(QUERIES[name])))
    except (duckdb.Error, UnicodeError) as error:
        shown = str(error)
    assert SECRET not in shown
    assert scene.contents() == before


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_ended_by_the_limits(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch):
    """Asked as `rrl sql` asks: nothing but its own limits ends what does not end by itself."""
    monkeypatch.setattr(asking, "GRACE_S", 1.0)
    before, began = scene.contents(), time.monotonic()
    question = asking.Question(str(scene.store.path), BOMBS[name], None, False, "csv", TIME_LIMIT_S)
    with suppress(storage.QueryError):
        asking.ask(question)
    assert time.monotonic() - began < MAX_ANSWER_S
    assert scene.contents() == before


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_past_the_gate_change_nothing(scene: Scene, name: str):
    before = scene.contents()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.hostile_child", str(scene.store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
    )
    try:
        said, _ = child.communicate(BOMBS[name].encode(), timeout=HARD_LIMIT_S)
        assert child.returncode < 0 or said.startswith((b"answered", b"refused")), said
    except subprocess.TimeoutExpired:  # as `flows.asking` does
        child.kill()
        child.communicate(timeout=HARD_LIMIT_S)
    assert scene.contents() == before
