"""`rrl sql`, `rrl show` and `rrl export` as a person meets them: files, limits, Ctrl-C, damage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

import storage
from flows import asking
from flows.asking import Question
from flows.cli import main
from storage import export as export_module
from tests.storage.rows import OPENED, rollout

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_STOP_S = 3.0  # on a busy machine; 0.3 s on an idle one
RRL = [sys.executable, "-m", "flows.cli"]
ENDLESS = {
    "recursion": "with recursive t(n) as (values (1) union all from t) select max(n) from t",
    "cross join": "select sum(a.range % 7) from range(1000000000) a, range(100000) b",
    "planning": "select regexp_matches(repeat('a', 3000000), '(a?){1000}(a*)*b')",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose `rrl-data` holds two rollouts."""
    store = storage.open(tmp_path / "rrl-data", create=True)
    writer = store.open_stream("r1", OPENED)
    writer.append({"rollouts": [rollout("p1"), rollout("p2", completion="=1+1\x1b[2J")]}, "b")
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RRL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def rrl(folder: Path, *arguments: str) -> tuple[int, str, str]:
    child = started(folder, *arguments)
    output, shown = child.communicate(timeout=60)
    return child.returncode, output, shown


@pytest.mark.parametrize("name", ENDLESS)
def test_ctrl_c_stops_a_query_at_once(folder: Path, name: str):
    before = sorted(folder.rglob("*"))
    child = started(folder, "sql", ENDLESS[name])
    while not children_of(child.pid):
        time.sleep(0.02)
    time.sleep(1.5)  # it has begun to answer
    [asker] = children_of(child.pid)
    pressed = time.monotonic()
    child.send_signal(signal.SIGINT)
    output, shown = child.communicate(timeout=10)
    assert time.monotonic() - pressed < MAX_STOP_S
    assert (child.returncode, output) == (130, "")
    assert shown == "rrl: interrupted\n"
    assert not Path(f"/proc/{asker}").exists()
    assert sorted(folder.rglob("*")) == before


def children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_query_that_hears_no_interrupt_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "GRACE_S", 1.0)
    question = Question(str(folder / "rrl-data"), ENDLESS["planning"], None, False, "csv", 0.5)
    # A busy machine may come to the limit before the plan is begun, which is where nobody listens.
    with pytest.raises(storage.QueryError, match=r"ended after 1\.5 s.*--time-limit|after 0\.5 s"):
        asking.ask(question)


def test_the_time_limit_can_be_chosen(folder: Path):
    code, output, shown = rrl(folder, "sql", ENDLESS["recursion"], "--time-limit", "0.3")
    assert (code, output) == (2, "")
    assert "stopped after 0.3 s" in shown or "ended after 5.3 s" in shown  # of a busy machine


def test_a_process_that_dies_is_an_error_of_the_query(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(asking, "_MAIN", ("-c", "import os; os.abort()"))
    with pytest.raises(storage.QueryError, match="ended with -6"):
        asking.ask(Question(str(folder), "select 1", None, False, "csv", 5))


def test_slow_queries_draw_no_progress_into_the_answer(folder: Path):
    query = "select current_setting('enable_progress_bar') as shown"
    _, output, _ = rrl(folder, "sql", query, "--format", "csv")
    assert output.split() == ["shown", "False"]


def test_answers_are_printed_or_written(folder: Path):
    query = "select prompt_id, completion from rollouts order by 1"
    code, output, _ = rrl(folder, "sql", query)
    assert code == 0
    assert output.split("\n")[0] == f"store {folder}/rrl-data, as of commit 2"
    assert "=1+1\\x1b[2J" in output
    for format_, begins in (("csv", "prompt_id,comp"), ("json", "[\n"), ("table", "store ")):
        target = folder / f"out.{format_}"
        code, output, _ = rrl(folder, "sql", query, "--format", format_, "-o", target.name)
        assert code == 0
        assert output == f"{target}: {target.stat().st_size} bytes\n"
        assert target.read_text().startswith(begins)
    assert "'=1+1\\x1b[2J" in (folder / "out.csv").read_text()
    assert json.loads((folder / "out.json").read_text())[1]["completion"] == "=1+1\x1b[2J"
    code, _, _ = rrl(folder, "sql", query, "--as-of", "1", "--format", "json", "-o", "none.json")
    assert json.loads((folder / "none.json").read_text()) == []


def test_parquet_keeps_the_types(folder: Path):
    query = "select recorded_at, epoch, [1.5::float] f from rollouts"
    assert rrl(folder, "sql", query, "--format", "parquet", "-o", "out.parquet")[0] == 0
    with duckdb.connect(":memory:") as connection:
        described = connection.execute(f"describe from '{folder}/out.parquet'").fetchall()
    assert [row[:2] for row in described] == [
        ("recorded_at", "TIMESTAMP WITH TIME ZONE"),
        ("epoch", "INTEGER"),
        ("f", "FLOAT[]"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "parquet"], "expected a file to write, came none"),
        (["-o", "taken"], "expected a new file, but `taken` exists"),
        (["-o", "link"], "expected a new file, but `link` exists"),
        (["-o", "nowhere/out"], "create `nowhere` first"),
        (["--as-of", "9"], "expected a commit from 0 to 2, came 9"),
        (["--time-limit", "0"], "--time-limit"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bad_options_are_refused(folder: Path, arguments: list[str], message: str):
    (folder / "taken").write_text("mine")
    (folder / "link").symlink_to("elsewhere")
    code, output, shown = rrl(folder, "sql", "select 1", *arguments)
    assert (code, output) == (2, "")
    assert message in shown
    assert (folder / "taken").read_text() == "mine"
    assert sorted(os.listdir(folder)) == ["link", "rrl-data", "taken"]


def test_what_parquet_cannot_hold_is_named(folder: Path):
    query = "select interval 1 day"
    code, _, shown = rrl(folder, "sql", query, "--format", "parquet", "-o", "out.parquet")
    assert code == 2
    assert "cast it" in shown
    assert not (folder / "out.parquet").exists()


def test_damage_is_named_and_the_rest_answered(folder: Path):
    event = storage.open(folder / "rrl-data").read("runs")[0]["run_id"]
    [segment] = (folder / "rrl-data" / "events" / "rollouts").rglob("*.parquet")
    segment.unlink()
    asked = ["sql", "select count(*) n from runs", "--format", "csv"]
    told = ["show", event]
    for arguments in (asked, told):
        code, output, shown = rrl(folder, *arguments)
        assert (code, output) == (3, "")
        assert "--allow-damaged" in shown
        code, output, shown = rrl(folder, *arguments, "--allow-damaged")
        assert code == 3
        assert output
        assert f"rrl: without {segment.relative_to(folder / 'rrl-data')}: is missing" in shown
    whole = storage.open(folder / "whole", create=True)
    assert rrl(folder, *asked, "--allow-damaged", "--store", str(whole.path))[0] == 0


def test_export_says_what_it_wrote(folder: Path):
    code, output, shown = rrl(folder, "export", "out", "--as-of", "1")
    assert (code, shown) == (0, "")
    assert output.startswith(
        f"store {folder}/rrl-data, as of commit 1: {len(storage.TABLES)} tables, 1 rows\n"
    )
    for name in ("rrl.duckdb", "views.sql"):
        assert f"{folder}/out/{name}: {(folder / 'out' / name).stat().st_size} bytes" in output
    code, _, shown = rrl(folder, "export", "out")
    assert code == 2
    assert "expected a new folder" in shown


def test_ctrl_c_that_duckdb_took_is_one_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def copy(*_: object) -> int:
        raise RuntimeError("Query interrupted")  # what DuckDB 2.0.1 makes of some

    monkeypatch.setattr(export_module, "_copy_table", copy)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["rrl", "export", "out"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "rrl: interrupted\n")
    assert os.listdir(folder) == ["rrl-data"]


def test_a_file_in_the_working_folder_is_not_loaded(folder: Path):
    """The process that asks must not find its modules where somebody else may write."""
    (folder / "duckdb.py").write_text("raise SystemExit('loaded')")
    (folder / "fsspec.py").write_text("raise SystemExit('loaded')")
    child = subprocess.run(
        [sys.executable, "-P", *RRL[1:], "sql", "select 1"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.returncode == 0, child.stderr
