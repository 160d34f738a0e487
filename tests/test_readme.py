"""Every command of the README does what it says; none of them is out of date."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import app
from flows.config import load_config
from flows.study import load_study
from tests.flows.conftest import RUN_ID, replayed_store

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
REPLAY, REVIEW = ((ROOT / "docs" / name).read_text() for name in ("replay.md", "review.md"))
COMMANDS = [
    line.split(" #")[0].strip()
    for line in [*README.splitlines(), *REPLAY.splitlines(), *REVIEW.splitlines()]
    if line.startswith("rrl ")
]
INSPECTING = [c for c in COMMANDS if c.split()[1] not in ("train", "study")]
STUDIES = [c for c in COMMANDS if c.split()[1] == "study"]
TRAINING = [c for c in COMMANDS if c.split()[1] == "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `rrl-data` holds a finished run that replays."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(replayed_store(tmp_path_factory).path, path / "rrl-data")
    return path


@pytest.mark.parametrize("command", [*INSPECTING, "rrl runs", "rrl verify --deep"])
def test_commands_that_look_at_history_run(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    [*_, model] = storage.open("rrl-data").read("value_models")
    command = command.replace("RUN", RUN_ID).replace("VERSION", model["scorer_version"])
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize(
    "command", [c for c in TRAINING if len({"--resume", "--fork"} & {*c.split()}) == 0]
)
def test_training_commands_name_configs_and_keys_that_exist(command: str):
    words = shlex.split(command)
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert load_config(Path(words[2]), overrides).run.iterations > 0


@pytest.mark.parametrize("command", STUDIES)
def test_studies_are_there_and_their_arms_are_configurations(command: str):
    assert load_study(Path(command.split()[2])).runs()


def test_the_python_line_answers(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    line = next(x for x in README.splitlines() if "storage.open(" in x)
    code = next(part for part in line.split("`") if part.startswith("storage.open("))
    answer = eval(code, {"storage": storage})
    assert answer.height == 1


def test_readme_names_every_shipped_config():
    for path in (ROOT / "configs").glob("*.toml"):
        assert f"`{path.stem}`" in README


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_every_link_leads_somewhere_and_every_document_is_linked(path: Path):
    links = re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8"))
    for link in links:
        assert link.startswith("https://") or (path.parent / link).exists(), link
    if path.name == "README.md":
        assert {f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} <= set(links)
