"""Every message in docs/troubleshooting.md is what the code says, and every table is the code's.

Each message is provoked by a function of its heading's name; what cannot be provoked without an
engine or a server is compared with the text in the source.
"""

import ast
import errno
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, get_args

import pytest
from huggingface_hub import constants

import rrl_core.sampling
import storage
from flows import cli
from flows.offline import REASONS
from flows.wiring import opened_row
from rrl_core.replay.schedule import WaitingReason
from rrl_core.tasks import code_tests
from rrl_core.value.health import Verdict
from storage.commits import commit_path
from storage.files import Disk
from tests.flows.conftest import RUN_ID, run_here, smoke_config
from tests.flows.test_cli import rrl  # noqa: F401 - a fixture
from tests.storage.rows import OPENED, rollout

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (.+)\n\n```text\n(.+)\n```$", TEXT, re.M))
NOBODY = "http://127.0.0.1:1"
Rrl = Callable[..., tuple[Any, str, str]]


class Scene:
    """Where a message is provoked: `rrl` in an empty folder, and a store with a finished run."""

    def __init__(self, call: Rrl, folder: Path, patch: pytest.MonkeyPatch, trained: Path) -> None:
        self.rrl, self.folder, self.patch, self.trained = call, folder, patch, trained

    def says(self, *arguments: str, code: int = 2) -> str:
        """Run a command that is to end with `code`; return what it prints, both ways."""
        came, out, err = self.rrl(*arguments)
        assert came == code, out + err
        return out + err

    def train(self, *sets: str, code: int = 2) -> str:
        words = [word for text in sets for word in ("--set", text)]
        return self.says("train", "smoke", "--orchestrator", "none", *words, code=code)


PROVOKED: dict[str, Callable[[Scene], str]] = {}
IN_SOURCE = {
    "vLLM does not start": "rrl_core/sampling/vllm_engine.py",
    "`rrl deploy` finds no Prefect server": "flows/deploy_commands.py",
    "History is of another base model": "flows/offline.py",
    "Ctrl-C": "flows/commands.py",
}


def provokes(title: str) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    def keep(function: Callable[[Scene], str]) -> Callable[[Scene], str]:
        PROVOKED[title] = function
        return function

    return keep


@provokes("vLLM is not installed")
def _(scene: Scene) -> str:
    scene.patch.setattr(rrl_core.sampling, "find_spec", lambda name: None)
    return scene.train("sampler.engine=vllm")


@provokes("The model is not here")
def _(scene: Scene) -> str:
    scene.patch.setenv("HOME", str(scene.folder))
    return scene.says("train", "demo", "--orchestrator", "none")


@provokes("The hub cannot be reached")
def _(scene: Scene) -> str:
    scene.patch.setenv("HOME", str(scene.folder))
    scene.patch.setattr(constants, "ENDPOINT", NOBODY)
    return scene.says("model", "fetch", "smollm2-135m", "--source", "hub", code=1)


@provokes("There is no GPU")
def _(scene: Scene) -> str:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    return scene.train("model.device=cuda")


@provokes("The disk is full")
def _(scene: Scene) -> str:
    def write(self: Disk, file: BinaryIO, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage.open(scene.folder / "rrl-data", create=True)
    scene.patch.setattr(Disk, "write", write)
    return scene.train(code=1)


@provokes("The folder cannot hold a store")
def _(scene: Scene) -> str:
    def link(self: Disk, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    scene.patch.setattr(Disk, "link", link)
    return scene.says("init")


@provokes("Programs of models cannot be kept apart")
def _(scene: Scene) -> str:
    scene.patch.setattr(code_tests, "isolation", lambda: "limits_only")
    return scene.says("train", "code-smollm2", "--dry-run")


@provokes("math-verify is not installed")
def _(scene: Scene) -> str:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    scene.patch.setattr(importlib.metadata, "version", version)
    return scene.says("train", "math-smollm2", "--dry-run")


@provokes("The Prefect server does not answer")
def _(scene: Scene) -> str:
    scene.patch.setenv("PREFECT_API_URL", f"{NOBODY}/api")
    said = scene.says("train", "smoke", code=1)
    assert not (scene.folder / "rrl-data").exists()
    return said


@provokes("There is no store")
def _(scene: Scene) -> str:
    return scene.says("sql", "select 1")


@provokes("The folder holds other files")
def _(scene: Scene) -> str:
    (scene.folder / "mine").mkdir()
    (scene.folder / "mine" / "notes.txt").touch()
    return scene.says("init", "--store", "mine")


@provokes("The store was written by a newer version")
def _(scene: Scene) -> str:
    store = storage.open(scene.folder / "rrl-data", create=True)
    store.open_stream("r", OPENED)
    path = store.path / commit_path(1)
    facts = json.loads(path.read_bytes())
    path.chmod(0o644)
    path.write_text(json.dumps(facts | {"format": 2}))
    return scene.says("runs")


@provokes("The store is damaged")
def _(scene: Scene) -> str:
    store = run_here(scene.folder / "rrl-data", smoke_config("run.iterations=1"))
    segment = next((store.path / "events" / "rollouts").rglob("*.parquet"))
    segment.chmod(0o644)
    segment.write_bytes(segment.read_bytes()[:-50])
    return scene.says("audit", RUN_ID, code=3)


@provokes("Another process took the run over")
def _(scene: Scene) -> str:
    store = storage.open(scene.folder / "rrl-data", create=True)
    first = store.open_stream("sums-1", OPENED)
    store.open_stream("sums-1", OPENED)
    with pytest.raises(storage.SupersededError) as raised:
        first.append({"rollouts": [rollout()]}, "b")
    assert cli.EXIT_CODES["SupersededError"] == 4
    return f"rrl: {raised.value}"


@provokes("The run is there already")
def _(scene: Scene) -> str:
    store = ("--store", str(scene.trained))
    return scene.says("train", "smoke", "--run-id", RUN_ID, "--orchestrator", "none", *store)


@provokes("There is no such run")
def _(scene: Scene) -> str:
    return scene.says("audit", "sums-9", "--store", str(scene.trained))


@provokes("The reward or the prompts changed")
def _(scene: Scene) -> str:
    store = storage.open(scene.folder / "rrl-data", create=True)
    store.open_stream("sums-1", opened_row(smoke_config(), "0" * 64))
    return scene.says("train", "--resume", "sums-1", "--orchestrator", "none")


@provokes("A fork may not change this")
def _(scene: Scene) -> str:
    words = ("--set", "run.iterations=4", "--set", "model.lora.rank=4")
    store = ("--store", str(scene.trained))
    return scene.says("train", "--fork", f"{RUN_ID}@1", *words, "--orchestrator", "none", *store)


@provokes("History has nothing to learn from")
def _(scene: Scene) -> str:
    sets = (
        "run.mode=offline", "evaluation.every=off", "offline.samples=4", "sampler.top_p=1.0",
        "offline.query=select rollout_id from judged_rollouts where reward > 100",
    )  # fmt: skip
    words = [word for text in sets for word in ("--set", text)]
    store = ("--store", str(scene.trained))
    return scene.says("train", "smoke", "--orchestrator", "none", *words, *store)


@provokes("An unknown key")
def _(scene: Scene) -> str:
    return scene.train("learner.lr=1e-4")


@provokes("A value out of bounds")
def _(scene: Scene) -> str:
    return scene.train("replay.share=0.9")


@provokes("Two settings that do not fit together")
def _(scene: Scene) -> str:
    return scene.train("sampler.top_p=0.9")


@provokes("No such configuration")
def _(scene: Scene) -> str:
    return scene.says("train", "my-run")


@provokes("A parameter that the task does not have")
def _(scene: Scene) -> str:
    return scene.train("task.num_trains=5")


@provokes("More prompts than the task has")
def _(scene: Scene) -> str:
    return scene.train("sampler.prompts=13")


@provokes("The reward's module cannot be imported")
def _(scene: Scene) -> str:
    return scene.train("task.reward=no_reward:judge")


@provokes("The module has no such function")
def _(scene: Scene) -> str:
    return scene.train("task.reward=rrl_core.tasks.dense:judge")


@provokes("No files of the format")
def _(scene: Scene) -> str:
    (scene.folder / "rollouts").mkdir()
    return scene.says("import", "verl", "rollouts")


@provokes("No line could be imported")
def _(scene: Scene) -> str:
    (scene.folder / "1.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n')
    return scene.says("import", "verl", "1.jsonl")


@provokes("Some lines were left out")
def _(scene: Scene) -> str:
    good = '{"input": "1+1?", "output": "2", "score": 1.0, "step": 1}\n'
    (scene.folder / "1.jsonl").write_text(good + "{cut\n" + good)
    return scene.says("import", "verl", "1.jsonl", code=0)


@provokes("An import was begun with other words")
def _(scene: Scene) -> str:
    good = '{"input": "1+1?", "output": "2", "score": 1.0, "step": 1}\n'
    (scene.folder / "1.jsonl").write_text(good)
    scene.says("import", "verl", "1.jsonl", "--name", "mine", code=0)
    return scene.says("import", "verl", "1.jsonl", "--name", "mine", "--task", "sums")


@provokes("Not one SELECT")
def _(scene: Scene) -> str:
    return scene.says("sql", "delete from rollouts", "--store", str(scene.trained))


@provokes("A query takes too long")
def _(scene: Scene) -> str:
    query = "select sum(a.range % 7) from range(1000000000) a, range(100000) b"
    return scene.says("sql", query, "--time-limit", "0.1", "--store", str(scene.trained))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "store"
    overrides = ("run.iterations=1", "sampler.engine=fake", "evaluation.every=off")
    return run_here(path, smoke_config(*overrides)).path


@pytest.fixture
def scene(
    rrl: Rrl,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Path,
) -> Scene:
    return Scene(rrl, tmp_path, monkeypatch, trained)


def matches(message: str, said: str) -> bool:
    """Tell whether `said` has the message; `…` stands for what differs each time."""
    return re.search(".*".join(map(re.escape, message.split("…"))), said) is not None


@pytest.mark.parametrize("title", PROVOKED)
def test_the_message_is_what_comes(title: str, scene: Scene):
    said = PROVOKED[title](scene)
    assert title in ENTRIES, said
    assert matches(ENTRIES[title], said), said


@functools.cache
def literals(path: str) -> list[str]:
    """Return the texts in a source file, `…` in the place of what is put into them."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [
        "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
    ]


@pytest.mark.parametrize("title", IN_SOURCE)
def test_the_message_is_in_the_source(title: str):
    assert ENTRIES[title].removeprefix("rrl: ") in [
        text.split("\n")[0] for text in literals(IN_SOURCE[title])
    ]


def test_every_message_is_looked_at():
    assert set(ENTRIES) == set(PROVOKED) | set(IN_SOURCE)
    assert TEXT.count("```text") == len(ENTRIES)


def stated(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading, without its head."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_exit_codes_are_those_of_the_command():
    codes = {value for name, value in vars(cli).items() if re.fullmatch(r"EXIT_[A-Z_]+", name)
             and isinstance(value, int)}  # fmt: skip
    assert {int(row[0]) for row in stated("Exit codes")} == codes | {0}


def test_every_reason_to_wait_is_explained():
    reasons = [row[0] for row in stated("A run replays less than it might")]
    assert reasons == list(get_args(WaitingReason))


def test_every_verdict_is_explained():
    assert {row[0] for row in stated("The value model is not believed")} == set(get_args(Verdict))


def test_every_reason_to_leave_out_history_is_explained():
    assert {row[0] for row in stated("History is left out")} == set(REASONS)


def test_a_scorer_that_raises_costs_one_score_and_is_named(scene: Scene):
    (scene.folder / "odd_judge.py").write_text(
        "def judge(prompt, completion):\n    return 1 / completion.count('7')\n"
    )
    scene.patch.syspath_prepend(scene.folder)
    overrides = ("task.reward=odd_judge:judge", "run.iterations=1", "evaluation.every=off",
                 "sampler.engine=fake")  # fmt: skip
    store = run_here(scene.folder / "rrl-data", smoke_config(*overrides))
    query = re.search(r'rrl sql "(select status, feedback.+)"', TEXT)
    assert query is not None
    rows = store.sql(query[1]).fetchall()
    assert ("scorer_error", "the scorer raised ZeroDivisionError") in [row[:2] for row in rows]


def test_a_killed_run_is_dead_and_can_be_resumed(scene: Scene):
    store = storage.open(scene.folder / "rrl-data", create=True)
    store.open_stream("sums-1", OPENED | {"kind": "train"})
    said = scene.says("runs", code=0)
    assert " dead " in said
    assert "rrl train --resume sums-1" in said
