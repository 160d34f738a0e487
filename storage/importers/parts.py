"""What one commit of an import holds: lines of one file or several, with their groups.

    group    rollouts that were compared with each other. As the file says; where it names only a
             problem, those with the same name and prompt; where it names nothing, neighbours with
             the same prompt and step, which is a guess
    index    of a sample in its group, or the next one that its prompt has free in the part

A part ends with the first group that begins after `PART_LINES` or `PART_BYTES`, after twice as many
within a group. Groups never go on in another file.

Invariant: parts follow from the bytes of the files and from where earlier parts ended, so an import
that was killed goes on as if it had not been. The lines of a file that are known already are read
again for their groups, and leave nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storage.importers.formats import FileReader, Record
from storage.importers.samples import Sample

PART_LINES = 4_096
PART_BYTES = 32 * 2**20
SHOWN_LINES = 5

PromptId = Callable[[Sample], str]


@dataclass(slots=True)
class Placed:
    """A sample with its prompt, its group and its place."""

    sample: Sample
    prompt_id: str
    group: str
    index: int


@dataclass
class Problem:
    """Lines of a file that became no rollout for the same reason: how many, the first ones."""

    message: str
    num_lines: int = 0
    lines: list[int] = field(default_factory=list)


@dataclass
class Slice:
    """Lines of one file in a part."""

    path: Path
    key: str  # of the file in its groups
    first_line: int
    num_lines: int = 0
    position: int = 0
    sha256: str = ""
    num_guessed_groups: int = 0
    placed: list[Placed] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict)

    def add_problem(self, kind: str, message: str, line: int) -> None:
        """Count a line that became no rollout."""
        problem = self.problems.setdefault(kind, Problem(message))
        problem.num_lines += 1
        if len(problem.lines) < SHOWN_LINES:
            problem.lines.append(line)


@dataclass
class Part:
    """The slices of one commit, in the order of their files."""

    slices: list[Slice] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Samples of all slices."""
        return sum(len(piece.placed) for piece in self.slices)

    @property
    def num_lines(self) -> int:
        """Lines of all slices, the blank ones too."""
        return sum(piece.num_lines for piece in self.slices)


@dataclass
class Source:
    """A file to be cut, and the key of its groups.

    What is before `position` is known; -1: nothing. Once it is cut, `position` and `sha256` say
    where that ended.
    """

    reader: FileReader
    key: str
    position: int = -1
    sha256: str = ""


class Cutter:
    """Cuts files into parts; keeps one part and the state of the last group."""

    def __init__(self, prompt_id: PromptId, lines: int = PART_LINES, size: int = PART_BYTES):
        self._prompt_id = prompt_id
        self._max_lines, self._max_bytes = lines, size
        self._part = Part()
        self._num_lines = self._num_bytes = 0  # of the part
        self._free: dict[str, int] = {}  # the next free index of each prompt in the part

    @property
    def is_full(self) -> bool:
        """Whether the part at work ends with the group at work."""
        return self._is_full(begins=True)

    @property
    def num_slices(self) -> int:
        """Slices of the part at work."""
        return len(self._part.slices)

    def cut(self, source: Source, with_open_line: bool = True) -> Iterator[Part]:
        """Yield the parts that are full; what is left of the file waits for `rest`.

        `with_open_line` takes a last line without a newline for whole.
        """
        reader, groups = source.reader, _Groups(source.key, self._prompt_id)
        piece: Slice | None = None
        known, is_open, start = source.position, False, 0
        for record in reader:
            is_open = not (record.is_ended or with_open_line)
            if is_open:
                break
            placed, begins = groups.place(record.samples, record.number)
            is_known, start = start < known >= record.content_end, record.position
            if is_known:
                continue
            if piece is not None and self._is_full(begins):
                piece.sha256 = reader.sha256(with_last=False)
                yield self.rest()
                piece = None
            if piece is None:
                piece = Slice(reader.path, source.key, record.number)
                self._part.slices.append(piece)
            self._add(piece, record, placed, begins and groups.is_guess)
        if piece is not None:
            piece.sha256 = reader.sha256(with_last=not is_open)
            source.position, source.sha256 = piece.position, piece.sha256

    def rest(self) -> Part:
        """Return the part at work, and begin a new one."""
        part, self._part = self._part, Part()
        self._num_lines = self._num_bytes = 0
        self._free.clear()
        return part

    def _is_full(self, begins: bool) -> bool:
        factor = 1 if begins else 2
        return (
            self._num_lines >= factor * self._max_lines
            or self._num_bytes >= factor * self._max_bytes
        )

    def _add(self, piece: Slice, record: Record, placed: Iterable[Placed], is_guess: bool) -> None:
        piece.num_lines += 1
        piece.position = record.position
        piece.num_guessed_groups += is_guess
        self._num_lines += 1
        self._num_bytes += record.size_bytes
        if record.error is not None:
            piece.add_problem(record.error.kind, str(record.error), record.number)
        for one in placed:
            free = self._free.get(one.prompt_id, 0)
            if free > one.index:
                one.index = free
            self._free[one.prompt_id] = one.index + 1
            piece.placed.append(one)


class _Groups:
    """Names the groups of a file, line by line, and counts their samples."""

    def __init__(self, file_key: str, prompt_id: PromptId) -> None:
        self.is_guess = False
        self._file_key = file_key
        self._prompt_id = prompt_id
        self._last: tuple[object, ...] = ()
        self._group = ""
        self._prompt: tuple[object, str] = (None, "")
        self._sizes: dict[str, int] = {}  # of the group at work, or of those the file names

    def place(self, samples: Sequence[Sample], line: int) -> tuple[list[Placed], bool]:
        """Return the samples of a line with group and index, and whether a group begins."""
        placed, begins = [], False
        for sample in samples:
            prompt_id = self._id(sample)
            begins |= self._enter(sample, prompt_id, line)
            index = self._sizes.get(self._group, 0)
            placed.append(Placed(sample, prompt_id, self._group, index))
            self._sizes[self._group] = index + 1
        return placed, begins

    def _id(self, sample: Sample) -> str:
        """Return the id of its prompt; neighbours often have the same."""
        asked = (sample.messages, sample.answer, sample.turns and sample.turns[0].prompt_ids)
        if self._prompt[0] != asked:
            self._prompt = asked, self._prompt_id(sample)
        return self._prompt[1]

    def _enter(self, sample: Sample, prompt_id: str, line: int) -> bool:
        """Go on to the group of a sample; tell whether the last sample was in another."""
        self.is_guess = sample.group is None and sample.task is None
        if sample.group is not None:
            name: tuple[object, ...] = (sample.step, "group", sample.group)
        elif sample.task is not None:
            name = (sample.step, "task", sample.task, sample.policy_version, prompt_id)
        else:
            name = (sample.step, "guess", prompt_id)
        if name == self._last:
            return False
        if self.is_guess or self._last[:1] != name[:1]:
            self._sizes.clear()  # an earlier group does not go on
        self._last = name
        parts = [self._file_key, *name, *([line] if self.is_guess else ())]
        self._group = "\x1f".join(map(str, parts))
        return True
