"""`rrl import` as a stream: once, resumable, judged again, searched and learned from."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import storage
from flows import import_parts, importing
from flows.cli import app, main
from flows.import_commands import import_command
from flows.progress import Progress
from flows.streams import dead_runs
from rrl_core.tasks.protocol import make_prompt_id
from storage.importers.formats import ImporterError
from storage.importers.parts import Cutter
from tests.flows.conftest import fingerprint, num_commits
from tests.flows.histories import rescore_here
from tests.importers.imported import ask, import_here, verl_line, write_lines

TABLES = ("prompts", "rollouts", "rollout_tokens", "scores", "failures")
Row = dict[str, Any]


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_parts, "Cutter", partial(Cutter, lines=10))


def verl_folder(path: Path, num_lines: int, start: int = 0) -> Path:
    """A file for each step, as verl leaves them; every 13th line is cut."""
    path.mkdir(exist_ok=True)
    lines: dict[int, list[Any]] = {}
    for n in range(start, num_lines):
        line: Any = verl_line(n)
        step = line["step"]
        lines.setdefault(step, []).append("{" if n % 13 == 5 else line)
    for step, found in lines.items():
        write_lines(path / f"{step}.jsonl", found)
    return path


def tables_of(store: storage.Store, run_id: str) -> dict[str, Any]:
    found = fingerprint(store, run_id, TABLES)
    columns = ("number", "sha256", "position", "first_line", "num_lines", "num_rollouts")
    rows = store.read("imports", run_id=run_id)
    found["imports"] = [tuple(row[c] for c in columns) for row in rows]
    return found


@pytest.mark.usefixtures("small_parts")
def test_a_folder_is_one_stream_whose_iterations_are_its_parts(
    store: storage.Store, tmp_path: Path
):
    """50 lines, 8 a step, 4 a prompt; lines 5, 18, 31 and 44 are cut. Two files make a part."""
    done = import_here(store, "verl", verl_folder(tmp_path / "dump", 50))
    assert (done.ended, done.num_files, done.num_lines) == ("finished", 7, 50)
    assert (done.num_rollouts, done.num_failures, done.num_lines_before) == (46, 4, 0)
    assert ask(store, "select kind, state, last_iteration from run_overview") == [
        ("import", "finished", 0)
    ]
    assert ask(
        store, "select iteration, count(*), sum(num_lines) from imports group by all order by 1"
    ) == [(0, 2, 12), (1, 2, 12), (2, 2, 12), (3, 2, 12), (4, 1, 2)]
    assert ask(store, "select distinct role, engine from rollouts") == [("imported", "imported")]
    assert ask(store, "select count(*) from judged_rollouts where reward is not null") == [(46,)]
    assert not storage.verify(store, deep=True)
    assert dead_runs(store, 3) == ([], [])


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("commits", [0, 1, 4])
def test_an_import_that_broke_off_goes_on_as_if_it_had_not(
    commits: int, store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = verl_folder(tmp_path / "dump", 50)
    write_lines(folder / "9.jsonl", [verl_line(n) for n in range(100, 147)])
    whole = storage.open(tmp_path / "whole", create=True)
    run_id = import_here(whole, "verl", folder).stream_id
    append = storage.StreamWriter.append

    def fail_later(self: Any, rows: Any, batch_key: str, **facts: Any) -> Any:
        if batch_key == f"part-{commits:06d}":
            raise OSError("the power went")
        return append(self, rows, batch_key, **facts)

    with monkeypatch.context() as patched:
        patched.setattr(storage.StreamWriter, "append", fail_later)
        with pytest.raises(OSError, match="power"):
            import_here(store, "verl", folder)
    assert ask(store, "select count(distinct iteration) from imports") == [(commits,)]
    again = import_here(storage.open(store.path), "verl", folder)
    assert again.num_lines + again.num_lines_before == 97
    assert tables_of(store, run_id) == tables_of(whole, run_id)
    head = store.head()
    assert import_here(store, "verl", folder).ended == "nothing to do"
    assert store.head() == head


def test_new_files_and_lines_of_a_folder_join_its_stream(store: storage.Store, tmp_path: Path):
    folder = verl_folder(tmp_path / "dump", 16)
    first = import_here(store, "verl", folder)
    verl_folder(folder, 30, start=16)
    with (folder / "1.jsonl").open("a") as file:
        file.write(json.dumps(verl_line(99, step=1)) + "\n")
    moved = folder.rename(tmp_path / "moved")
    second = import_here(store, "verl", moved)
    assert second.stream_id == first.stream_id
    assert (second.num_lines, second.num_lines_before) == (15, 16)
    assert ask(store, "select count(*) from rollouts") == [(29,)]  # lines 5 and 18 are cut
    assert ask(store, "select first_line, num_lines from imports where number = 0 and path like "
                      "'%moved/1.jsonl'") == [(9, 1)]  # fmt: skip


def test_the_same_content_twice_in_a_folder_is_imported_once(store: storage.Store, tmp_path: Path):
    folder = verl_folder(tmp_path / "dump", 8)
    (folder / "7.jsonl").write_bytes((folder / "0.jsonl").read_bytes())
    assert import_here(store, "verl", folder).num_lines == 8


def test_what_is_declared_is_stored_and_makes_another_stream(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0, gts="1")])
    import_here(store, "verl", path)
    import_here(store, "verl", path, task="sums", split="eval", temperature=0.7)
    assert ask(store, "select task, split, answer from prompts order by _commit") == [
        ("imported", "train", "1"), ("sums", "eval", "1")
    ]  # fmt: skip
    assert ask(store, "select temperature, top_p, seed from rollouts order by _commit") == [
        (-1.0, -1.0, -1), (0.7, -1.0, -1)
    ]  # fmt: skip
    [_, (prompt_id,)] = ask(store, "select prompt_id from prompts order by _commit")
    messages = [{"role": "user", "content": "user\nWhat is 0 + 1?\nassistant\n"}]
    assert prompt_id == make_prompt_id("sums", "eval", messages, "1")


def test_a_name_is_kept_to_what_it_was_begun_with(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0)])
    assert import_here(store, "verl", path, name="mine").stream_id == "mine"
    with pytest.raises(ImporterError, match=r"was begun with .*another --name"):
        import_here(store, "verl", path, name="mine", temperature=1.0)
    store.open_stream("a-run", {
        "config_json": "{}", "seed_root": 0, "planned_iterations": 1, "code_version": "",
        "packages_json": "{}",
    })  # fmt: skip
    with pytest.raises(ImporterError, match="another kind"):
        import_here(store, "verl", path, name="a-run")
    with pytest.raises(ImporterError, match="at most 100 of a-z"):
        import_here(store, "verl", path, name="Mine!")
    with pytest.raises(ImporterError, match="expected one of verl, trl"):
        import_here(store, "vurl", path)


def test_the_first_ctrl_c_ends_it_after_the_part_at_work(
    store: storage.Store, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
):
    folder = verl_folder(tmp_path / "dump", 50)
    submit = importing._submit

    def interrupt(*arguments: Any) -> None:
        submit(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(importing, "_submit", interrupt)
        done = import_here(store, "verl", folder)
    assert (done.ended, done.num_lines) == ("interrupted", 12)
    runner = CliRunner()
    shown = runner.invoke(app, ["runs", "--store", str(store.path), "--json"])
    [run] = json.loads(shown.stdout)
    assert (run["kind"], run["state"]) == ("import", "interrupted")
    assert run["resume"].startswith(f"rrl import verl {folder} --task imported --split train")
    assert runner.invoke(app, run["resume"].split()[1:]).exit_code == 0
    assert ask(store, "select sum(num_lines) from imports") == [(50,)]


def test_the_command_says_what_came_of_it(
    store: storage.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0), "{", verl_line(1)])
    command = ["import", "verl", str(path), "--store", str(store.path)]
    app(command, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "2 rollouts from 3 lines of 1 files" in shown
    assert "warning: 1 lines were left out:\n  1 of 3 lines of" in shown
    app([*command, "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ended"], facts["num_rollouts"]) == ("nothing to do", 0)
    request = importing.ImportRequest("verl", path, model="tiny", temperature=1.0, follow_s=2.0)
    assert import_command(vars(request), Path("s")) == (
        f"rrl import verl {path} --task imported --split train --temperature 1.0 --model tiny "
        "--dtype float32 --follow --every-s 2.0 --store s"
    )


def test_a_file_that_cannot_be_imported_ends_the_command_with_2(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0)])
    command = ["rrl", "import", "trl", str(path), "--store", str(store.path)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "expected Parquet" in capsys.readouterr().err


def test_a_path_that_is_none_creates_no_store(tmp_path: Path):
    command = ["import", "verl", str(tmp_path / "none"), "--store", str(tmp_path / "new")]
    with pytest.raises(ImporterError, match="found none"):
        app(command, standalone_mode=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("small_parts")
def test_the_reward_is_known_also_when_the_first_parts_are_junk(
    store: storage.Store, tmp_path: Path
):
    lines = ["{"] * 25 + [verl_line(0)]
    done = import_here(store, "verl", write_lines(tmp_path / "1.jsonl", lines))
    assert (done.num_rollouts, done.num_failures) == (1, 25)
    assert ask(store, "select scorer, reward from judged_rollouts") == [("score", 0.0)]
    assert ask(store, "select count(*) from failures") == [(2,)]


def test_text_is_shown_and_judged_but_never_replayed(store: storage.Store, tmp_path: Path):
    """Re-scoring an import adds scores; its text has no ids or log-probs to correct with."""
    lines = [verl_line(n, gts="7", output=f"#### {7 if n % 2 else 8}") for n in range(8)]
    done = import_here(store, "verl", write_lines(tmp_path / "1.jsonl", lines))
    rescored = rescore_here(store, "final_number", run_id=done.stream_id)
    assert (rescored.num_rollouts, rescored.scores) == (8, {"ok": 8})
    assert ask(
        store,
        "select sum(value) from scores where scorer = 'final_number' and status = 'ok'",
    ) == [(4.0,)]
    assert ask(
        store,
        "select distinct role, num_prompt_ids, num_completion_ids, num_logprobs, base_digest, "
        "split from judged_rollouts",
    ) == [("imported", 0, 0, None, None, "train")]
    assert ask(store, "select count(*) from replay_buffer") == [(0,)]
    assert ask(store, "select count(*) from training_history where num_rollouts > 0") == [(0,)]


def test_only_whole_conversations_are_judged_again(store: storage.Store, tmp_path: Path):
    item = {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "#### 7"}]}  # fmt: skip
    sampled = {"generation_token_ids": [1], "generation_log_probs": [-1.0]}
    turns = [item | sampled | {"prompt_token_ids": [1] * n} for n in (3, 5)]
    line = {"responses_create_params": {"input": "1+6"}, "response": {"output": turns}, "reward": 1}
    done = import_here(store, "nemo-gym", write_lines(tmp_path / "rollouts.jsonl", [line]))
    rescored = rescore_here(store, "final_number", run_id=done.stream_id)
    assert rescored.skipped == {"their conversations go on": 1}
    assert sum(rescored.scores.values()) == 1


def follow(store: storage.Store, folder: Path, **facts: Any) -> importing.ImportSummary:
    request = importing.ImportRequest("verl", folder, follow_s=0.02, **facts)
    with Progress(quiet=True) as progress:
        return importing.import_rollouts(store, request, progress)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_a_folder_is_followed_line_by_line(store: storage.Store, tmp_path: Path):
    """Whole lines are imported as they come; one that is being written waits for its end."""
    folder = tmp_path / "dump"
    folder.mkdir()
    reader = storage.open(store.path)
    texts = [json.dumps(verl_line(n)) for n in range(3)]

    def write_and_stop() -> None:
        def num_rollouts() -> int:
            return len(reader.read("rollouts"))

        time.sleep(0.1)
        (folder / "0.jsonl").write_text(f"{texts[0]}\n{texts[1][:9]}")
        wait_until(lambda: num_rollouts() == 1)
        (folder / "0.jsonl").write_text(f"{texts[0]}\n{texts[1]}\n")
        wait_until(lambda: num_rollouts() == 2)
        (folder / "1.jsonl").write_text(f"{texts[2]}\n")
        wait_until(lambda: num_rollouts() == 3)
        os.kill(os.getpid(), signal.SIGINT)

    writer = threading.Thread(target=write_and_stop)
    writer.start()
    done = follow(store, folder)
    writer.join()
    assert (done.ended, done.num_rollouts, done.num_failures) == ("finished", 3, 0)
    assert import_here(store, "verl", folder).ended == "nothing to do"
    assert not storage.verify(store, deep=True)


def import_in_child(path: Path, folder: Path) -> None:
    import_parts.Cutter = partial(Cutter, lines=20)  # type: ignore[assignment, misc]
    import_here(storage.open(path), "verl", folder)


@pytest.mark.slow
def test_an_import_killed_at_random_instants_loses_and_doubles_nothing(
    store: storage.Store, tmp_path: Path
):
    """Three kills -9, then the end; the stream is the one of an import that was let alone."""
    folder = verl_folder(tmp_path / "dump", 1_500)
    children = multiprocessing.get_context("forkserver")
    instant, num_killed = random.Random(7), 0
    whole = tmp_path / "whole"
    storage.open(whole, create=True)
    import_in_child(whole, folder)
    for _ in range(3):
        before = num_commits(store.path)
        child = children.Process(target=import_in_child, args=(store.path, folder))
        child.start()
        wait_until(lambda b=before, c=child: num_commits(store.path) > b + 4 or not c.is_alive())
        time.sleep(instant.random() * 0.05)
        child.kill()
        child.join()
        num_killed += child.exitcode == -signal.SIGKILL
    assert num_killed == 3
    import_in_child(store.path, folder)
    reader = storage.open(store.path)
    [run_id] = {row["run_id"] for row in reader.read("runs")}
    assert tables_of(reader, run_id) == tables_of(storage.open(whole), run_id)
    assert not storage.verify(reader, deep=True)
