"""What goes wrong while history is judged again: each with its message, and nothing lost."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rrl_core.tasks.judge
import storage
from flows.rescoring import RescoreError
from rrl_core.tasks.protocol import TaskError
from tests.flows.histories import (
    check_judged_once,
    prompt_row,
    rescore_here,
    rescore_inside,
    write_history,
)
from tests.flows.test_rescore import (  # noqa: F401 - fixtures
    TEN_INSIDE,
    happening,
    rrl,
    scores_of,
    store,
)
from tests.storage.conftest import memory_path  # noqa: F401 - a fixture
from tests.storage.rows import OPENED, rollout
from tests.tasks.test_judge import serve, write_judge

# ruff: noqa: F811 - fixtures are arguments


def test_a_slice_without_rollouts_is_no_error(
    store: storage.Store, rrl: Callable[..., tuple[Any, str, str]]
):
    write_history(store, 4)
    code, shown, _ = rrl("--scorer", "final_number", "--where", "iteration > 99")
    assert (code, "the slice holds no rollout" in shown) == (0, True)


def test_failed_judgements_are_scores_counted_once_a_shard_and_tried_again(
    store: storage.Store, rrl: Callable[..., tuple[Any, str, str]]
):
    write_history(store, 20)  # prompts 0 to 4
    scorer = "tests.flows.rewards:fragile"
    code, shown, _ = rrl("--scorer", scorer, "--shard-rollouts", "10")
    assert code == 0
    assert "20 scores added: 8 ok, 4 scorer_error, 4 timeout, 4 unscorable" in shown
    stream_id = store.read("scores")[0]["run_id"]
    failures = store.read("failures", run_id=stream_id)
    # Shard 0 holds prompts 0, 1 and half of 2; shard 1 the rest.
    assert [(f["iteration"], f["subject"]) for f in failures] == [
        (0, "shard-000000/scorer_error"), (0, "shard-000000/timeout"), (1, "shard-000001/timeout"),
    ]  # fmt: skip
    assert "4 of 10 judgements" in failures[0]["message"]
    assert "raised KeyError" in failures[0]["message"]
    assert "seven" not in failures[0]["message"]
    again = rescore_here(store, scorer, shard_rollouts=10)
    assert again.scores == {"scorer_error": 4, "timeout": 4}  # unscorable is a verdict
    assert {row["attempt"] for row in scores_of(store, again.stream_id)} == {1}
    latest = store.view("latest_scores")
    assert Counter(row["attempt"] for row in latest) == {0: 12, 1: 8}


def test_a_language_model_judges_and_its_failed_attempts_are_scores(
    store: storage.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rrl: Callable[..., tuple[Any, str, str]],
):
    monkeypatch.setattr(rrl_core.tasks.judge, "RETRY_PAUSE_S", 0.0)
    asked = ["score: 10", "slow once", "slow", "500", "no json", "I like it"]
    writer = store.open_stream("r1", OPENED)
    rows = [rollout("p00000", n, completion=f"<<{text}>>") for n, text in enumerate(asked)]
    writer.append({"rollouts": rows, "prompts": [prompt_row(0)]}, "b")
    with serve() as server:
        path = write_judge(tmp_path, f"http://127.0.0.1:{server.server_address[1]}")
        code, _, _ = rrl("--scorer", f"judge:{path}", "--shard-rollouts", "4")
    assert code == 0
    scores = store.read("scores")
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    found = [
        [(r["attempt"], r["status"], r["value"]) for r in scores if r["target_id"] == target]
        for target in ids
    ]
    assert found == [
        [(0, "ok", 1.0)],
        [(0, "timeout", None), (1, "ok", 0.8)],
        [(0, "timeout", None), (1, "timeout", None)],
        [(0, "scorer_error", None), (1, "scorer_error", None)],
        [(0, "scorer_error", None)],
        [(0, "scorer_error", None)],
    ]
    assert {(r["scorer"], r["kind"]) for r in scores} == {("judge:terse", "judge")}
    subjects = [row["subject"] for row in store.read("failures")]
    assert subjects == [
        "shard-000000/scorer_error", "shard-000000/timeout", "shard-000001/scorer_error",
    ]  # fmt: skip
    # The server is gone: nothing is judged, the stream is there to go on with.
    code, _, errors = rrl("--scorer", f"judge:{path}", "--shard-rollouts", "4")
    assert (code, store.read("scores")) == (1, scores)
    assert "cannot be reached" in errors
    last = store.read("runs")[-1]
    assert (last["what"], "JudgeError" in last["reason"]) == ("failed", True)


def test_what_has_no_prompt_or_no_completion_is_skipped_with_its_reason(
    store: storage.Store, rrl: Callable[..., tuple[Any, str, str]]
):
    writer = store.open_stream("r1", OPENED)
    rows = [rollout("p00000"), rollout("p00001"), rollout("p00000", 1, status="error", error="x")]
    writer.append({"rollouts": rows, "prompts": [prompt_row(0)]}, "b")
    code, shown, _ = rrl("--scorer", "final_number")
    assert code == 0
    assert "1 rollouts skipped: its prompt is not in the store" in shown
    assert "1 rollouts skipped: nothing was sampled" in shown
    assert "1 scores added: 1 ok" in shown
    # What can never be judged makes no work: with the prompt it would.
    head = store.head()
    again = rescore_here(store, "final_number", shard_rollouts=1)
    assert (again.ended, store.head()) == ("nothing to do", head)
    assert again.skipped == {"its prompt is not in the store": 1, "nothing was sampled": 1}
    writer.append({"prompts": [prompt_row(1)]}, "late")
    assert rescore_here(store, "final_number").scores == {"ok": 1}


def test_a_store_damaged_meanwhile_stops_the_work_and_keeps_the_rest(
    store: storage.Store,
    happening: Callable[[Callable[[int], None]], str],
    rrl: Callable[..., tuple[Any, str, str]],
    monkeypatch: pytest.MonkeyPatch,
):
    ids = write_history(store, 40, per_commit=10)
    segments = [s for s in store.log.refresh().segments.values() if s.table == "rollouts"]
    last = store.path / max(segments, key=lambda s: s.first_commit).path
    data = last.read_bytes()

    def cut(number: int) -> None:
        if number == 1:
            last.chmod(0o644)
            last.write_bytes(data[:-100])

    scorer = happening(cut)
    code, _, errors = rrl("--scorer", scorer, *TEN_INSIDE)
    assert code == 3
    assert str(last) in errors
    assert len(store.read("scores")) >= 20
    last.write_bytes(data)
    assert rescore_inside(storage.open(store.path), scorer, shard_rollouts=10).ended == "finished"
    check_judged_once(storage.open(store.path), ids, scorer)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--scorer", "nonsense"], 2, "expected a scorer among final_number, strict_format, code"),
        (
            ["--scorer", "math_verify", "--set", "task.memory_mb=9"],
            2,
            "parameter `memory_mb`: Extra inputs are not permitted; came 9; the parameters",
        ),
        (["--scorer", "final_number", "--set", "task.time_limit_s=9"], 2, "parameters are none"),
        (["--scorer", "code_tests", "--set", "run.seed=1"], 2, "expected `task.key=value`"),
        (["--scorer", "code_tests", "--set", "time_limit_s=1"], 2, "expected `section.key=value`"),
        (["--scorer", "value", "--set", "task.time_limit_s=9"], 2, "`value` has no parameters"),
        (["--scorer", "no_such_module:reward"], 2, "importing `no_such_module` raised"),
        (["--scorer", "judge:nowhere.toml"], 2, "nowhere.toml"),
        (["--scorer", "value"], 2, "expected a value model in"),
        (["--scorer", "value:v-77"], 2, "expected value model 'v-77' in"),
        (["--scorer", "final_number", "--run", "nobody"], 2, "no run 'nobody'"),
        (["--scorer", "final_number", "--where", "colour = 1"], 2, "colour"),
        (["--scorer", "final_number", "--where", "true; select 1"], 2, "one SQL condition"),
        (["--scorer", "final_number", "--where", "random() < 1"], 2, "`random`"),
        (["--scorer", "final_number", "--as-of", "99"], 2, "as_of: expected a commit from 0 to"),
        (["--scorer", "final_number", "--shard-rollouts", "0"], 2, "shard-rollouts"),
        ([], 2, "--scorer"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    arguments: list[str],
    code: int,
    message: str,
    store: storage.Store,
    rrl: Callable[..., tuple[Any, str, str]],
):
    write_history(store, 4)
    head = store.head()
    found, _, errors = rrl(*arguments)
    assert (found, store.head()) == (code, head)
    assert message in errors
    assert "Traceback" not in errors


def test_impossible_requests_are_refused_in_python_too(store: storage.Store):
    with pytest.raises(RescoreError, match="1 rollout or more"):
        rescore_here(store, "final_number", shard_rollouts=0)
    with pytest.raises(TaskError):
        rescore_here(store, "nonsense")
