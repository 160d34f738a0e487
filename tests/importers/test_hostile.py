"""Files that were cut, made up or broken: what can be read is, and what cannot is named."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage.importers import jsonl
from storage.importers.formats import FORMATS, FileReader, ImporterError, find_files
from tests.importers.imported import ask, import_here, verl_line, write_lines

GOOD = json.dumps(verl_line(0))
BAD = [
    (b"\xff\xfe" + GOOD.encode("utf-16-le"), "not_utf8"),
    (b'{"input": "\xff", "output": "a"}', "not_utf8"),
    (b'{"input": "a", "output": "b", "input": "c"}', "repeated_key"),
    (b"[" * 10_000, "not_json"),
    (b'{"input": "a", "output": "b", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "not_json"),
    (b"[1, 2]", "not_json"),
    (b"null", "not_json"),
    (b'{"input": "a", "output": "b"', "not_json"),
    (b'{"input": "a", "output": "b", "step": ' + b"9" * 5000 + b"}", "not_json"),
    (b'{"input": "a", "output": ["b"]}', "unexpected"),
    (b'{"prompt": "a", "completion": "b"}', "unexpected"),
    (b"\x00\x01", "not_json"),
]


@pytest.mark.parametrize(("bad", "kind"), BAD)
def test_a_bad_line_costs_itself_and_is_named(
    bad: bytes, kind: str, store: storage.Store, tmp_path: Path
):
    path = write_lines(tmp_path / "1.jsonl", [GOOD, bad, "", json.dumps(verl_line(1))])
    done = import_here(store, "verl", path)
    assert (done.num_lines, done.num_rollouts, done.num_failures) == (4, 2, 1)
    [(found, phase, message)] = ask(store, "select kind, phase, message from failures")
    assert (found, phase) == (kind, "import")
    assert message.startswith(f"1 of 4 lines of {path} were left out (line 2): expected ")
    assert not storage.verify(store, deep=True)


def test_failures_count_all_lines_and_name_the_first(store: storage.Store, tmp_path: Path):
    lines = [GOOD if n % 2 else "{" for n in range(40)]
    done = import_here(store, "verl", write_lines(tmp_path / "1.jsonl", lines))
    assert (done.num_rollouts, done.num_failures) == (20, 20)
    [(message,)] = ask(store, "select message from failures")
    assert "20 of 40 lines" in message
    assert "(lines 1, 3, 5, 7, 9, ...)" in message


def test_u2028_does_not_end_a_line_and_the_last_needs_no_newline(
    store: storage.Store, tmp_path: Path
):
    path = tmp_path / "1.jsonl"
    text = "a\u2028b\u2029c\x85d\x0be"
    lines = [verl_line(n) | {"output": text} for n in range(2)]
    path.write_bytes("\n".join(json.dumps(x, ensure_ascii=False) for x in lines).encode())
    assert import_here(store, "verl", path).num_rollouts == 2
    assert ask(store, "select distinct completion from rollouts") == [(text,)]


def test_a_byte_order_mark_and_carriage_returns_are_passed_over(
    store: storage.Store, tmp_path: Path
):
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}\r\n".encode())
    done = import_here(store, "verl", path)
    assert (done.num_lines, done.num_rollouts, done.num_failures) == (3, 2, 0)


@pytest.mark.parametrize(
    ("written", "value", "kept"),
    [
        ("NaN", None, '{"as_written": "NaN"}'), ("-Infinity", None, '{"as_written": "-Infinity"}'),
        ("1e999", None, '{"as_written": "Infinity"}'), ("1", 1.0, '{"as_written": 1}'),
        ("0.5", 0.5, "{}"), ('"True"', 1.0, '{"as_written": "True"}'), ("-40", -40.0, None),
        ("false", 0.0, '{"as_written": false}'), ("null", None, '{"as_written": null}'),
        ('"good"', None, '{"as_written": "good"}'), ("[NaN]", None, '{"as_written": ["NaN"]}'),
        ("1" * 400, None, None), ('"\\ud800"', None, '{"as_written": "\ufffd"}'),
    ],
)  # fmt: skip
def test_a_reward_is_a_finite_number_or_none(
    written: str, value: float | None, kept: str | None, store: storage.Store, tmp_path: Path
):
    line = f'{{"input": "a", "output": "b", "step": 1, "score": {written}}}'
    import_here(store, "verl", write_lines(tmp_path / "1.jsonl", [line]))
    [(found, status, components)] = ask(store, "select value, status, components_json from scores")
    assert (found, status) == (value, "unscorable" if value is None else "ok")
    assert kept is None or components == kept


def test_lone_surrogates_become_replacement_characters(store: storage.Store, tmp_path: Path):
    line = (
        '{"input": "a\\ud800", "output": "\\udfffb", "score": 1.0, "\\udc00x": 2, "uid": "\\ud9"}'
    )
    bad = line.replace("\\ud9", "")
    good = line.replace('"\\ud9"', '"\\ud912"')
    done = import_here(store, "verl", write_lines(tmp_path / "1.jsonl", [good, bad]))
    assert (done.num_rollouts, done.num_failures) == (2, 0)
    assert ask(store, "select distinct completion from rollouts") == [("\ufffdb",)]
    assert ask(store, "select scorer from scores group by all order by 1") == [("?x",), ("score",)]
    assert not storage.verify(store, deep=True)


def test_a_line_too_long_is_passed_over_in_little_memory(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "1.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode() + b"\n" + b'{"input": "')
        for _ in range(200):
            file.write(b"x" * 2**20)
        file.write(b'"}\n' + GOOD.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = import_here(store, "verl", path)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert (done.num_lines, done.num_rollouts, done.num_failures) == (3, 2, 1)
    assert grown_mb < 150  # the line is 200 MB
    assert ask(store, "select kind, position from failures, imports") == [
        ("too_long", path.stat().st_size)
    ]
    assert import_here(store, "verl", path).ended == "nothing to do"


def test_a_last_line_that_is_cut_is_named_so_and_imported_once_it_is_whole(
    store: storage.Store, tmp_path: Path
):
    path = tmp_path / "1.jsonl"
    second = json.dumps(verl_line(1))
    path.write_text(f"{GOOD}\n{second[:20]}")
    done = import_here(store, "verl", path)
    assert (done.num_rollouts, done.num_failures) == (1, 1)
    assert ask(store, "select kind from failures") == [("cut",)]
    assert import_here(store, "verl", path).ended == "nothing to do"
    path.write_text(f"{GOOD}\n{second}")
    assert import_here(store, "verl", path).num_rollouts == 1
    path.write_text(f"{GOOD}\n{second}\n")  # the newline alone is nothing new
    assert import_here(store, "verl", path).num_rollouts == 0
    assert ask(store, "select count(*) from rollouts") == [(2,)]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds none"), (b"\n \n", "holds none"), (b"{\n{\n", r"2 of 2 lines .* \(lines 1, 2\)")],
)
def test_nothing_to_import_is_an_error_and_writes_nothing(
    content: bytes, message: str, store: storage.Store, tmp_path: Path
):
    path = tmp_path / "1.jsonl"
    path.write_bytes(content)
    with pytest.raises(ImporterError, match=message):
        import_here(store, "verl", path)
    assert store.head().number == 0


def test_a_folder_without_files_and_a_missing_path_are_refused(tmp_path: Path):
    with pytest.raises(ImporterError, match="expected files named like"):
        find_files(FORMATS["trl"], tmp_path)
    with pytest.raises(ImporterError, match="found none"):
        find_files(FORMATS["verl"], tmp_path / "missing")
    with pytest.raises(ImporterError, match="found something else"):
        find_files(FORMATS["verl"], Path("/dev/null"))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\x00" * 100 + b"PAR1"])
def test_a_broken_parquet_file_costs_itself(content: bytes, store: storage.Store, tmp_path: Path):
    path = tmp_path / "completions_00001.parquet"
    path.write_bytes(content)
    with pytest.raises(ImporterError, match="expected Parquet"):
        import_here(store, "trl", path)
    assert store.head().number == 0
    rows = {"step": [2], "prompt": ["p"], "completion": ["c"], "r": [1.0]}
    pq.write_table(pa.table(rows), tmp_path / "completions_00002.parquet")
    done = import_here(store, "trl", tmp_path)
    assert (done.num_rollouts, done.num_failures) == (1, 1)
    assert ask(store, "select count(*) from judged_rollouts where reward = 1") == [(1,)]
    assert import_here(store, "trl", tmp_path).ended == "nothing to do"


def test_a_parquet_file_that_is_damaged_inside_gives_what_is_before(
    store: storage.Store, tmp_path: Path
):
    path = tmp_path / "completions_00001.parquet"
    rows = {"step": [1] * 3000, "prompt": ["p"] * 3000, "completion": list(map(str, range(3000)))}
    pq.write_table(pa.table(rows), path, row_group_size=1000, compression="none")
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(2).dictionary_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    done = import_here(store, "trl", path)
    assert (done.num_rollouts, done.num_failures) == (1000, 1)
    assert import_here(store, "trl", path).ended == "nothing to do"


def test_a_reward_that_nests_deep_costs_its_text_alone(store: storage.Store, tmp_path: Path):
    for depth in (100, 600, 900, 950, 980):
        line = '{"input": "a", "output": "b", "step": 1, "x": ' + "[" * depth + "]" * depth + "}"
        path = write_lines(tmp_path / f"{depth}.jsonl", [line, GOOD])
        done = import_here(store, "verl", path)
        assert done.num_rollouts + done.num_failures == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_must_not_be_read_is_named(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", [GOOD])
    path.chmod(0)
    with pytest.raises(ImporterError, match="cannot be read: Permission denied"):
        import_here(store, "verl", path)


def test_a_parquet_file_is_read_by_batches(tmp_path: Path):
    path = tmp_path / "completions_00001.parquet"
    rows: dict[str, Any] = {
        "step": [1] * 3000, "prompt": ["p"] * 3000, "completion": [str(n) for n in range(3000)],
    }  # fmt: skip
    pq.write_table(pa.table(rows), path, row_group_size=500)
    records = list(FileReader(FORMATS["trl"], path))
    assert [record.number for record in records] == list(range(1, 3001))
    assert [record.samples[0].completion for record in records] == rows["completion"]


def test_a_hostile_path_is_text(store: storage.Store, tmp_path: Path):
    path = tmp_path / "a\n\x1b[31m\udcff.jsonl"
    write_lines(path, [GOOD])
    import_here(store, "verl", path)
    [(found,)] = ask(store, "select path from imports")
    assert found.endswith("a\n\x1b[31m\\udcff.jsonl")
