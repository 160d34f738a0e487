"""The page in a real browser: nothing runs, nothing is fetched, and people find what they seek."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import storage
from tests.flows.conftest import RUN_ID as REPLAYED_RUN_ID
from tests.flows.hostile_texts import TEXTS
from tests.flows.report_stores import CHROMIUM, RUN_ID, page_of, write_hostile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium at /usr/bin/chromium or on PATH"),
]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
NUM_LARGE = 5_000  # rollouts on a page, as by default
MAX_OPEN_S = 2.0
PHONE_WIDTH = 360


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS) as browser,
    ):
        yield browser


class Looked:
    """A page that was opened, and everything it complained of or asked for."""

    def __init__(self, browser: "Browser", path: Path, **look: Any) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(**look)
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self._asked(request.url))
        started = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]")
        self.page.wait_for_selector(".row")
        self.open_s = time.perf_counter() - started

    def _asked(self, url: str) -> None:
        if not url.startswith("file:"):
            self.complaints.append(f"asked for {url}")

    def found(self) -> str:
        return self.page.locator("#found").inner_text()

    def search(self, words: str) -> None:
        self.page.fill("#search", words)
        self.page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    store, _ = write_hostile(folder / "store")
    (folder / "report.html").write_text(page_of(store, RUN_ID), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def replayed_page(replayed: storage.Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replayed") / "report.html"
    path.write_text(page_of(replayed, REPLAYED_RUN_ID), encoding="utf-8")
    return path


def test_no_hostile_completion_runs_or_hides(browser: "Browser", hostile_page: Path):
    looked = Looked(browser, hostile_page)
    page = looked.page
    page.locator("#list").focus()
    shown = ""
    for _ in TEXTS:
        shown += page.locator("#detail").inner_text()
        page.keyboard.press("ArrowDown")
        toggle = page.locator(".toggle")
        if toggle.count():
            toggle.click()
            page.locator("#list").focus()
    for details in page.locator("summary").all():
        details.click()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("({}).hacked") is None
    assert looked.complaints == []
    assert page.locator("#detail script, #detail img, #detail a, #detail svg").count() == 0
    assert "<script>window.hacked = true</script>" in shown
    for escape in ("\\x1b", "\\u202e", "\\x00", "\\u2028", "\\u200b", "\\U000e0041"):
        assert escape in shown, escape
    assert not [c for c in shown if not c.isprintable() and c not in "\n\t"]
    assert page.url == hostile_page.as_uri() or page.url.startswith(hostile_page.as_uri() + "#")
    looked.context.close()


def test_search_and_filters_find_what_fits(browser: "Browser", hostile_page: Path):
    looked = Looked(browser, hostile_page)
    page, total = looked.page, len(TEXTS)
    assert looked.found() == f"{total} of {total} on this page"
    looked.search("HYPERLINK")
    assert looked.found() == f"1 of {total} on this page"
    assert "=HYPERLINK" in page.locator("#detail .completion").first.inner_text()
    looked.search("nothing says this")
    assert looked.found() == f"0 of {total} on this page"
    assert "Nothing fits" in page.locator("#detail").inner_text()
    page.click("button[type=reset]")
    page.wait_for_timeout(100)
    assert looked.found() == f"{total} of {total} on this page"
    page.select_option("#outcome", "solved")
    page.wait_for_timeout(100)
    num_solved = sum(n % 2 for n in range(total))
    assert looked.found() == f"{num_solved} of {total} on this page"
    page.fill("#low", "0.5")
    page.fill("#first", "2")
    page.wait_for_timeout(100)
    assert looked.found() == f"0 of {total} on this page"
    assert looked.complaints == []
    looked.context.close()


def test_the_keyboard_moves_through_the_list(browser: "Browser", replayed_page: Path):
    looked = Looked(browser, replayed_page)
    page = looked.page
    page.locator("#list").focus()
    first = page.locator("#detail h3").inner_text()
    page.keyboard.press("End")
    last = page.locator("#detail h3").inner_text()
    assert (
        page.locator("[aria-selected=true]").get_attribute("aria-posinset")
        == looked.found().split()[0]
    )
    page.keyboard.press("Home")
    assert page.locator("#detail h3").inner_text() == first != last
    page.keyboard.press("ArrowDown")
    active = page.locator("#list").get_attribute("aria-activedescendant")
    assert active == page.locator("[aria-selected=true]").get_attribute("id")
    assert looked.complaints == []
    looked.context.close()


def test_what_was_replayed_leads_to_what_came_of_it(browser: "Browser", replayed_page: Path):
    looked = Looked(browser, replayed_page)
    page = looked.page
    page.select_option("#role", "continuation")
    page.wait_for_timeout(100)
    begun = page.locator("#detail button.link").first
    source = begun.inner_text()
    begun.click()
    assert page.locator("#detail h3").inner_text() == source
    assert "Picked for replay" in page.locator("#detail").inner_text()
    assert looked.complaints == []
    looked.context.close()


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("light", {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}}),
        ("dark", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}}),
        ("phone", {"color_scheme": "light", "viewport": {"width": PHONE_WIDTH, "height": 740}}),
    ],
)
def test_a_page_fits_light_dark_and_a_phone(
    name: str, look: dict[str, Any], browser: "Browser", replayed_page: Path, tmp_path: Path
):
    looked = Looked(browser, replayed_page, **look)
    page = looked.page
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= look["viewport"]["width"]
    paper, ink = page.evaluate(
        "['backgroundColor', 'color'].map((key) => getComputedStyle(document.body)[key])"
    )
    is_dark = sum(map(int, paper[4:-1].split(","))) < sum(map(int, ink[4:-1].split(",")))
    assert is_dark == (name == "dark")
    drawn = page.locator("svg.plot path").last.evaluate("(node) => getComputedStyle(node).stroke")
    assert drawn.startswith(("rgb", "none"))
    page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
    assert looked.complaints == []
    looked.context.close()


def test_a_full_page_opens_quickly(browser: "Browser", tmp_path: Path):
    store, _ = write_hostile(tmp_path / "store")
    html = page_of(store, RUN_ID)
    path = tmp_path / "large.html"
    path.write_text(_repeated(html, NUM_LARGE), encoding="utf-8")
    looked = min((Looked(browser, path) for _ in range(3)), key=lambda looked: looked.open_s)
    assert looked.found().startswith(f"{NUM_LARGE:,} of")
    assert looked.open_s < MAX_OPEN_S
    assert looked.complaints == []


def _repeated(html: str, num: int) -> str:
    """Return the page with its first rollouts over and over, as many as a page holds."""
    import json

    begin = html.index('id="rollouts">') + len('id="rollouts">')
    end = html.index("</script>", begin)
    data = json.loads(html[begin:end])
    lists = {key: value for key, value in data.items() if isinstance(value, list)}
    rows = [n for n, text in enumerate(data["text"]) if len(text) < 500]
    for key, values in lists.items():
        data[key] = [values[rows[n % len(rows)]] for n in range(num)]
    data["ids"] = [f"ro{n:032x}" for n in range(num)]
    data["text"] = [f"{text}{' of many words' * 40}" for text in data["text"]]
    token = {"ids": list(range(200)), "logprobs": [-(n % 500) for n in range(200)], "reason": None}
    data["tokens"] = [token] * num
    return html[:begin] + json.dumps(data).replace("<", "\\u003c") + html[end:]
