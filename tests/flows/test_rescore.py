"""History judged again: what is missing is added once, and nothing else changes."""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows.rescoring
import storage
from flows.cli import main
from rrl_core.tasks.protocol import Prompt
from storage.slices import Slice
from tests.flows.histories import (
    IN_PROCESS,
    check_judged_once,
    rescore_here,
    rescore_inside,
    write_history,
)
from tests.storage.conftest import memory_path  # noqa: F401 - a fixture
from tests.storage.rows import OPENED, score

Row = dict[str, Any]
TEN_INSIDE = ("--shard-rollouts", "10", "--set", *IN_PROCESS)
during: Callable[[int], None] = lambda number: None  # noqa: E731 - what a test has happen
num_calls = 0


def eventful(prompt: Prompt, completion: str) -> float:
    """A reward during which things happen."""
    global num_calls
    num_calls += 1
    during(num_calls)
    return 0.5


@pytest.fixture
def happening(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], str]:
    """Have something happen at each judgement; returns the scorer."""

    def have(what: Callable[[int], None]) -> str:
        monkeypatch.setattr(sys.modules[__name__], "during", what)
        monkeypatch.setattr(sys.modules[__name__], "num_calls", 0)
        return f"{__name__}:eventful"

    return have


@pytest.fixture
def store(memory_path: Path) -> storage.Store:  # noqa: F811
    return storage.open(memory_path / "store", create=True)


@pytest.fixture
def rrl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: storage.Store
) -> Callable[..., tuple[Any, str, str]]:
    """`rrl rescore ARGUMENTS` on the store: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        command = ["rrl", "rescore", *arguments, "--store", str(store.path)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return end.value.code, output.out, output.err

    return run


def scores_of(store: storage.Store, stream_id: str | None) -> list[dict[str, Any]]:
    assert stream_id is not None
    return store.read("scores", run_id=stream_id)


def test_every_rollout_is_judged_once_in_closed_shards(store: storage.Store):
    ids = write_history(store, 200)
    done = rescore_here(store, "final_number", shard_rollouts=64)
    assert (done.ended, done.num_shards, done.num_shards_judged) == ("finished", 4, 4)
    assert done.scores == {"ok": 200}
    rows = scores_of(store, done.stream_id)
    # Sample 0 and 2 of each group are right: 1, 0, 1, 0, ... in the order of the rollouts.
    assert [(row["target_id"], row["value"]) for row in rows] == [
        (event_id, float(n % 2 == 0)) for n, event_id in enumerate(ids)
    ]
    assert Counter(row["iteration"] for row in rows) == {0: 64, 1: 64, 2: 64, 3: 8}
    assert store.log.refresh().closed_iteration(str(done.stream_id)) == 3
    opened, ended = store.read("runs", run_id=done.stream_id)
    assert (opened["kind"], opened["planned_iterations"], ended["what"]) == (
        "rescore", 4, "finished",
    )  # fmt: skip
    assert json.loads(opened["config_json"])["scorer"] == "final_number"
    check_judged_once(store, ids, "final_number")


def test_a_second_time_adds_nothing_and_writes_nothing(
    store: storage.Store, rrl: Callable[..., tuple[Any, str, str]]
):
    write_history(store, 20)
    assert rrl("--scorer", "final_number")[0] == 0
    head = store.head()
    code, shown, _ = rrl("--scorer", "final_number")
    assert (code, store.head()) == (0, head)
    assert "20 were judged before by final_number (version 1)" in shown
    assert "0 scores added: nothing is missing" in shown
    # Another request finds the same scores.
    assert rescore_here(store, "final_number", shard_rollouts=3).ended == "nothing to do"


def test_what_came_since_is_added_by_another_stream(store: storage.Store):
    write_history(store, 20)
    first = rescore_here(store, "final_number", run_id="history")
    new = write_history(store, 10, first=64)
    second = rescore_here(store, "final_number", run_id="history")
    assert str(first.stream_id).endswith("-1")
    assert str(second.stream_id) == str(first.stream_id)[:-1] + "2"
    assert [row["target_id"] for row in scores_of(store, second.stream_id)] == new


def test_a_slice_is_judged_as_of_its_commit(store: storage.Store):
    ids = write_history(store, 16, per_commit=8)
    as_of = store.head().number
    write_history(store, 16, first=64)
    done = rescore_here(store, "final_number", where="sample_index < 2", as_of=as_of)
    judged = [row["target_id"] for row in scores_of(store, done.stream_id)]
    assert judged == [event_id for n, event_id in enumerate(ids) if n % 4 < 2]
    [pin] = store.read("views_pinned", run_id=done.stream_id)
    assert (pin["as_of"], pin["as_of_sha256"]) == (as_of, store.log.read(as_of).sha256)
    assert json.loads(pin["scorer_versions_json"]) == {"final_number": "1"}


def test_an_edited_reward_is_another_version_and_old_scores_stay(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    write_history(store, 12)
    values = {}
    for constant in ("0.25", "0.75"):
        source = f"def reward(prompt, completion):\n    return {constant}\n"
        (tmp_path / "my_edited_reward.py").write_text(source)
        sys.modules.pop("my_edited_reward", None)
        done = rescore_here(store, "my_edited_reward:reward")
        assert done.scores == {"ok": 12}
        values[done.scorer_version] = float(constant)
    rows = store.read("scores")
    assert Counter((r["scorer_version"], r["value"]) for r in rows) == dict.fromkeys(
        values.items(), 12
    )


def test_an_unfinished_stream_of_an_edited_reward_is_left_and_all_is_judged_anew(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    write_history(store, 12)
    path = tmp_path / "my_stopped_reward.py"
    path.write_text("import os, signal\ncalls = []\ndef reward(prompt, completion):\n"
                    "    calls.append(1)\n    if len(calls) == 6:\n"
                    "        os.kill(os.getpid(), signal.SIGINT)\n    return 0.25\n")  # fmt: skip
    stopped = rescore_inside(store, "my_stopped_reward:reward", shard_rollouts=4)
    assert (stopped.ended, stopped.scores) == ("interrupted", {"ok": 8})
    path.write_text("def reward(prompt, completion):\n    return 0.75\n")
    sys.modules.pop("my_stopped_reward")
    done = rescore_inside(store, "my_stopped_reward:reward", shard_rollouts=4)
    assert (done.num_shards_before, done.scores) == (0, {"ok": 12})
    assert [str(s.stream_id)[-2:] for s in (stopped, done)] == ["-1", "-2"]
    assert Counter(row["value"] for row in store.read("scores")) == {0.25: 8, 0.75: 12}


def test_an_interrupted_stream_of_an_edited_reward_goes_on_as_of_its_pin(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    ids = write_history(store, 12)
    for value in (0.25, 0.75):  # each is stopped in its first of three shards
        (tmp_path / "my_twice_stopped.py").write_text(
            "import os, signal\ncalls = []\ndef reward(prompt, completion):\n"
            "    calls.append(1)\n    if len(calls) == 2:\n"
            f"        os.kill(os.getpid(), signal.SIGINT)\n    return {value}\n"
        )
        sys.modules.pop("my_twice_stopped", None)
        stopped = rescore_inside(store, "my_twice_stopped:reward", shard_rollouts=4)
        assert (stopped.ended, stopped.scores) == ("interrupted", {"ok": 4})
    done = rescore_inside(store, "my_twice_stopped:reward", shard_rollouts=4)
    assert (done.stream_id, done.num_shards_before) == (stopped.stream_id, 1)
    judged = [r["target_id"] for r in store.read("scores") if r["value"] == 0.75]
    assert sorted(judged) == sorted(ids)


@pytest.mark.parametrize("closes", [None, 0])
def test_of_two_that_begin_at_once_the_second_takes_the_pin_of_the_first(
    store: storage.Store, monkeypatch: pytest.MonkeyPatch, closes: int | None
):
    ids, open_stream = write_history(store, 12), storage.Store.open_stream

    def meanwhile(self: storage.Store, run_id: str, opened: Row) -> storage.StreamWriter:
        """Another process pins first; before that, 4 more rollouts had come."""
        monkeypatch.undo()
        ids.extend(write_history(self, 4, first=64))
        head = self.head()
        pin = {"iteration": 0, "as_of": head.number, "as_of_sha256": head.sha256,
               "scorer_versions_json": '{"final_number": "1"}'}  # fmt: skip
        writer = self.open_stream(run_id, opened)
        writer.append({"views_pinned": [pin]}, "pin")
        if closes is not None:  # and has judged the first shard
            rows = [score(target, 1.0, 0, scorer="final_number") for target in ids[:5]]
            writer.append({"scores": rows}, "shard-000000", closes_iteration=closes)
        return open_stream(self, run_id, opened)

    monkeypatch.setattr(storage.Store, "open_stream", meanwhile)
    done = rescore_here(store, "final_number", shard_rollouts=5)
    assert done.num_rollouts == 16
    assert done.num_shards_before == (0 if closes is None else 1)
    check_judged_once(store, ids, "final_number")


def test_ctrl_c_finishes_the_shard_and_says_how_to_go_on(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    rrl: Callable[..., tuple[Any, str, str]],
):
    ids = write_history(store, 40)

    def press(number: int) -> None:
        if number == 15:
            os.kill(os.getpid(), signal.SIGINT)

    scorer = happening(press)
    arguments = ("--scorer", scorer, "--where", "status = 'ok'", *TEN_INSIDE)
    code, shown, errors = rrl(*arguments)
    assert code == 130
    assert "stopping after this shard" in errors
    assert f"rrl rescore --scorer {scorer} --where 'status = '\"'\"'ok'\"'\"'' " in shown
    stream_id = store.read("scores")[0]["run_id"]
    assert len(scores_of(store, stream_id)) == 20
    assert store.read("runs", run_id=stream_id)[-1]["what"] == "interrupted"
    code, shown, _ = rrl(*arguments, "--json")
    summary = json.loads(shown)
    assert (code, summary["stream_id"], summary["num_shards_before"]) == (0, stream_id, 2)
    assert summary["scores"] == {"ok": 20}
    check_judged_once(store, ids, scorer)


def test_the_summary_is_a_line_for_each_thing_it_says(
    store: storage.Store, rrl: Callable[..., tuple[Any, str, str]]
):
    write_history(store, 4)
    code, out, _ = rrl("--scorer", "final_number")
    assert code == 0
    lines = out.splitlines()  # the store, the slice, the stream, the scores
    assert len(lines) == 4
    assert lines[1].startswith("4 rollouts in the slice, 0 were judged before by final_number")
    assert lines[3] == "4 scores added: 4 ok"


def test_the_list_of_runs_says_how_to_go_on(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_history(store, 8)
    scorer = happening(lambda number: os.kill(os.getpid(), signal.SIGINT))
    rescore_inside(store, scorer, where="sample_index < 2", run_id="history", shard_rollouts=1)
    monkeypatch.setattr(sys, "argv", ["rrl", "runs", "--json", "--store", str(store.path)])
    with pytest.raises(SystemExit):
        main()
    rows = {row["run_id"]: row for row in json.loads(capsys.readouterr().out)}
    [row] = [row for run_id, row in rows.items() if run_id != "history"]
    assert row["state"] == "interrupted"
    assert row["resume"] == (
        f"rrl rescore --scorer {scorer} --where 'sample_index < 2' --run history "
        f"--shard-rollouts 1 --set {IN_PROCESS[0]} --store {store.path}"
    )
    assert rows["history"]["resume"] == f"rrl train --resume history --store {store.path}"


def test_a_second_ctrl_c_stops_at_once_and_loses_nothing_committed(
    store: storage.Store, happening: Callable[[Callable[[int], None]], str]
):
    ids = write_history(store, 40)

    def press(number: int) -> None:
        if number in (25, 26):
            os.kill(os.getpid(), signal.SIGINT)

    scorer = happening(press)
    with pytest.raises(KeyboardInterrupt):
        rescore_inside(store, scorer, shard_rollouts=10)
    assert len(store.read("scores")) == 20
    assert rescore_inside(store, scorer, shard_rollouts=10).num_shards_before == 2
    check_judged_once(store, ids, scorer)


def test_the_first_error_is_shown_where_the_end_cannot_be_written(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    monkeypatch: pytest.MonkeyPatch,
):
    def stop(number: int) -> None:
        raise KeyboardInterrupt("the first")

    def full(*_: Any) -> None:
        raise OSError("no space")

    write_history(store, 4)
    monkeypatch.setattr(flows.rescoring, "_end", full)
    with pytest.raises(KeyboardInterrupt, match="the first"):
        rescore_inside(store, happening(stop))


def test_who_is_superseded_stops(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    rrl: Callable[..., tuple[Any, str, str]],
):
    ids = write_history(store, 40)

    def resume_elsewhere(number: int) -> None:
        if number == 15:
            [stream] = [s for s in store.log.refresh().streams if s.startswith("rescore")]
            storage.open(store.path).open_stream(stream, OPENED | {"kind": "rescore"})

    scorer = happening(resume_elsewhere)
    code, _, errors = rrl("--scorer", scorer, *TEN_INSIDE)
    assert code == 4
    assert "was opened again" in errors
    assert rescore_inside(store, scorer, shard_rollouts=10).ended == "finished"
    check_judged_once(store, ids, scorer)


def test_a_run_may_be_written_meanwhile(
    store: storage.Store, happening: Callable[[Callable[[int], None]], str]
):
    ids = write_history(store, 40)
    training = storage.open(store.path)

    def train(number: int) -> None:
        if number % 10 == 5:
            write_history(training, 8, f"training-{number}")
            list(storage.compact(training, min_segments=2))
            storage.collect(training, grace_s=0)

    done = rescore_inside(store, happening(train), shard_rollouts=10)
    assert done.scores == {"ok": 40}
    check_judged_once(store, ids, done.scorer)


def test_a_run_is_shown_alive_while_it_is_judged(
    store: storage.Store, happening: Callable[[Callable[[int], None]], str]
):
    write_history(store, 4)
    seen = []

    def look(number: int) -> None:
        [stream] = [s for s in store.log.refresh().streams if s.startswith("rescore")]
        seen.append(storage.is_run_held(store, stream))

    rescore_inside(store, happening(look))
    assert seen == [True] * 4


def test_scores_of_other_streams_count_as_of_the_pin(store: storage.Store):
    ids = write_history(store, 8)
    rows = [score(i, 1.0, scorer="final_number", scorer_version="1") for i in ids[:3]]
    store.open_stream("training", OPENED).append({"scores": rows}, "s")
    done = rescore_here(store, "final_number")
    assert (done.num_judged_before, done.scores) == (3, {"ok": 5})
    check_judged_once(store, ids, "final_number")


def test_the_next_shard_is_read_while_one_is_judged(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    monkeypatch: pytest.MonkeyPatch,
):
    write_history(store, 30)
    events: list[str] = []
    read = Slice.read

    def noted_read(self: Slice, shard: Any) -> Any:
        rows = read(self, shard)
        events.append("read")
        return rows

    def wait(number: int) -> None:
        while number == 1 and events.count("read") < 2:  # ends when the second shard is there
            time.sleep(0.001)

    monkeypatch.setattr(Slice, "read", noted_read)
    rescore_inside(store, happening(wait), shard_rollouts=10)
    assert events == ["read"] * 3
