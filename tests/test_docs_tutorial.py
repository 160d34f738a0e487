"""docs/tutorial.md, pasted in order, works and prints what it says.

The quick test runs the commands in this process; the slow one pastes the blocks into a shell.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import app

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^```sh\n(?P<commands>.*?)^```\n(\n```text\n(?P<printed>.*?)^```\n)?", re.M | re.S
)
BLOCKS = [(found["commands"], found["printed"]) for found in BLOCK.finditer(TUTORIAL)]
SET_UP = ("make setup", "export PATH=")  # what the environment of the tests has done already
SECONDS = re.compile(r"\b\d+\.\d s\b")


def commands_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block with what is written into each (a file or a quoted text)."""
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("cat >"):
            yield line, "".join(f"{inner}\n" for inner in iter(lambda: next(lines), "END"))
        elif line == 'python -c "':
            yield line, "".join(f"{inner}\n" for inner in iter(lambda: next(lines), '"'))
        elif not line.startswith(SET_UP):
            yield line, ""


def run(command: str, body: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Do what a shell would with a command; return what it prints below the line of the store."""
    if command.startswith("cat > "):
        Path(command.split()[2]).write_text(body, encoding="utf-8")
    elif command == 'python -c "':
        exec(body, {})
    elif command.startswith("python "):
        _, script, *arguments = command.split()
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        name, *arguments = shlex.split(command)
        assert name == "rrl", command
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
        return result.stdout.removeprefix(result.stdout.split("\n")[0] + "\n")
    return ""


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder after all blocks, and what the last command of each printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        printed = [
            [run(command, body, monkeypatch) for command, body in commands_of(block)][-1]
            for block, _ in BLOCKS
        ]
    return folder, printed


@pytest.mark.parametrize("number", [n for n, (_, printed) in enumerate(BLOCKS) if printed])
def test_the_printed_answers_are_those_that_come(number: int, pasted: tuple[Path, list[str]]):
    expected = BLOCKS[number][1]
    assert SECONDS.sub("0.0 s", pasted[1][number]) == expected


def test_the_tutorial_ends_with_runs_that_learned_from_the_import(pasted: tuple[Path, list[str]]):
    """The first learned from the imported tokens alone; the second went back to its own history."""
    folder, _ = pasted
    store = storage.open(folder / "rrl-data")
    learned = {row["source_run_id"] for row in store.read("replays", run_id="from-history")}
    assert learned == {"tiny-sums"}
    assert {row["unit"] for row in store.read("picks", run_id="goes-back")} >= {"state"}
    assert (folder / "report.html").stat().st_size > 100_000
    assert list((folder / "for-verl").glob("*.jsonl"))
    first, start = (store.read("policies", run_id=run)[0] for run in ("from-history", "goes-back"))
    assert first["adapter_digest"] != start["adapter_digest"]


def test_the_text_rows_are_refused_for_what_they_are(pasted: tuple[Path, list[str]]):
    store = storage.open(pasted[0] / "rrl-data")
    query = """
        select max(num_completion_ids), count(num_logprobs)
        from judged_rollouts where run_id = 'verl-sums'
    """
    assert store.sql(query).fetchall() == [(0, 0)]


@pytest.mark.slow
def test_the_blocks_are_pasted_into_a_shell(tmp_path: Path):
    """As a stranger does, but for the set-up: `rrl` and `python` are those of the tests."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    lines = [line for block, _ in BLOCKS for line in block.splitlines()]
    script = "\n".join(line for line in lines if not line.startswith(SET_UP))
    python = shlex.quote(sys.executable)
    functions = f'set -e\npython() {{ {python} "$@"; }}\nrrl() {{ {python} -m flows.cli "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", functions + script], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for _, printed in BLOCKS:
        assert printed is None or printed in SECONDS.sub("0.0 s", done.stdout)
