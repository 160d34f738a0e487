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
from typing import Any

import pyarrow as pa

from storage.identity import event_id, event_ids, find_table
from storage.importers.parts import Part, Placed, Slice
from storage.importers.samples import Sample, Turn
from storage.importers.tokens import extends

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


def part_rows(part: Part, place: Place, declared: Declared) -> dict[str, list[Row]]:
    """Return the rows of a part by table."""
    made = _Rows(place, declared)
    imports, failures = [], []
    for number, piece in enumerate(part.slices):
        counts = made.add(piece.placed)
        imports.append(_import_row(piece, place, number, declared) | counts)
        failures += _failure_rows(piece, place, number)
    rows = {
        "prompts": list(made.prompts.values()),
        "rollouts": made.rollouts,
        "rollout_tokens": made.tokens,
        "scores": made.score_rows(),
        "imports": imports,
        "failures": failures,
    }
    return {name: found for name, found in rows.items() if found}


def main_scorer(part: Part) -> str | None:
    """Return the name of the first reward column of a part."""
    placed = (one for piece in part.slices for one in piece.placed)
    return next((scorer_name(name) for one in placed for name in one.sample.scores), None)


def scorer_name(column: str) -> str:
    """Return a column's name as a scorer's, which has to have a UTF-8 form."""
    return column.encode("utf-8", "replace").decode() or "?"


class _Rows:
    """The rows of the samples of a part; ids of rollouts that are text are made all at once."""

    def __init__(self, place: Place, declared: Declared) -> None:
        self.prompts: dict[str, Row] = {}
        self.rollouts: list[Row] = []
        self.tokens: list[Row] = []
        self._place = place
        self._declared = declared
        self._constants = _CONSTANTS | {
            "iteration": place.iteration,
            "batch_key": place.batch_key,
        }
        self._groups: dict[str, str] = {}
        self._judged: list[tuple[Sample, str]] = []  # with the id of its rollout
        self._texts: list[tuple[Sample, Row]] = []  # whose rollouts have no id yet

    def add(self, placed: Iterable[Placed]) -> dict[str, int]:
        """Add the rows of samples; return how many rollouts they have, and with log-probs."""
        num_rollouts = num_tokens = 0
        for one in placed:
            sample = one.sample
            if one.prompt_id not in self.prompts:
                self.prompts[one.prompt_id] = _prompt_row(one, self._declared)
            shared = self._shared(one)
            if sample.turns:
                added = self._add_turns(sample, shared)
                num_rollouts, num_tokens = num_rollouts + added[0], num_tokens + added[1]
            else:
                shared.update(_text_facts(sample))
                self.rollouts.append(shared)
                self._texts.append((sample, shared))
                num_rollouts += 1
        return {"num_rollouts": num_rollouts, "num_token_rollouts": num_tokens}

    def score_rows(self) -> list[Row]:
        """Return the rows of the scores of all samples."""
        ids = _rollout_ids([rollout for _, rollout in self._texts], self._place.run_id)
        judged = [
            *self._judged,
            *((sample, i) for (sample, _), i in zip(self._texts, ids, strict=True)),
        ]
        constants = _SCORE_CONSTANTS | {"iteration": self._place.iteration}
        return [row for sample, i in judged for row in _score_rows(sample, i, constants)]

    def _add_turns(self, sample: Sample, shared: Row) -> tuple[int, int]:
        num_rollouts, num_tokens, parent = 0, 0, ""
        for turn, facts in _chained(sample.turns):
            rollout = shared | facts | {"parent_id": parent}
            parent = event_id("rollouts", {**rollout, "run_id": self._place.run_id})
            self.rollouts.append(rollout)
            self.tokens.append(_token_row(turn, self._place, parent))
            if facts["role"] == ROLE:
                self._judged.append((sample, parent))
                num_rollouts += 1
                num_tokens += turn.logprobs is not None
        return num_rollouts, num_tokens

    def _shared(self, placed: Placed) -> Row:
        """Return what all rollouts of a sample have in common."""
        sample, told = placed.sample, self._declared
        version = sample.step if sample.policy_version is None else sample.policy_version
        temperature = told.temperature if sample.temperature is None else sample.temperature
        return {
            **self._constants,
            "prompt_id": placed.prompt_id,
            "sample_index": placed.index,
            "group_id": self._groups.get(placed.group) or self._group_id(placed),
            "policy_version": UNKNOWN_NUMBER if version is None else version,
            "policy_digest": sample.model or UNKNOWN,
            "finish_reason": sample.finish_reason or UNKNOWN,
            "temperature": float(UNKNOWN_NUMBER) if temperature is None else temperature,
            "top_p": float(UNKNOWN_NUMBER) if sample.top_p is None else sample.top_p,
            "max_tokens": UNKNOWN_NUMBER if sample.max_tokens is None else sample.max_tokens,
        }

    def _group_id(self, placed: Placed) -> str:
        name = f"{self._place.run_id}\x1f{placed.group}".encode("utf-8", "replace")
        is_guess = placed.sample.group is None and placed.sample.task is None
        digest = hashlib.sha256(name).hexdigest()[:20]
        self._groups[placed.group] = (GUESSED if is_guess else "g-") + digest
        return self._groups[placed.group]


def _prompt_row(placed: Placed, declared: Declared) -> Row:
    return {
        "prompt_id": placed.prompt_id,
        "task": declared.task,
        "split": declared.split,
        "messages_json": _written(list(placed.sample.messages)),
        "answer": placed.sample.answer,
        "difficulty": "",
        "meta_json": "{}",
    }


_written = json.JSONEncoder(ensure_ascii=False).encode


def _text_facts(sample: Sample) -> Row:
    num_given, num_sampled = sample.num_prompt_tokens, sample.num_completion_tokens
    return {
        "role": ROLE,
        "parent_id": "",
        "num_prompt_tokens": UNKNOWN_NUMBER if num_given is None else num_given,
        "prefix_tokens": 0,
        "num_completion_tokens": UNKNOWN_NUMBER if num_sampled is None else num_sampled,
        "completion": sample.completion,
        "logprob_mode": "none",
    }


def _chained(turns: Sequence[Turn]) -> Iterator[tuple[Turn, Row]]:
    """Yield each turn with its facts: a chain of turns that extend each other is one response.

    All but the last of a chain are earlier turns; what it was given beyond the prompt of the first
    belongs to the response.
    """
    first = turns[0]
    for number, turn in enumerate(turns):
        if number and not extends(turn, turns[number - 1]):
            first = turn
        is_last = number + 1 == len(turns) or not extends(turns[number + 1], turn)
        yield (
            turn,
            {
                "role": ROLE if is_last else TURN_ROLE,
                "num_prompt_tokens": len(turn.prompt_ids),
                "prefix_tokens": len(turn.prompt_ids) - len(first.prompt_ids),
                "num_completion_tokens": len(turn.completion_ids),
                "completion": turn.text,
                "logprob_mode": "none" if turn.logprobs is None else "imported",
            },
        )


def _token_row(turn: Turn, place: Place, rollout_id: str) -> Row:
    return {
        "iteration": place.iteration,
        "rollout_id": rollout_id,
        "prompt_ids": turn.prompt_ids,
        "completion_ids": turn.completion_ids,
        "sampler_logprobs": turn.logprobs,
        "logprobs_reason": turn.reason,
    }


def _score_rows(sample: Sample, rollout_id: str, constants: Row) -> Iterator[Row]:
    """Yield a row for each reward column of a sample."""
    parts = sample.parts
    for name, written in sample.scores.items():
        value = value_of(written)
        components = parts
        if not isinstance(written, float) or value is None:
            components = {**parts, AS_WRITTEN: written}
        yield {
            **constants,
            "target_id": rollout_id,
            "scorer": scorer_name(name),
            "value": value,
            "status": "unscorable" if value is None else "ok",
            "components_json": _json(components) if components else "{}",
        }
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


def _rollout_ids(rollouts: Sequence[Row], run_id: str) -> list[str]:
    """Return the event ids of rollouts, all at once."""
    table = find_table("rollouts")
    places = [column for column in table.columns if column.place]
    values = [
        [run_id] * len(rollouts)
        if column.name == "run_id"
        else [rollout[column.name] for rollout in rollouts]
        for column in places
    ]
    schema = pa.schema([column.arrow_field for column in places])
    return event_ids(table, pa.table(values, schema=schema)) if rollouts else []
