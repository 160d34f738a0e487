"""docs/events.md is what the schemas say; docs/sql.md gives the answers it prints.

After a change of a table, a column or a view:

    python -m storage.documentation > docs/events.md
    python -m tests.docs_example --write    # the answers behind the SQL blocks of docs/sql.md

Read the difference before you commit it: an answer that changed without its question is a finding.
The Python examples are a doctest and are kept by hand.
"""

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import app
from storage import console
from storage.documentation import events_markdown
from storage.schemas import TABLES
from storage.views import VIEWS
from tests import docs_reviews
from tests.docs_example import DOC, QUESTION, SECOND, answer, answered, build

SQL_MD = DOC.read_text(encoding="utf-8")
EVENTS_MD = DOC.with_name("events.md").read_text(encoding="utf-8")
ABOVE, _, BELOW = SQL_MD.partition(SECOND)
QUESTIONS, SECOND_QUESTIONS = (
    [(found["query"], found["answer"]) for found in QUESTION.finditer(text)]
    for text in (ABOVE, BELOW)
)
COMMANDS = [line for line in SQL_MD.splitlines() if line.startswith("rrl ")]
UNSTABLE = {"recorded_at", "opened_at", "last_event_at", "content_sha256"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `rrl-data` is the example store."""
    path = tmp_path_factory.mktemp("docs")
    build(path / "rrl-data")
    return path


@pytest.fixture(scope="module")
def store(folder: Path) -> storage.Store:
    return storage.open(folder / "rrl-data")


@pytest.fixture(scope="module")
def second(folder: Path) -> storage.Store:
    return docs_reviews.build(folder / "reviews")


def test_the_reference_is_what_the_schemas_say():
    assert events_markdown() == EVENTS_MD, "run `python -m storage.documentation > docs/events.md`"


def test_the_reference_names_every_folder_of_a_store(store: storage.Store):
    with storage.hold_run(store, "sums-a"):
        names = {path.name for path in store.path.iterdir()}
    layout = EVENTS_MD.split("```text")[1].split("```")[0]
    assert names <= set(re.findall(r"^  (\w+)/", layout, re.M))


@pytest.mark.parametrize(("query", "expected"), QUESTIONS)
def test_every_question_has_the_answer_that_is_printed(
    query: str, expected: str | None, store: storage.Store
):
    assert answer(store, query) == expected, "run `python -m tests.docs_example --write`"
    assert "(0 rows)" not in (expected or "")
    assert not UNSTABLE & set(re.findall(r"\w+", query))


@pytest.mark.parametrize(("query", "expected"), SECOND_QUESTIONS)
def test_every_question_about_reviews_and_imports_has_the_answer_that_is_printed(
    query: str, expected: str | None, second: storage.Store
):
    assert answer(second, query) == expected, "run `python -m tests.docs_example --write`"
    assert "(0 rows)" not in (expected or "")
    assert not UNSTABLE & set(re.findall(r"\w+", query))


def test_there_are_thirty_numbered_questions_each_with_a_sentence_and_a_query():
    sections = re.split(r"^### ", SQL_MD.split("## Thirty questions")[1], flags=re.M)[1:]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 31))
    for section in sections:
        assert re.match(r"\d+\. .*\?\n\n.+\.\n\n```sql\n", section, re.S), section
        assert section.count("```sql") == 1
    assert len(QUESTIONS + SECOND_QUESTIONS) == SQL_MD.count("```sql")
    assert SECOND_QUESTIONS


def test_writing_the_answers_changes_nothing_and_adds_missing_ones(
    store: storage.Store, second: storage.Store
):
    assert answered(SQL_MD, store, second) == SQL_MD
    assert answered("```sql\nselect 1 as one\n```\n", store, second).endswith(
        "```\n\n```text\none\n---\n  1\n(1 row)\n```\n"
    )


def test_the_example_store_is_whole_and_the_same_every_time(
    store: storage.Store, second: storage.Store, tmp_path: Path
):
    """Also when it is compacted, which changes no answer."""
    assert storage.verify(store, deep=True) == []
    assert storage.verify(second, deep=True) == []
    again = build(tmp_path / "rrl-data")
    query = "select event_id, content_sha256, _commit, _row from {} order by all"
    for table in TABLES:
        if table == "views_pinned":  # names the hash of a commit, which has a nonce
            continue
        ours, theirs = (s.sql(query.format(table)).fetchall() for s in (store, again))
        assert ours == theirs, table
    assert list(storage.compact(again, min_segments=2))
    assert answered(SQL_MD, again, second) == SQL_MD


def test_the_python_examples_work(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```pycon\n(.*?)```", SQL_MD, re.S)
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, "sql.md", None, None)
    report: list[str] = []
    results = doctest.DocTestRunner().run(example, out=report.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_answer(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_the_guide_names_every_table_and_view_and_the_limits():
    listed = re.findall(r"^\| `(\w+)` \|", SQL_MD, re.M)
    assert listed == [*TABLES, *VIEWS]
    assert f"{console.TIME_LIMIT_S:g} seconds" in SQL_MD
    assert f"{console.MAX_ROWS:,} rows" in SQL_MD
    assert f"{console.MEMORY_LIMIT.removesuffix('GB')} GB" in SQL_MD
