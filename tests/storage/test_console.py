"""The console: one SELECT that can read the store, change nothing, and show text safely."""

import csv
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import duckdb
import pytest

import storage
from storage import answers, console
from storage.answers import csv_text, json_text, printable, table_text
from storage.readonly import ROOT, ReadOnlyFiles
from storage.views import Views
from tests.storage.rows import OPENED, learned, planned, rollout, score, tokens, update


def fill(store: storage.Store) -> storage.Store:
    writer = store.open_stream("r1", OPENED)
    writer.append({"rollouts": [rollout("p1"), rollout("p2")]}, "b")
    return store


@pytest.fixture
def filled(store: storage.Store) -> storage.Store:
    return fill(store)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """The same store once for all tests that only ask: it is asked, and never written to."""
    return fill(storage.open(tmp_path_factory.mktemp("shared") / "store", create=True))


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) from rollouts",
        "from rollouts",
        "with x as (select 1 a) select * from x union all select 2",
        "select * from rollouts(1); -- a comment; with a semicolon",
        "/* select; */ select 1;",
        "describe rollouts",
        "show tables",
        "summarize scores",
        "values (1), (2)",
        "select * from (describe select 1)",
        "select ';', 'copy x to y', \"run_id\" from runs",
        "with recursive t(n) as (select 1 union all select n + 1 from t where n < 5) from t",
        "select unnest([1, 2]), * from range(3), generate_series(1, 2)",
        "select * from json_each('{\"a\": 1}')",
        "select run_id, row_number() over (order by run_id) from runs qualify true",
        "select (select max(iteration) from rollouts), [x + 1 for x in [1, 2]]",
    ],
)
def test_one_select_is_answered(shared: storage.Store, query: str):
    assert console.run_query(shared, query).columns


@pytest.mark.parametrize(
    "query",
    [
        "",
        ";",
        "-- select 1",
        "selec 1",
        "select 1; select 2",
        "select 1; drop table runs",
        "select 1 /* */ ; -- x\n copy (select 1) to '{out}'",
        "copy (select 1) to '{out}'",
        "copy runs from '{out}'",
        "with x as (copy (select 1) to '{out}') select 1",
        "with x as (copy (select 1) to '{segment}' (use_tmp_file false)) select * from x",
        "select * from (with x as (copy (select 1) to '{out}') select 1)",
        "with x as (insert into runs values (1) returning 1) from x",
        "with x as (delete from runs returning 1) from x",
        "from query('select 1')",
        "from query_table('rollouts')",
        "from json_execute_serialized_sql('{serialized}')",
        "from query('from json_execute_serialized_sql(''x'')')",
        "export database '{out}'",
        "attach '{out}' as other",
        "install httpfs",
        "load httpfs",
        "set threads = 1",
        "reset threads",
        "set enable_external_access = true",
        "pragma database_list",
        "pragma table_info('runs')",
        "call pragma_version()",
        "create table x as select 1",
        "create macro x() as 1",
        "insert into runs values (1)",
        "delete from runs",
        "update runs set _commit = 0",
        "drop view runs",
        "begin",
        "prepare p as select 1",
        "explain analyze select 1",
        "vacuum",
        "checkpoint",
        "use memory",
        "select * from read_text('/etc/passwd')",
        "select * from read_csv('/etc/passwd')",
        "select * from read_blob('{segment}')",
        "select * from read_parquet('{segment}')",
        "select (select max(content) from read_text('/etc/passwd'))",
        "select * from runs where exists (from READ_TEXT('/etc/passwd'))",
        "describe (select * from read_text('/etc/passwd'))",
        "select * from '/etc/passwd'",
        "select * from '{outside}'",
        "select * from glob('/etc/*')",
        "select * from sniff_csv('/etc/passwd')",
        "select * from parquet_metadata('{segment}')",
        "select * from duckdb_secrets()",
        "select * from enable_logging()",
        "select * from nothing_of_that_name",
    ],
)
def test_everything_else_is_refused(shared: storage.Store, query: str):
    folder = shared.path.parent
    [segment] = (shared.path / "events" / "rollouts").rglob("*.parquet")
    outside = folder / "outside.parquet"
    outside.write_bytes(segment.read_bytes())
    out = folder / "out.csv"
    copying = f"with x as (copy (select 1) to '{out}') select 1"
    with duckdb.connect(":memory:") as connection:
        serialize = "select json_serialize_sql($q)"
        [[serialized]] = connection.execute(serialize, {"q": copying}).fetchall()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, value in {
        "out": out,
        "segment": segment,
        "outside": outside,
        "serialized": serialized.replace("'", "''"),
    }.items():
        query = query.replace(f"{{{name}}}", str(value))
    with pytest.raises(storage.QueryError):
        console.run_query(shared, query)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_settings_are_locked_behind_the_gate(shared: storage.Store):
    settings = ("enable_external_access", "lock_configuration", "memory_limit", "temp_directory")
    query = "select " + ", ".join(f"current_setting('{name}')" for name in settings)
    [row] = console.run_query(shared, query).rows
    assert row == (False, True, "1.8 GiB", "")


def test_a_long_query_is_stopped(shared: storage.Store):
    endless = "select sum(a.range % 7) from runs, range(1000000000) a, range(100000) b"  # little
    with pytest.raises(storage.QueryError, match=r"stopped after 0\.3 s"):
        console.run_query(shared, endless, time_limit_s=0.3)


def test_rows_for_arrow_that_come_too_long_are_stopped(
    shared: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "MAX_ROWS", 10**12)
    monkeypatch.setattr(console, "MAX_ANSWER_BYTES", 10**12)
    endless = "select (a.range % 7)::utinyint x from runs, range(100000000000) a"
    with pytest.raises(storage.QueryError, match=r"stopped after 0\.2 s"):
        console.run_to_arrow(shared, endless, time_limit_s=0.2)


def test_a_query_that_begins_after_its_time_is_stopped(
    shared: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    """DuckDB forgets an interrupt that finds nothing at work, as between two statements."""
    lock = console.locked

    def lock_late(views: Any) -> Any:
        time.sleep(0.3)
        return lock(views)

    monkeypatch.setattr(console, "locked", lock_late)
    endless = "select sum(a.range % 7) from runs, range(1000000000) a, range(100000) b"
    with pytest.raises(storage.QueryError, match=r"stopped after 0\.1 s"):
        console.run_query(shared, endless, time_limit_s=0.1)


def test_too_many_rows_are_refused(filled: storage.Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "MAX_ROWS", 10)
    assert len(console.run_query(filled, "from runs, range(10)").rows) == 10
    with pytest.raises(storage.QueryError, match="add a LIMIT"):
        console.run_query(filled, "from runs, range(11)")


def test_a_query_that_needs_too_much_memory_fails_as_a_query(
    filled: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "MEMORY_LIMIT", "20MB")
    hungry = "select count(distinct range::varchar || 'x') from runs, range(5000000)"
    with pytest.raises(storage.QueryError, match="Out of Memory"):
        console.run_query(filled, hungry)


def test_answers_as_of_a_commit(filled: storage.Store):
    query = "select count(*) n from rollouts"
    assert console.run_query(filled, query, as_of=1).rows == [(0,)]
    assert console.answer(filled, query, as_of=1).startswith(
        f"store {filled.path}, as of commit 1\n"
    )
    assert console.run_query(filled, query).as_of == 2
    with pytest.raises(storage.QueryError, match="as_of"):
        console.run_query(filled, query, as_of=3)


def test_answers_as_text(filled: storage.Store):
    query = "select prompt_id, num_prompt_tokens n, error from rollouts order by 1"
    assert console.answer(filled, query).split("\n")[1:] == [
        "prompt_id  n  error",
        "---------  -  -----",
        "p1         3",
        "p2         3",
        "(2 rows)",
        "",
    ]
    assert console.answer(filled, query, format_="csv") == "prompt_id,n,error\r\np1,3,\r\np2,3,\r\n"
    assert json.loads(console.answer(filled, query, format_="json")) == [
        {"prompt_id": "p1", "n": 3, "error": None},
        {"prompt_id": "p2", "n": 3, "error": None},
    ]
    with pytest.raises(storage.QueryError, match="expected one of table, csv, json, came 'xml'"):
        console.answer(filled, query, format_="xml")


def test_text_of_completions_cannot_command_a_terminal():
    hostile = "\x1b[2J\x07\r\n\u202eevil\u200b\x9b1m\x00\ud800"
    shown = printable(hostile)
    assert shown == "\\x1b[2J\\x07\\r\\n\\u202eevil\\u200b\\x9b1m\\x00\\ud800"
    assert all(c.isprintable() for c in shown)
    table = table_text(["a\x1b"], [(hostile,), ([hostile],)])
    assert all(c.isprintable() or c == "\n" for c in table)
    assert printable("é 😀 'quoted' \\") == "é 😀 'quoted' \\"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_text_of_completions_cannot_be_a_formula(start: str):
    text = csv_text(["a", "b"], [(f"{start}HYPERLINK()", -1.5)])
    assert list(csv.reader(io.StringIO(text, newline="")))[1] == [f"'{start}HYPERLINK()", "-1.5"]


HIDDEN = {
    "escape": "\x1b[2J",
    "bell": "\x07",
    "delete": "\x7f",
    "C1 control": "\x9b1m",
    "bidi override": "\u202eevil",
    "bidi isolate": "\u2066evil",
    "bidi mark": "\u200f",
    "zero width space": "\u200b",
    "zero width joiner": "\u200d",
    "byte order mark": "\ufeff",
    "soft hyphen": "\xad",
    "line separator": "\u2028",
    "tag": "\U000e0041",
    "unassigned": "\U000e0fff",
    "NUL": "\0",
}


def test_hidden_characters_are_spelled_out_wherever_they_are(shared: storage.Store):
    selects = []
    for hidden in HIDDEN.values():
        text = f"chr({ord(hidden[0])}) || '{hidden[1:]}'"
        selects.append(f"select {text} a, [{text}] b, {{'k': [{text}]}} c, map {{{text}: 1}} d")
    result = console.run_query(shared, " union all ".join(selects))
    for (kind, hidden), row in zip(HIDDEN.items(), result.rows, strict=True):
        assert row[0] == hidden, kind
        renamed = [f"{name}{hidden}" for name in result.columns]
        for shown in (table_text(renamed, [row]), csv_text(renamed, [row])):
            assert all(c.isprintable() or c in "\r\n" for c in shown), kind
            assert shown.count(hidden[1:] or "\\") >= 8, kind
        shown = json_text(renamed, [row])
        assert all(" " <= c <= "~" or c == "\n" for c in shown), kind
        assert json.loads(shown)[0][f"b{hidden}"] == [hidden], kind


def test_errors_show_hidden_characters_too(shared: storage.Store):
    for query in (
        "select chr(27)::int from runs",
        "select \x1b[2J",
        'from "\x1b[2J"',
        "select '\x1b'::int from runs",
    ):
        with pytest.raises(storage.QueryError) as error:
            console.run_query(shared, query)
        assert all(c.isprintable() or c == "\n" for c in str(error.value))


@pytest.mark.parametrize("text", [" =1", "\n=1", "＝1", "＋1", "－1", "＠x"])  # noqa: RUF001
def test_formulas_behind_a_disguise(text: str):
    shown = csv_text([text], [(text, [text])])
    [[name], [cell, in_list]] = csv.reader(io.StringIO(shown, newline=""))
    assert (name, cell) == (f"'{text}", f"'{text}")
    assert in_list.startswith("[")


def test_numbers_are_no_formulas():
    row = (-1, -1.5, Decimal("-1.5"), True)
    assert csv_text(list("abcd"), [row]).split("\r\n")[1] == "-1,-1.5,-1.5,True"


def test_too_much_text_is_refused(filled: storage.Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "MAX_ANSWER_BYTES", 10_000)
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 10_000)
    assert len(console.answer(filled, "select repeat('x', 1000) from runs, range(9)")) > 9_000
    for query in (
        "select repeat('x', 1000) from runs, range(11)",
        "select [repeat('x', 1000)] from runs, range(11)",
        "select {'a': repeat('x', 1000)} from runs, range(11)",
        "select range(2000) from runs",
    ):
        with pytest.raises(storage.QueryError, match="at most 10000 bytes"):
            console.run_query(filled, query)
        with pytest.raises(storage.QueryError, match="at most 10000 bytes"):
            console.run_to_arrow(
                filled, query.replace("select", "select 'x' a,") + ", range(200) _"
            )
    wide = "select repeat('x', if(range = 1, 1000, 1)) a, 1 from runs, range(20)"
    with pytest.raises(storage.QueryError, match="use `--format csv`"):
        console.answer(filled, wide)
    assert console.answer(filled, wide, format_="csv").count("\n") == 21


def test_rows_as_arrow_keep_their_types(shared: storage.Store):
    rows, damaged = console.run_to_arrow(
        shared,
        "select 1::smallint a, recorded_at, [1.5::float] f, {'k': date '2026-01-02'} s from runs",
    )
    assert damaged == {}
    types = [str(field.type).split("[us")[0] for field in rows.schema]
    assert types == ["int16", "timestamp", "list<l: float>", "struct<k: date32[day]>"]
    with pytest.raises(storage.QueryError, match="different names"):
        console.run_to_arrow(shared, "select 1 a, 2 a from runs")
    with pytest.raises(storage.QueryError, match="one SELECT"):
        console.run_to_arrow(shared, "drop view runs")
    with pytest.raises(storage.QueryError, match="the query failed"):
        console.run_to_arrow(shared, "select ('a' || range)::int x from runs, range(3)")


def test_a_query_whose_segments_were_compacted_and_deleted_is_asked_again(
    filled: storage.Store, monkeypatch: pytest.MonkeyPatch
):
    writer = filled.open_stream("r2", OPENED)
    for i in range(3):
        writer.append({"rollouts": [rollout(f"q{i}")]}, f"b{i}")
    asked = []

    def define_late(views: Views, query: str) -> None:
        asked.append(query)
        if len(asked) == 1:
            list(storage.compact(filled, min_segments=2))
            storage.collect(filled, grace_s=0)
            storage.collect(filled, grace_s=0)
        define(views, query)

    define = Views.define
    monkeypatch.setattr(Views, "define", define_late)
    query = "select count(completion) from rollouts"
    assert console.run_query(filled, query).rows == [(5,)]
    assert len(asked) == 2


def test_files_for_duckdb_are_only_the_named_ones_and_only_read(filled: storage.Store):
    [path] = [s.path for s in filled.log.refresh().segments.values() if s.table == "rollouts"]
    files = ReadOnlyFiles(filled.path, [path])
    named = f"{ROOT}/{path}"
    data = (filled.path / path).read_bytes()
    file = files.open(named)
    file.seek(-4, 2)
    assert (file.read(10), file.tell(), file.read(1)) == (b"PAR1", len(data), b"")
    with ThreadPoolExecutor(1) as other:  # has a position of its own
        assert other.submit(file.read, 4).result() == b"PAR1"
    file.close()
    for mode in ("wb", "ab", "r+b", "xb", "r", "rb+"):
        with pytest.raises(PermissionError):
            files.open(named, mode)
    for other_path in (f"{ROOT}/_log", f"{ROOT}/../x", str(filled.path / path), path):
        with pytest.raises(FileNotFoundError):
            files.open(other_path)
        assert not files.exists(other_path)
        assert files.glob(other_path) == []


def test_json_holds_every_kind_of_value(shared: storage.Store):
    query = """select 1.5::double f, 'nan'::double n, true t, null z, [1, 2] l,
                      {'k': date '2026-01-02'} s, recorded_at m from runs"""
    [row] = json.loads(console.answer(shared, query, format_="json"))
    moment = row.pop("m")
    assert row == {
        "f": 1.5,
        "n": "nan",
        "t": True,
        "z": None,
        "l": [1, 2],
        "s": {"k": "2026-01-02"},
    }
    assert moment.endswith("+00:00")
    with pytest.raises(storage.QueryError, match="different names"):
        json_text(["a", "a"], [(1, 2)])


def test_the_story_of_a_rollout_is_everything_that_names_it(store: storage.Store):
    writer = store.open_stream("r1", OPENED)
    one, two = rollout("p1"), rollout("p2")
    target = writer.event_id_of("rollouts", one)
    other = writer.event_id_of("rollouts", two)
    child = rollout("p1", role="review", parent_id=target)
    writer.append(
        {
            "rollouts": [one, two, child],
            "rollout_tokens": [tokens(target), tokens(other)],
            "scores": [score(target, 1.0), score(other, 0.0)],
            "replays": [planned(target)],
            "updates": [update()],
            "learned_samples": [learned(target)],
        },
        "b",
    )
    story = console.story(store, target)
    assert list(story) == ["rollouts", "rollout_tokens", "scores", "replays", "learned_samples"]
    assert [row["role"] for row in story["rollouts"]] == ["attempt", "review"]
    assert [row["value"] for row in story["scores"]] == [1.0]
    assert console.story(store, target[:12]) == story
    assert list(console.story(store, "r1")) == ["run_overview", "runs"]


def test_a_story_needs_the_beginning_of_just_one(filled: storage.Store):
    filled.open_stream("r10", OPENED)
    assert console.story(filled, "r1")["runs"][0]["run_id"] == "r1"  # the exact one
    for start in ("r", "ro", "zz", "'"):
        with pytest.raises(storage.QueryError, match="beginning of just one"):
            console.story(filled, start)
