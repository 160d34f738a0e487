"""Rollouts in the shapes of others: what came from verl goes back as it was."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import storage
from flows.cli import app
from rrl_core.tasks.jsonl import JsonlSettings, build_jsonl
from storage import export_rollouts as exporting
from storage.export_rollouts import SHAPES, export_rollouts
from tests.importers.imported import import_here, verl_line, write_lines
from tests.storage.rows import OPENED, pin, prompt, rollout, score, tokens

ALL = "select event_id as rollout_id from rollouts where role <> 'imported_turn'"
MESSAGES = [{"role": "user", "content": "2 + 2 ="}]
Row = dict[str, Any]


def asked(prompt_id: str, **facts: Any) -> Row:
    return prompt(prompt_id) | {"messages_json": json.dumps(MESSAGES)} | facts


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def export(store: storage.Store, shape: str, output: Path, query: str | None = None) -> Path:
    assert list(export_rollouts(store, shape, output, query))[-1][0] == 1.0
    return output


@pytest.fixture
def native(store: storage.Store) -> storage.Store:
    """A run of two iterations; its newest reward is by version 1, and a judge knows better."""
    writer = store.open_stream("r1", OPENED)
    for iteration in (1, 2):
        rows = [rollout("p1", i, iteration, completion=f"#### {i}") for i in range(2)]
        ids = [writer.event_id_of("rollouts", row) for row in rows]
        scores = [score(i, n / 2, iteration) for n, i in enumerate(ids)]
        scores += [score(i, 0.25, iteration, scorer="judge", kind="judge") for i in ids]
        scores += [score(ids[0], 0.75, iteration, scorer_version="2")]
        writer.append(
            {
                "prompts": [asked("p1")], "rollouts": rows, "views_pinned": [pin(iteration)],
                "rollout_tokens": [tokens(i, iteration) for i in ids], "scores": scores,
            },
            f"i{iteration}",
        )  # fmt: skip
    return store


@pytest.mark.parametrize("chunk", [3, 1_024])
def test_what_verl_wrote_comes_back_with_the_same_fields(
    store: storage.Store, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exporting, "_ROWS_AT_ONCE", chunk)
    lines = [
        verl_line(0, gts="1", acc="True", uid="u0", request_id="r0"), verl_line(1, score=1),
        verl_line(2, output="", score=-40.5, pred="two", parts=[1, {"a": None}]),
        verl_line(3, output="a\u2028\x1b[2J\n</script>", fmt=False, none=None),
        {"input": "i", "output": "o", "step": 0}, *(verl_line(n) for n in range(5, 20)),
    ]  # fmt: skip
    import_here(store, "verl", write_lines(tmp_path / "all.jsonl", lines))
    folder = export(store, "verl", tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    back = [line for name in "012" for line in read_lines(folder / f"{name}.jsonl")]
    assert back == lines
    again = storage.open(tmp_path / "again", create=True)
    import_here(again, "verl", folder)
    groups = "select count(distinct group_id), count(*), sum(value) from rollouts left join scores "
    groups += "on target_id = rollouts.event_id and scorer = 'score'"
    assert again.sql(groups).fetchall() == store.sql(groups).fetchall()


def test_a_run_goes_to_verl_by_iteration_with_its_groups(native: storage.Store, tmp_path: Path):
    folder = export(native, "verl", tmp_path / "out")
    assert read_lines(folder / "2.jsonl") == [
        {"input": "2 + 2 =", "output": f"#### {n}", "gts": "4", "score": n / 2, "step": 2,
         "judge": 0.25, "uid": "g-p1"}
        for n in range(2)
    ]  # fmt: skip


def test_trl_has_a_file_for_each_step(native: storage.Store, tmp_path: Path):
    folder = export(native, "trl", tmp_path / "out")
    files = sorted(path.name for path in (folder / "completions").iterdir())
    assert files == ["completions_00001.parquet", "completions_00002.parquet"]
    table = pq.read_table(folder / "completions" / files[0])
    assert table.column_names == ["step", "prompt", "completion", "exact", "judge", "advantage"]
    assert table["exact"].to_pylist() == [0.0, 0.5]
    assert all(math.isnan(value) for value in table["advantage"].to_pylist())
    again = storage.open(tmp_path / "again", create=True)
    done = import_here(again, "trl", folder)
    assert (done.num_rollouts, done.num_scores, done.num_guessed_groups) == (4, 8, 2)


def test_jsonl_and_parquet_say_the_same(native: storage.Store, tmp_path: Path):
    lines = read_lines(export(native, "jsonl", tmp_path / "out.jsonl"))
    rows = pq.read_table(export(native, "parquet", tmp_path / "out.parquet")).to_pylist()
    assert [line.pop("rewards") for line in lines] == [
        json.loads(row.pop("rewards_json")) for row in rows
    ]
    assert lines == rows
    assert len(lines) == 4
    assert [line["reward"] for line in lines] == [0.0, 0.5, 0.0, 0.5]  # by the pinned version
    assert (lines[0]["prompt_ids"], lines[0]["completion_ids"]) == ([1, 2, 3], [4, 5])
    assert lines[0]["sampler_logprobs"] == [-0.5, -0.25]
    assert lines[0]["sampled_bounds"] is None


def test_an_export_is_a_file_of_problems(store: storage.Store, tmp_path: Path):
    """Eight rollouts of two prompts are two problems of the task `jsonl`."""
    lines = [verl_line(n, gts="7") for n in range(8)]
    import_here(store, "verl", write_lines(tmp_path / "1.jsonl", lines))
    path = export(store, "jsonl", tmp_path / "problems.jsonl")
    task = build_jsonl(JsonlSettings(path=path, eval_fraction=0))
    assert [(p.messages[0]["content"], p.answer) for p in task.prompts("train")] == [
        (f"user\nWhat is {n} + 1?\nassistant\n", "7") for n in range(2)
    ]


@pytest.mark.slow  # importing `datasets` takes seconds
def test_datasets_opens_the_hf_folder(native: storage.Store, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    writer = native.open_stream("r2", OPENED)
    writer.append({"prompts": [asked("p2", split="eval")], "rollouts": [rollout("p2")]}, "b")
    folder = export(native, "hf", tmp_path / "out")
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {split: rows.num_rows for split, rows in loaded.items()} == {"eval": 1, "train": 4}
    assert loaded["train"][0]["messages"] == MESSAGES


def test_the_hf_folder_has_a_card_and_a_file_for_each_split(native: storage.Store, tmp_path: Path):
    folder = export(native, "hf", tmp_path / "out")
    assert "  - split: train\n    path: data/train.parquet\n" in (folder / "README.md").read_text()
    assert pq.read_metadata(folder / "data" / "train.parquet").num_rows == 4


@pytest.mark.parametrize("shape", SHAPES)
def test_only_what_a_query_names_is_exported(shape: str, native: storage.Store, tmp_path: Path):
    query = "select event_id as rollout_id from rollouts where iteration = 2 and sample_index = 1"
    assert list(export_rollouts(native, shape, tmp_path / "out", query)) == [(1.0, 1)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select event_id from rollouts", "the one column `rollout_id`"),
        ("select 'no' as rollout_id", "1 ids that are no rollouts .*the first `no`"),
        ("select 'x' as rollout_id where false", "there are none"),
        ("drop table rollouts", "nothing was run"),
    ],
)
def test_an_export_that_is_refused_leaves_nothing(
    query: str, message: str, native: storage.Store, tmp_path: Path
):
    before = set(tmp_path.iterdir())
    with pytest.raises(storage.QueryError, match=message):
        list(export_rollouts(native, "jsonl", tmp_path / "out", query))
    assert set(tmp_path.iterdir()) == before


def test_the_command_exports_and_never_overwrites(
    native: storage.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["export", "verl", "--store", str(native.path)]
    with pytest.raises(storage.QueryError, match="--output PATH"):
        app(command, standalone_mode=False)
    app([*command, "--output", str(tmp_path / "out"), "--query", ALL], standalone_mode=False)
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 4 rollouts\n"
    with pytest.raises(storage.QueryError, match="expected a new path"):
        app([*command, "--output", str(tmp_path / "out")], standalone_mode=False)
