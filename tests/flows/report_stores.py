"""A store to make a hostile page of, and what looks at pages."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import storage
from flows.report.page import make_page
from tests.flows.hostile_texts import TEXTS
from tests.storage.rows import (
    OPENED,
    failure,
    pin,
    planned,
    prompt,
    rollout,
    score,
    tokens,
    update,
)

RUN_ID = "hostile-run"
CHROMIUM = shutil.which("chromium", path="/usr/bin") or shutil.which("chromium")


def write_hostile(path: Path) -> tuple[storage.Store, dict[str, str]]:
    """Write a run whose every text is hostile; return its store and the rollout ids by name."""
    store = storage.open(path, create=True)
    config = json.dumps({"run": {"name": TEXTS["the end of the data block"]}})
    writer = store.open_stream(RUN_ID, OPENED | {"config_json": config, "kind": "train"})
    texts = list(TEXTS.values())
    rows = [rollout(f"p-{n:02d}<b>", completion=text) for n, text in enumerate(texts)]
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    asked = [
        prompt(row["prompt_id"], text[:100])
        | {
            "messages_json": json.dumps([{"role": "user<script>", "content": text[:1_000]}]),
            "difficulty": text[:20],
        }
        for row, text in zip(rows, texts, strict=True)
    ]
    judged = [
        score(i, n % 2, feedback=text[:500], signature=text[:50])
        for n, (i, text) in enumerate(zip(ids, texts, strict=True))
    ]
    failed = [
        failure(f"f{n}", message=text[:500]) | {"kind": text[:30]} for n, text in enumerate(texts)
    ]
    writer.append({"views_pinned": [pin()], "prompts": asked}, "pin")
    writer.append({"rollouts": rows, "rollout_tokens": [tokens(i) for i in ids]}, "sampled")
    learned = {"replays": [planned(i, n) for n, i in enumerate(ids)], "updates": [update()]}
    writer.append({"scores": judged, "failures": failed} | learned, "learned")
    return store, dict(zip(TEXTS, ids, strict=True))


def page_of(store: storage.Store, *run_ids: str, num_rollouts: int = 5_000, **moment: Any) -> str:
    """Return the page about some runs."""
    at = storage.Moment(store, moment.get("as_of", store.head().number))
    return make_page(at, run_ids, num_rollouts, lambda done, note: None).html


class Seen(HTMLParser):
    """What a page consists of: its tags with attributes, and the text of its scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.raw:
            self.raw[self._inside][-1] += data
        else:
            self.text += data

    def data(self) -> dict[str, Any]:
        """Return the data of the rollout browser."""
        found: dict[str, Any] = json.loads(self.raw["script"][0])
        return found
