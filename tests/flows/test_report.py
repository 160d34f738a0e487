"""The page of `rrl report`: what it holds, that it is safe by construction, how it is written."""

import base64
import hashlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import storage
from flows.cli import EXIT_DAMAGED, app
from flows.report.figures import Plot, Series, evenly, figure
from flows.report.markup import GENERATOR, element, number
from storage import console
from tests.flows.hostile_texts import TEXTS
from tests.flows.report_stores import RUN_ID, Seen, page_of, write_hostile
from tests.storage.replay_rows import Run
from tests.storage.review_rows import ReviewRun

GUIDE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
COMMANDS = [x.split(" #")[0].strip() for x in GUIDE.splitlines() if x.startswith("rrl report ")]
FORMULA_STARTS = tuple("=+-@\t＝")  # noqa: RUF001 - as Excel reads it


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[storage.Store, dict[str, str]]:
    return write_hostile(tmp_path_factory.mktemp("hostile") / "store")


@pytest.fixture(scope="module")
def seen(hostile: tuple[storage.Store, dict[str, str]]) -> Seen:
    return Seen(page_of(hostile[0], RUN_ID))


def test_the_corpus_is_large():
    assert len(TEXTS) >= 30


def test_a_page_has_one_style_and_one_script_named_by_their_hashes(seen: Seen):
    scripts = [attributes for tag, attributes in seen.tags if tag == "script"]
    assert [s.get("type") for s in scripts] == ["application/json", None]
    [policy] = [
        a["content"] for t, a in seen.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, [text] in (("script", seen.raw["script"][1:]), ("style", seen.raw["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_nothing_on_a_page_runs_or_is_fetched(seen: Seen):
    allowed = {"a", "use"}
    for tag, attributes in seen.tags:
        assert tag not in {"iframe", "object", "embed", "base", "img", "link", "video"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("style", "src", "srcdoc", "action", "formaction")
            if name.endswith("href"):
                assert tag in allowed
                assert value is not None
                assert value.startswith("#")


def test_every_completion_reaches_the_script_as_the_text_it_is(seen: Seen):
    data, limit = seen.data(), 20_000
    assert sorted(data["text"]) == sorted(text[:limit] for text in TEXTS.values())
    assert sum(data["cut"]) == sum(max(0, len(text) - limit) for text in TEXTS.values())
    assert "<" not in seen.raw["script"][0]
    assert seen.raw["script"][0].isascii()


def test_texts_in_the_markup_show_what_they_would_hide(seen: Seen):
    assert "\\x1b]0;owned\\x07" in seen.text
    assert all(c.isprintable() or c == "\n" for c in seen.text)
    assert element("p", "a\u202eb\nc").text == "a\\u202eb\nc"
    assert element("p", title="\x1b").get("title") == "\\x1b"


def test_own_script_and_style_cannot_end_their_elements():
    for name in ("page.js", "page.css"):
        text = (Path(__file__).parents[2] / "flows" / "report" / name).read_text()
        assert "</" not in text.replace("</g", "")
        assert "<!--" not in text
    script = (Path(__file__).parents[2] / "flows/report/page.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", script
    )


def test_hostile_texts_command_no_terminal_and_no_spreadsheet(
    hostile: tuple[storage.Store, dict[str, str]],
):
    store, _ = hostile
    result = console.run_query(store, "select left(completion, 3000) as text from rollouts")
    assert len(result.rows) == len(TEXTS)
    table, csv = (console.as_text(store, result, format_) for format_ in ("table", "csv"))
    assert all(c.isprintable() or c == "\n" for c in table)
    assert all(c.isprintable() or c in "\t\r\n" for c in csv)
    assert not [line for line in csv.split("\r\n") if line.strip('"').startswith(FORMULA_STARTS)]
    for command in (["show", RUN_ID], *(["show", of] for of in hostile[1].values()), ["runs"]):
        shown = CliRunner().invoke(app, [*command, "--store", str(store.path)])
        assert shown.exit_code == 0
        assert all(c.isprintable() or c == "\n" for c in shown.output)
    as_json = CliRunner().invoke(app, ["show", RUN_ID, "--json", "--store", str(store.path)])
    assert as_json.output.strip().isprintable()


def test_a_plot_names_its_axes_and_holds_its_numbers():
    points = [(1, 0.25), (2, None), (3, 0.75)]
    plot = Plot(
        "Does it rise?", "iteration", "reward", {"a": [Series("", points, [(1, 0.1, 0.4)])]}
    )
    text = " ".join(figure(plot, 0).itertext())
    for part in ("Does it rise?", "iteration", "reward", "0.250 [0.100, 0.400]", "0.750"):
        assert part in text
    drawing = figure(plot, 0).find("svg")
    assert drawing is not None
    assert "Does it rise?" in str(drawing.get("aria-label"))
    assert not [n for n in drawing.iter() if "style" in n.attrib]
    assert any(n.get("stroke") == "var(--s0)" for n in drawing.iter())


def test_even_choices_keep_first_and_last():
    assert evenly([1, 2, 3], 3) == [1, 2, 3]
    assert evenly(list(range(101)), 5) == [0, 25, 50, 75, 100]


def test_numbers_are_short():
    assert [number(x) for x in (None, 0.0, 2.8e-17, 0.12345, 1234, 1e-5, 2.5e6)] == [
        "\u2013", "0.000", "0.000", "0.123", "1,234", "1e-05", "2.5e+06",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> ReviewRun:
    """Two runs of three rollouts each, of which r1 reviews."""
    store = storage.open(tmp_path_factory.mktemp("two") / "store", create=True)
    for run_id in ("r2", "r1"):
        run = ReviewRun(store, run_id)
        run.prompt("p1")
        run.begin(1)
        failed = run.attempt(0.0)
        if run_id == "r1":
            review = run.review(failed)
            run.distil(run.second(review, 1.0), review)
        else:
            run.attempt(1.0)
            run.attempt(0.0)
        run.commit()
    return run


def test_runs_stand_side_by_side_with_what_answers_what(side_by_side: ReviewRun):
    seen = Seen(page_of(side_by_side.store, "r1", "r2"))
    data = seen.data()
    assert "2 runs side by side" in seen.text
    assert "This page holds 6 of 6 rollouts" in seen.text
    assert "Review and memory" in seen.text
    assert sorted(data["run_id"]) == ["r1"] * 3 + ["r2"] * 3
    at = {role: place for place, role in enumerate(data["role"]) if data["run_id"][place] == "r1"}
    failed, review, second = (data["ids"][at[r]] for r in ("attempt", "review", "second_attempt"))
    assert data["parent_id"][at["review"]] == failed
    assert data["parent_id"][at["second_attempt"]] == review
    assert data["children"][failed] == [[review, "review", 1]]
    assert data["children"][review] == [[second, "second_attempt", 1]]
    assert [note[0] for note in data["reviews"][review]] == ["ok"]


def test_a_page_as_of_a_commit_is_the_same_for_ever(side_by_side: ReviewRun):
    store, number = side_by_side.store, side_by_side.store.head().number
    before = page_of(store, "r2", num_rollouts=2)
    assert "This page holds 2 of 3 rollouts" in before
    run = Run(store, "r2")
    run.pin(2)
    run.sample([1.0, 1.0], iteration=2)
    assert page_of(store, "r2", num_rollouts=2, as_of=number) == before


def test_sections_without_rows_are_left_out(seen: Seen):
    assert "Review and memory" not in seen.text
    assert "Retry outcomes" not in seen.text
    assert "What went wrong and was survived" in seen.text


def report(store: storage.Store, *arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["report", *arguments, "--store", str(store.path)])
    is_failed = found.exception is not None and not isinstance(found.exception, SystemExit)
    return found.exit_code, str(found.exception) if is_failed else found.output


def test_a_report_replaces_a_report_and_nothing_else(
    hostile: tuple[storage.Store, dict[str, str]], tmp_path: Path
):
    store, target = hostile[0], tmp_path / "report.html"
    target.write_text(f'<!doctype html>\n<html><meta name="generator" content="{GENERATOR}">')
    code, said = report(store, RUN_ID, "--output", str(target), "--rollouts", "3")
    assert (code, f"3 of {len(TEXTS)} rollouts" in said) == (0, True), said
    assert GENERATOR in target.read_text()[:2_000]
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    code, said = report(store, RUN_ID, "--output", str(notes))
    assert code != 0
    assert "expected a new file or an earlier report" in said
    assert notes.read_text() == "mine"
    assert "existing folder" in report(store, RUN_ID, "-o", str(tmp_path / "no" / "x.html"))[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guide_work(
    command: str, hostile: tuple[storage.Store, dict[str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    head = hostile[0].head().number
    words = command.replace("RUN", RUN_ID).replace("--as-of 40", f"--as-of {head}").split()
    code, said = report(hostile[0], *words[2:])
    assert code == 0, said
    assert list(tmp_path.glob("*.html"))


@pytest.mark.slow
def test_a_damaged_store_is_reported_only_when_allowed(tmp_path: Path):
    store, _ = write_hostile(tmp_path / "store")
    [segment] = (store.path / "events" / "scores").rglob("*.parquet")
    segment.unlink()
    target = tmp_path / "report.html"
    code, said = report(store, RUN_ID, "-o", str(target))
    assert "segments are damaged" in said
    assert not target.exists()
    code, said = report(store, RUN_ID, "-o", str(target), "--allow-damaged")
    assert code == EXIT_DAMAGED
    assert set(Seen(target.read_text()).data()["outcome"]) == {"unscored"}


def test_an_unknown_run_is_named(hostile: tuple[storage.Store, dict[str, str]], tmp_path: Path):
    _, said = report(hostile[0], "nobody", "-o", str(tmp_path / "x.html"))
    assert f"came `nobody`; there are {RUN_ID}" in said
    assert not (tmp_path / "x.html").exists()
