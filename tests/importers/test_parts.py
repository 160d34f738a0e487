"""Groups, and the parts that commits hold: functions of the bytes alone."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from storage.importers.formats import FORMATS, FileReader
from storage.importers.known import KnownFiles
from storage.importers.parts import Cutter, Part, Placed, Source
from storage.importers.rows import Declared, Place, part_rows
from storage.importers.samples import Sample
from tests.importers.imported import verl_line, write_lines

LINES = 10  # of a part in these tests


def prompt_id(sample: Sample) -> str:
    return sample.messages[0]["content"]


def parts_of(path: Path, position: int = -1, lines: int = LINES) -> list[Part]:
    cutter = Cutter(prompt_id, lines)
    source = Source(FileReader(FORMATS["verl"], path), "key", position)
    parts = list(cutter.cut(source))
    return [*parts, cutter.rest()] if cutter.num_slices else parts


def placed(parts: list[Part]) -> list[Placed]:
    return [one for part in parts for piece in part.slices for one in piece.placed]


def groups(parts: list[Part]) -> list[list[str]]:
    """The completions of each group, in the order of the first."""
    found: dict[str, list[str]] = {}
    for one in placed(parts):
        found.setdefault(one.group, []).append(one.sample.completion)
    return list(found.values())


def line(prompt: str, output: str, **facts: Any) -> dict[str, Any]:
    return {"input": prompt, "output": output, "score": 1.0, "step": 1} | facts


def test_neighbours_with_the_same_prompt_and_step_are_a_guessed_group(tmp_path: Path):
    lines = [
        line("a", "1"), line("a", "2"), line("b", "3"), line("a", "4"), line("a", "5", step=2),
        line("a", "6", step=2),
    ]  # fmt: skip
    parts = parts_of(write_lines(tmp_path / "f", lines))
    assert groups(parts) == [["1", "2"], ["3"], ["4"], ["5", "6"]]
    assert parts[0].slices[0].num_guessed_groups == 4
    assert [one.index for one in placed(parts)] == [0, 1, 0, 2, 3, 4]  # none twice for a prompt


def test_a_uid_groups_rollouts_wherever_they_stand(tmp_path: Path):
    lines = [line(p, str(n), uid=u) for n, (p, u) in enumerate(["aU", "bV", "aU", "aW", "bV"])]
    parts = parts_of(write_lines(tmp_path / "f", lines))
    assert groups(parts) == [["0", "2"], ["1", "4"], ["3"]]
    assert parts[0].slices[0].num_guessed_groups == 0
    assert [one.index for one in placed(parts)] == [0, 0, 1, 2, 1]


def test_a_task_index_groups_only_what_was_asked_the_same():
    cutter = Cutter(prompt_id)
    messages = {"role": "user"}
    samples = [
        Sample([{**messages, "content": asked}], str(n), task=task)
        for n, (asked, task) in enumerate([("a", "0"), ("b", "0"), ("a", "0"), ("a", "1")])
    ]

    class Records:
        path = Path("f")

        def sha256(self, with_last: bool = True) -> str:
            return ""

        def __iter__(self) -> Any:
            from storage.importers.formats import Record

            for n, sample in enumerate(samples, 1):
                yield Record(n, n, n, True, 1, [sample])

    assert list(cutter.cut(Source(Records(), "key"))) == []  # type: ignore[arg-type]
    assert groups([cutter.rest()]) == [["0", "2"], ["1"], ["3"]]


def test_a_part_ends_where_a_group_begins_and_in_a_group_at_twice_its_size(tmp_path: Path):
    """Groups of four: 4 + 4 + 4 lines are the first to reach 10. Of one group, 20 are a part."""
    path = write_lines(tmp_path / "f", [verl_line(n) for n in range(50)])
    assert [part.num_lines for part in parts_of(path)] == [12, 12, 12, 12, 2]
    alike = write_lines(tmp_path / "g", [line("a", str(n)) for n in range(50)])
    parts = parts_of(alike)
    assert [part.num_lines for part in parts] == [20, 20, 10]
    assert len(groups(parts)) == 1
    assert [one.index for one in placed(parts)] == list(range(50))


def test_a_part_is_full_also_by_its_bytes(tmp_path: Path):
    path = write_lines(tmp_path / "f", [line(str(n), "x" * 1000) for n in range(6)])
    cutter = Cutter(prompt_id, 1000, 2500)
    parts = list(cutter.cut(Source(FileReader(FORMATS["verl"], path), "key")))
    assert [part.num_lines for part in [*parts, cutter.rest()]] == [3, 3]


prompts = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2])), max_size=40)
junk = st.sampled_from(
    ["", "{", "null", '{"input": 1}', '{"input": "a", "output": "b", "step": 1}']
)


@given(prompts, st.lists(junk, max_size=4), st.integers(1, 5), st.data())
def test_going_on_from_any_part_gives_the_rest_as_it_would_have_been(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[tuple[str, int]],
    between: list[str],
    lines: int,
    data: st.DataObject,
):
    path = tmp_path_factory.mktemp("f") / "f.jsonl"
    texts = [json.dumps(line(p, str(n), step=s)) for n, (p, s) in enumerate(asked)]
    for text in between:
        texts.insert(data.draw(st.integers(0, len(texts))), text)
    content = "\n".join(texts) + data.draw(st.sampled_from(["", "\n"]))
    path.write_text(content)
    whole = parts_of(path, lines=lines)
    assert sum(p.num_lines for p in whole) == len(content.split("\n")) - content.endswith("\n") - (
        content == ""
    )
    keep = data.draw(st.integers(0, len(whole)))
    position = whole[keep - 1].slices[-1].position if keep else -1
    assert parts_of(path, position, lines) == whole[keep:]


odd = st.sampled_from(
    [b"", b" ", b"\r", b"\xef\xbb\xbf", b"\x85", b"\xc2\x85", b"\xe2\x80\xa8", b"\0", b"\xff", b"{",
     b"null", b"\xef\xbb\xbf{}", b'{"input": "a\r", "output": "c", "step": 1} \r']
)  # fmt: skip
spoken = st.sampled_from("ab").map(lambda prompt: json.dumps(line(prompt, "x")).encode())


@given(
    st.lists(spoken | odd, max_size=12), st.lists(st.floats(0, 1), max_size=3), st.integers(1, 4)
)
def test_a_file_that_is_read_while_it_grows_becomes_what_it_would_at_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], looks: list[float], lines: int
):
    """Every byte is in one part, also of lines that are none, wherever the looks end."""
    path, content = tmp_path_factory.mktemp("f") / "f.jsonl", b"\n".join(texts)
    known, parts = KnownFiles([]), []
    for end in [*(int(share * len(content)) for share in sorted(looks)), len(content), None]:
        path.write_bytes(content[:end])
        found = known.find(FORMATS["verl"], path)
        assert found.num_lines == sum(part.num_lines for part in parts)
        cutter, reader = Cutter(prompt_id, lines), FileReader(FORMATS["verl"], path)
        new = list(cutter.cut(Source(reader, "key", found.position), end is None))
        parts += [*new, cutter.rest()] if cutter.num_slices else new
        for piece in (piece for part in parts for piece in part.slices):
            assert piece.sha256 == hashlib.sha256(content[: piece.position]).hexdigest()
            known.add(piece.position, piece.sha256, None, piece.num_lines)
    whole = parts_of(path, lines=lines)
    assert sum(part.num_lines for part in parts) == sum(part.num_lines for part in whole)
    assert groups(parts) == groups(whole)
    assert known.find(FORMATS["verl"], path).is_whole == bool(content)


def test_blank_lines_where_a_part_ended_are_lines_of_the_next(tmp_path: Path):
    (tmp_path / "f").write_text("\n\n\n")
    first, *rest = parts_of(tmp_path / "f", lines=1)
    assert parts_of(tmp_path / "f", first.slices[-1].position, lines=1) == rest != []


def test_the_hash_of_a_part_is_that_of_all_bytes_before_its_end(tmp_path: Path):
    path = write_lines(tmp_path / "f", [verl_line(n) for n in range(30)])
    content = path.read_bytes()
    ends = [(p.slices[0].position, p.slices[0].sha256) for p in parts_of(path)]
    assert [position for position, _ in ends][-1] == len(content)
    assert all(hashlib.sha256(content[:p]).hexdigest() == sha for p, sha in ends)


def test_no_two_rollouts_of_a_part_have_the_same_place(tmp_path: Path):
    lines = [line("ab"[n // 3 % 2], "x", step=n // 7) for n in range(60)]
    declared = Declared("verl", "t", "train", None, None)
    for number, part in enumerate(parts_of(write_lines(tmp_path / "f", lines))):
        rows = part_rows(part, Place("r", number), declared)["rollouts"]
        ids = Counter(storage.event_id("rollouts", row | {"run_id": "r"}) for row in rows)
        assert max(ids.values()) == 1


def test_scores_are_of_the_rollouts_of_their_part(tmp_path: Path):
    """The ids made all at once are those that the rows get."""
    path = write_lines(tmp_path / "f", [verl_line(n) for n in range(9)])
    [part] = parts_of(path, lines=100)
    rows = part_rows(part, Place("run", 3), Declared("verl", "t", "train", None, None))
    ids = [storage.event_id("rollouts", row | {"run_id": "run"}) for row in rows["rollouts"]]
    assert [row["target_id"] for row in rows["scores"]] == ids
    assert [row["value"] for row in rows["scores"]] == [n % 2 for n in range(9)]
