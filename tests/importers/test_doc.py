"""docs/import.md names what there is, and its question has an answer."""

import re
from pathlib import Path

import storage
from storage.export_rollouts import SHAPES
from storage.importers.formats import FORMATS
from tests.importers.imported import ask, import_here, verl_line, write_lines

DOC = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")


def test_the_guide_names_every_format_and_shape():
    formats, export = DOC.split("## Export")
    assert re.findall(r"^\| `([\w-]+)` \|", formats.split("## Once")[0], re.M) == [*FORMATS]
    assert re.findall(r"^\| `(\w+)` \|", export, re.M) == [*SHAPES, "sft"]


def test_its_question_tells_what_was_imported(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "1.jsonl", [verl_line(0), "{", verl_line(1)])
    import_here(store, "verl", path)
    [question] = re.findall(r"```sql\n(.*?)```", DOC, re.S)
    assert ask(store, question) == [(str(path), 3, 2, 0, 1)]
