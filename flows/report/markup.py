"""HTML by construction: text becomes a node, never markup, and shows what it would hide.

A page holds one style sheet and one script, both named by their hash; nothing else may run, and
nothing may be fetched. Data is JSON in a block that no browser executes.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree as ET

from storage.answers import printable

GENERATOR = "rrl report"
ROUNDING = 1e-12  # below, a number is what rounding left of 0

SHORT_CHARACTERS = 28  # a cell of so many stays on one line

Node = ET.Element | str | None


def element(tag: str, *children: Node, **attributes: Any) -> ET.Element:
    """Return an element; `class_` names its classes, `aria_label` becomes `aria-label`.

    A child or attribute that is None is left out; an attribute that is True has no value.
    """
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            key = name.rstrip("_").replace("_", "-")
            made.set(key, "" if value is True else printable(str(value)))
    extend(made, children)
    return made


def extend(parent: ET.Element, children: Iterable[Node]) -> None:
    """Add children: elements as they are, texts with hidden characters spelled out."""
    for child in children:
        if child is None:
            continue
        if isinstance(child, ET.Element):
            parent.append(child)
            continue
        text = "\n".join(map(printable, child.split("\n")))
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + text
        else:
            parent.text = (parent.text or "") + text


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> ET.Element:
    """Return a table that scrolls by itself where it is too wide; numbers stand to the right."""
    head = element("thead", element("tr", *(element("th", c, scope="col") for c in columns)))
    body = element("tbody")
    for row in rows:
        body.append(element("tr", *map(_cell, row)))
    title = element("caption", caption) if caption else None
    return element(
        "div", element("table", title, head, body), class_="scroll", tabindex="0", role="region",
        aria_label=caption or "table",
    )  # fmt: skip


def bar(frac: float) -> ET.Element:
    """Return a horizontal bar, 0 to 1 of the width it is given."""
    drawn = ET.Element("svg", {"class": "bar", "aria-hidden": "true"})
    ET.SubElement(drawn, "rect", {"width": f"{100 * frac:.1f}%", "height": "100%"})
    return drawn


def number(value: Any) -> str:
    """Return a value as people read it: three digits behind the point, thousands set apart."""
    if value is None:
        return "–"  # noqa: RUF001 - an en dash stands for what is not there
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    is_plain = 1e-3 <= abs(value) < 1e6 or abs(value) < ROUNDING
    return f"{value:,.3f}" if is_plain else f"{value:.3g}"


def json_block(name: str, data: Any) -> ET.Element:
    """Return data for the script, in ASCII; no `<` in it ends the block or begins another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    made = element("script", type="application/json", id=name)
    made.text = text
    return made


def document(title: str, body: Iterable[Node], data: ET.Element) -> str:
    """Return the whole page."""
    style, script = (_own_text(f"page.{kind}") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; script-src '{_source_hash(script)}'; "
        f"style-src '{_source_hash(style)}'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        _raw("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        _raw("style", {}, style),
    )
    page = element(
        "html", head, element("body", *body, data, _raw("script", {}, script)), lang="en"
    )
    return "<!doctype html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


def _cell(value: Any) -> ET.Element:
    if isinstance(value, ET.Element):
        return element("td", value)
    is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
    text = number(value)
    is_short = len(text) <= SHORT_CHARACTERS
    return element("td", text, class_="number" if is_number else "short" if is_short else None)


def _raw(tag: str, attributes: dict[str, str], text: str | None = None) -> ET.Element:
    made = ET.Element(tag, attributes)
    made.text = text
    return made


def _own_text(name: str) -> str:
    return (resources.files("flows.report") / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
