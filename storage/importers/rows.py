"""The rows of a part of an import.

Our choices, where a column must not be NULL and the file says nothing: -1 for a number, `unknown`
for a text. A policy version is the file's, else its step. What a model is called stands for its
digest. Rewards keep how they were written in `components_json` as `as_written`, unless they are
plain floats; a reward that is no finite number is `unscorable`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from storage.identity import event_id, event_ids, find_table
from storage.importers.parts import Part, Placed, Slice
from storage.importers.samples import Sample, Turn
from storage.importers.tokens import extends
from storage.rows import Columns

Row = dict[str, Any]

UNKNOWN, UNKNOWN_NUMBER = "unknown", -1
ROLE, TURN_ROLE = "imported", "imported_turn"
ENGINE = "imported"
SCORER_VERSION = "imported"
AS_WRITTEN = "as_written"
GUESSED = "guessed-"

_CONSTANTS = {
    "attempt": 0, "status": "ok", "error": None, "top_k": UNKNOWN_NUMBER, "seed": UNKNOWN_NUMBER,
    "engine": ENGINE, "sync": UNKNOWN, "generate_s": 0.0, "arm": None,
}  # fmt: skip
_SCORE_CONSTANTS = {
    "scorer_version": SCORER_VERSION, "attempt": 0, "target_kind": "rollout", "kind": "reward",
    "feedback": "", "elapsed_ms": 0.0, "signature": None,
}  # fmt: skip


@dataclass(frozen=True)
class Declared:
    """What the importer was told about all files: whose rollouts they are."""

    format: str
    task: str
    split: str
    temperature: float | None
    base_digest: str | None


@dataclass(frozen=True)
class Place:
    """Where the rows of a part are written."""

    run_id: str
    iteration: int

    @property
    def batch_key(self) -> str:
        """Name of the part as a unit of work."""
        return f"part-{self.iteration:06d}"


def part_rows(part: Part, place: Place, declared: Declared) -> dict[str, list[Row] | Columns]:
    """Return the rows of a part by table, those of the large ones by column."""
    placed: list[Placed] = []
    rollouts: list[_Rollout] = []
    imports, failures = [], []
    for number, piece in enumerate(part.slices):
        made = [rollout for one in piece.placed for rollout in _rollouts(one, place)]
        imports.append(_import_row(piece, place, number, declared) | _num_rollouts(made))
        failures += _failure_rows(piece, place, number)
        placed += piece.placed
        rollouts += made
    columns = _rollout_columns(rollouts, place, declared)
    ids = _rollout_ids(columns, place)
    rows: dict[str, list[Row] | Columns] = {
        "prompts": _prompts(placed, declared),
        "rollouts": columns,
        "rollout_tokens": _tokens(rollouts, ids, place),
        "scores": _scores(rollouts, ids, place),
        "imports": imports,
        "failures": failures,
    }
    return {name: found for name, found in rows.items() if len(found)}


def main_scorer(part: Part) -> str | None:
    """Return the name of the first reward column of a part."""
    placed = (one for piece in part.slices for one in piece.placed)
    return next((scorer_name(name) for one in placed for name in one.sample.scores), None)


@lru_cache(1_000)
def scorer_name(column: str) -> str:
    """Return a column's name as a scorer's, which has to have a UTF-8 form."""
    return column.encode("utf-8", "replace").decode() or "?"


def _prompts(placed: Iterable[Placed], declared: Declared) -> Columns:
    """Return the prompts, each as the first of its samples has it."""
    first: dict[str, Sample] = {}
    for one in placed:
        first.setdefault(one.prompt_id, one.sample)
    return Columns(
        {
            "prompt_id": list(first),
            "messages_json": [_written(list(sample.messages)) for sample in first.values()],
            "answer": [sample.answer for sample in first.values()],
        },
        {"task": declared.task, "split": declared.split, "difficulty": "", "meta_json": "{}"},
    )


_written = json.JSONEncoder(ensure_ascii=False).encode


class _Rollout(NamedTuple):
    """A rollout of a sample, and what the other ones of the sample do not share; text has no turn.

    From `role` on the names are those of the columns.
    """

    placed: Placed
    turn: Turn | None
    role: str
    parent_id: str
    num_prompt_tokens: int
    prefix_tokens: int
    num_completion_tokens: int
    completion: str
    logprob_mode: str


def _rollouts(placed: Placed, place: Place) -> list[_Rollout]:
    """Return the rollouts of a sample, one for each turn."""
    sample = placed.sample
    if sample.turns:
        return _chained(placed, place)
    given, sampled = sample.num_prompt_tokens, sample.num_completion_tokens
    return [
        _Rollout(
            placed, None, ROLE, "", _known(given), 0, _known(sampled), sample.completion, "none"
        )
    ]


def _known(number: Any) -> Any:
    return UNKNOWN_NUMBER if number is None else number


def _chained(placed: Placed, place: Place) -> list[_Rollout]:
    """Return the rollouts of turns: a chain of turns that extend each other is one response.

    All but the last of a chain are earlier turns; what it was given beyond the prompt of the first
    belongs to the response.
    """
    turns, parent_id = placed.sample.turns, ""
    first, rollouts = turns[0], []
    for number, turn in enumerate(turns):
        if number and not extends(turn, turns[number - 1]):
            first = turn
        is_last = number + 1 == len(turns) or not extends(turns[number + 1], turn)
        rollout = _Rollout(
            placed,
            turn,
            role=ROLE if is_last else TURN_ROLE,
            parent_id=parent_id,
            num_prompt_tokens=len(turn.prompt_ids),
            prefix_tokens=len(turn.prompt_ids) - len(first.prompt_ids),
            num_completion_tokens=len(turn.completion_ids),
            completion=turn.text,
            logprob_mode="none" if turn.logprobs is None else "imported",
        )
        rollouts.append(rollout)
        parent_id = event_id("rollouts", _rollout_place(rollout, place))
    return rollouts


def _rollout_place(rollout: _Rollout, place: Place) -> Row:
    return {
        "run_id": place.run_id,
        "iteration": place.iteration,
        "role": rollout.role,
        "prompt_id": rollout.placed.prompt_id,
        "sample_index": rollout.placed.index,
        "parent_id": rollout.parent_id,
        "attempt": _CONSTANTS["attempt"],
    }


def _num_rollouts(rollouts: Iterable[_Rollout]) -> dict[str, int]:
    """Return how many responses there are, and how many of them with log-probs."""
    modes = [rollout.logprob_mode for rollout in rollouts if rollout.role == ROLE]
    return {"num_rollouts": len(modes), "num_token_rollouts": modes.count("imported")}


def _rollout_columns(rollouts: Sequence[_Rollout], place: Place, declared: Declared) -> Columns:
    placed = [rollout.placed for rollout in rollouts]
    samples = [one.sample for one in placed]
    versions = [s.step if s.policy_version is None else s.policy_version for s in samples]
    told = _known(declared.temperature)
    group_ids = _group_ids(placed, place)
    return Columns(
        {
            "prompt_id": [one.prompt_id for one in placed],
            "sample_index": [one.index for one in placed],
            "group_id": [group_ids[one.group] for one in placed],
            "policy_version": [_known(version) for version in versions],
            "policy_digest": [s.model or UNKNOWN for s in samples],
            "finish_reason": [s.finish_reason or UNKNOWN for s in samples],
            "temperature": [told if s.temperature is None else s.temperature for s in samples],
            "top_p": [_known(s.top_p) for s in samples],
            "max_tokens": [_known(s.max_tokens) for s in samples],
            **_by_column(_Rollout._fields[2:], [rollout[2:] for rollout in rollouts]),
        },
        _CONSTANTS | {"iteration": place.iteration, "batch_key": place.batch_key},
    )


def _group_ids(placed: Iterable[Placed], place: Place) -> dict[str, str]:
    """Return the ids of groups by their names."""
    ids: dict[str, str] = {}
    for one in placed:
        if one.group not in ids:
            name = f"{place.run_id}\x1f{one.group}".encode("utf-8", "replace")
            is_guess = one.sample.group is None and one.sample.task is None
            ids[one.group] = (GUESSED if is_guess else "g-") + hashlib.sha256(name).hexdigest()[:20]
    return ids


def _by_column(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}


def _tokens(rollouts: Sequence[_Rollout], ids: Sequence[str], place: Place) -> Columns:
    of_turns = [(rollout.turn, i) for rollout, i in zip(rollouts, ids, strict=True) if rollout.turn]
    turns = [turn for turn, _ in of_turns]
    return Columns(
        {
            "rollout_id": [i for _, i in of_turns],
            "prompt_ids": [turn.prompt_ids for turn in turns],
            "completion_ids": [turn.completion_ids for turn in turns],
            "sampler_logprobs": [turn.logprobs for turn in turns],
            "logprobs_reason": [turn.reason for turn in turns],
        },
        {"iteration": place.iteration},
    )


def _scores(rollouts: Sequence[_Rollout], ids: Sequence[str], place: Place) -> Columns:
    """Return a row for each reward column of a response."""
    names = ("target_id", "scorer", "value", "status", "components_json")
    judged = [
        (i, *judgement)
        for rollout, i in zip(rollouts, ids, strict=True)
        if rollout.role == ROLE
        for judgement in _judgements(rollout.placed.sample)
    ]
    return Columns(_by_column(names, judged), _SCORE_CONSTANTS | {"iteration": place.iteration})


def _judgements(sample: Sample) -> Iterator[tuple[str, float | None, str, str]]:
    """Yield name, value, status and components of each reward column of a sample."""
    parts = sample.parts
    for name, written in sample.scores.items():
        value = value_of(written)
        components = parts
        if not isinstance(written, float) or value is None:
            components = {**parts, AS_WRITTEN: written}
        status = "unscorable" if value is None else "ok"
        yield scorer_name(name), value, status, _json(components) if components else "{}"
        parts = {}


def value_of(written: Any) -> float | None:
    """Return the number that a reward column holds; True and False, also as text, are 1 and 0."""
    if isinstance(written, bool) or written in ("True", "False"):
        return float(written in (True, "True"))
    if not isinstance(written, int | float):
        return None
    try:
        return float(written) if math.isfinite(written) else None
    except OverflowError:
        return None


def _json(components: Mapping[str, Any]) -> str:
    """Return components as JSON; what JSON has no number for is written as text."""
    try:
        return json.dumps(components, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        return json.dumps(dict.fromkeys(components, "nested too deep"))
    except ValueError:
        with_texts = json.loads(json.dumps(components), parse_constant=str)
        return json.dumps(with_texts, ensure_ascii=False)


def _import_row(piece: Slice, place: Place, number: int, declared: Declared) -> Row:
    return {
        "iteration": place.iteration,
        "number": number,
        "path": printable_path(piece),
        "format": declared.format,
        "sha256": piece.sha256,
        "position": piece.position,
        "first_line": piece.first_line,
        "num_lines": piece.num_lines,
        "num_failures": sum(problem.num_lines for problem in piece.problems.values()),
        "num_guessed_groups": piece.num_guessed_groups,
        "base_digest": declared.base_digest,
    }


def printable_path(piece: Slice) -> str:
    """Return the path of a slice's file as text that can be stored."""
    return str(piece.path.absolute()).encode("utf-8", "backslashreplace").decode()


def _failure_rows(piece: Slice, place: Place, number: int) -> list[Row]:
    """Return one `failures` row for each way in which lines became no rollout."""
    return [
        {
            "iteration": place.iteration,
            "phase": "import",
            "subject": f"{place.batch_key}/{number}/{kind}",
            "attempt": 0,
            "kind": kind,
            "message": problem_text(piece, kind),
        }
        for kind in sorted(piece.problems)
    ]


def problem_text(piece: Slice, kind: str) -> str:
    """Return which lines of a slice became no rollout, and why."""
    problem = piece.problems[kind]
    more = ", ..." if problem.num_lines > len(problem.lines) else ""
    lines = f"line{'s' * (problem.num_lines > 1)} {', '.join(map(str, problem.lines))}{more}"
    return (
        f"{problem.num_lines} of {piece.num_lines} lines of {printable_path(piece)} were left out "
        f"({lines}): {problem.message}"
    )


def _rollout_ids(rollouts: Columns, place: Place) -> list[str]:
    """Return the event ids of rollouts, all at once."""
    if not len(rollouts):
        return []
    table = find_table("rollouts")
    places = [column for column in table.columns if column.place]
    same = {**rollouts.same, "run_id": place.run_id}
    values = [
        rollouts.values[c.name] if c.name in rollouts.values else [same[c.name]] * len(rollouts)
        for c in places
    ]
    schema = pa.schema([column.arrow_field for column in places])
    return event_ids(table, pa.table(values, schema=schema))
