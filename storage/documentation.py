"""The reference of the event log, `docs/events.md`: `python -m storage.documentation` prints it.

Invariant: what it says of tables, columns and views comes from `schemas` and from the headers of
`sql/*.sql`, so it cannot say anything else than they do; a test compares it with the file.
"""

import re
import sys
import textwrap
from collections.abc import Sequence

from storage.commits import KINDS
from storage.log import CHECKPOINT_EVERY
from storage.schemas import COMMON, TABLES, Column, Table
from storage.upcast import SQL_TYPES
from storage.views import VIEWS, Views, arguments, view_sql

_OPENING = f"""\
# The event log

Every table, column and view of a store. This text is printed by `python -m storage.documentation`
from `storage/schemas.py` and `storage/sql/*.sql`; change it there. How to ask is told in
[sql.md](sql.md).

## On disk

```text
rrl-data/
  _log/00000000000000000017.json                       commit 17
  _checkpoints/00000000000000000100.json               what commits 1 to 100 add up to
  events/<table>/<run>/<batch key>-<nonce>.parquet     segment: rows of one table of one run
  artifacts/<kind>/<2 digits>/<sha256>                 adapters and optimizer states
  live/<run>.lock                                      held by a process that works on the run
  _tmp/                                                files that are being written
```

- A **segment** is a Parquet file that never changes. Until a commit names it, it means nothing.
- A **commit** makes rows exist: it names the segments it adds, of all tables at once, with rows,
  size and sha256, and the hash of the commit before it. They count from 1 and are never deleted.
  Kinds: {", ".join(f"`{kind}`" for kind in KINDS)}.
- `as of N` means the rows that commits 1 to N made exist. It is a predicate on rows, so it gives
  the same answer after compaction and garbage collection.
- A **checkpoint** is written every {CHECKPOINT_EVERY} commits. It saves time and holds nothing that
  the commits do not; a bad one is passed over.
- Folder names carry no data: the run is the column `run_id`.

## Identity

An event is known by its place: the columns marked *place*, in their order. What happened there are
its *facts*. *Timing* columns say how long something took on a machine and are neither.

```text
event_id       = prefix + first 128 bits of sha256([table, {{place column: value, ...}}])
content_sha256 =          first 128 bits of sha256({{column: value, ...}}), NULL facts left out
```

Both hash canonical JSON (`storage/identity.py`), so they are the same on every machine: the id of a
rollout can be computed before it is sampled, and the same event is never committed twice.

- An **observed** table holds what cannot be had again bit for bit, such as a sampled completion.
  When a place is appended a second time, the first commit wins and the writer gets back its row.
- A **derived** table holds what follows from committed rows. The same place with another content
  is refused as a conflict.

## Types
"""

_COMMON = """\
## Columns of every table

Each table has these columns before its own and two behind them: `_commit` (bigint), the commit that
made the row exist, and `_row` (bigint), its position within that commit and table.
"""

_VIEWS = """\
## Views

A view is one SELECT in `storage/sql`. Tables and views are macros too: `rollouts(17)` and
`training_history(17)` read as of commit 17, the plain names as of the newest commit or `--as-of`.
"""


def events_markdown() -> str:
    """Return the whole of `docs/events.md`."""
    parts = [
        _OPENING,
        _grid(("type", "in SQL"), [(f"`{name}`", f"`{sql}`") for name, sql in SQL_TYPES.items()]),
        _COMMON,
        _column_grid(COMMON, is_common=True),
        _tables_grid(),
        *map(_table, TABLES.values()),
        _VIEWS,
        *_views(),
    ]
    return "\n".join(parts)


def header(name: str) -> dict[str, str]:
    """Return the comment that opens a view's file, by heading: Question, Grain, Columns, ..."""
    comment = re.match(r"(?:--.*\n)+", view_sql(name))
    assert comment, f"`{name}.sql` opens with no comment"
    text = re.sub(r"^-- ?", "", comment.group(), flags=re.MULTILINE)
    sections = re.split(r"^(\w+):", text, flags=re.MULTILINE)[1:]
    return {
        heading: textwrap.dedent(" " * (len(heading) + 1) + body).strip("\n")
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
    }


def _tables_grid() -> str:
    rows = [(f"[`{t.name}`](#{t.name})", t.nature, f"`{t.prefix}`", t.doc) for t in TABLES.values()]
    return "## Tables\n\n" + _grid(("table", "nature", "prefix", "a row says"), rows)


def _table(table: Table) -> str:
    nature = f"{table.nature.capitalize()}, version {table.version}, prefix `{table.prefix}`."
    return f"### {table.name}\n\n{table.doc} {nature}\n\n{_column_grid(table.columns)}"


def _column_grid(columns: Sequence[Column], is_common: bool = False) -> str:
    rows = [
        (
            f"`{c.name}`",
            c.type,
            "common" if is_common else "place" if c.place else "timing" if c.timing else "fact",
            "yes" if c.nullable else "",
            str(c.since),
            c.doc,
        )
        for c in columns
    ]
    return _grid(("column", "type", "part", "may be NULL", "since", "meaning"), rows)


def _views() -> list[str]:
    empty = Views("", (), as_of=0)
    empty.define(" ".join(VIEWS))
    texts = []
    for name in VIEWS:
        columns = empty.connection.sql(f"describe {name}").fetchall()
        listed = ", ".join(f"`{column}` {type_.lower()}" for column, type_, *_ in columns)
        says = header(name)
        takes = f"- Parameters: {_line(says['Parameters'])}\n" if arguments(name) else ""
        texts.append(
            f"### {name}\n\n{_line(says['Question'])}\n\n- Grain: {_line(says['Grain'])}\n{takes}"
            f"- Columns: {listed}.\n\n```text\n{says['Columns']}\n```\n"
        )
    return texts


def _line(text: str) -> str:
    words = " ".join(text.split())
    return words[:1].upper() + words[1:]


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    sys.stdout.write(events_markdown())
