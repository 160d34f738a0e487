"""The rollouts that a page holds, with all the log says of them, as columns of JSON.

The page has a size it may not exceed, so it holds at most so many rollouts, and of a long one the
first characters and tokens; it says of both how many there are.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rrl_core.replay.outcomes import is_success
from rrl_core.spans import sampled_mask
from storage import Moment

Row = dict[str, Any]

MAX_CHARACTERS = 16_000_000  # of all completions; and of all prompts
MAX_TOKENS = 2_000_000  # of all completions
MOST_CHARACTERS = 20_000  # of one
MOST_TOKENS = 4_096
LEAST_LOGPROB = -99.0  # smaller ones look the same
_FACTS = (
    "iteration", "role", "prompt_id", "parent_id", "policy_version", "prefix_tokens",
    "num_completion_tokens", "finish_reason", "status", "error", "temperature", "arm",
)  # fmt: skip
_CHOSEN = ("run_id", "source_run_id", "why", "reward")


@dataclass(frozen=True)
class Limits:
    """The most characters and tokens shown of one rollout."""

    characters: int
    tokens: int


@dataclass(frozen=True)
class Browsable:
    """What the page's script gets, and how many rollouts it is of how many."""

    data: Row
    num_rollouts: int
    num_shown: int
    why: dict[str, int]
    num_cut: int
    limits: Limits
    vocabulary: dict[str, set[int]]  # token ids by run


def browsable(moment: Moment, run_ids: Sequence[str], num_rollouts: int) -> Browsable:
    """Choose rollouts of the runs, in equal shares, and read what is known of them.

    Args:
        moment: the store as of a commit.
        run_ids: the runs.
        num_rollouts: the most rollouts on the page.
    """
    share = max(1, num_rollouts // len(run_ids))
    chosen = [
        row
        for run_id in run_ids
        for row in moment.read("rollout_sample", arguments={"run": run_id, "num": share})
    ]
    total = sum({row["run_id"]: row["num_rollouts"] for row in chosen}.values())
    limits = Limits(
        min(MOST_CHARACTERS, MAX_CHARACTERS // max(1, len(chosen))),
        min(MOST_TOKENS, MAX_TOKENS // max(1, len(chosen))),
    )
    ids = {row["rollout_id"] for row in chosen}
    sampled = {r["event_id"]: r for r in moment.read("rollouts", among={"event_id": ids})}
    chosen = [row for row in chosen if row["rollout_id"] in sampled]
    chosen.sort(key=lambda row: _order(sampled[row["rollout_id"]]))
    tokens, vocabulary = _tokens(moment, chosen, limits.tokens)
    texts = [sampled[row["rollout_id"]]["completion"] for row in chosen]
    data = {
        "ids": [row["rollout_id"] for row in chosen],
        **{name: [row[name] for row in chosen] for name in _CHOSEN},
        **{name: [sampled[row["rollout_id"]][name] for row in chosen] for name in _FACTS},
        "text": [text[: limits.characters] for text in texts],
        "cut": [max(0, len(text) - limits.characters) for text in texts],
        "outcome": [_outcome(row, sampled[row["rollout_id"]]) for row in chosen],
        "tokens": tokens,
        "prompts": _prompts(moment, chosen, sampled),
        "scores": _scores(moment, ids),
        **_uses(moment, run_ids, ids),
        **_kin(moment, sampled),
        "reviews": _reviews(moment, ids),
    }
    why = {kind: sum(row["why"] == kind for row in chosen) for kind in {r["why"] for r in chosen}}
    num_cut = sum(
        len(text) > limits.characters
        or sampled[row["rollout_id"]]["num_completion_tokens"] > limits.tokens
        for row, text in zip(chosen, texts, strict=True)
    )
    return Browsable(data, total, len(chosen), why, num_cut, limits, vocabulary)


def role_name(role: str, arm: str | None) -> str:
    """Return how a role is called on the page; a control by its arm."""
    return f"{role}: {arm}" if arm else role


def _order(row: Row) -> tuple[Any, ...]:
    """Newest iteration first, then what belongs together."""
    return (-row["iteration"], row["role"], row["prompt_id"], row["parent_id"], row["sample_index"])


def _outcome(chosen: Row, sampled: Row) -> str:
    if sampled["status"] != "ok":
        return "error"
    if chosen["reward"] is None:
        return "unscored"
    return "solved" if is_success(chosen["reward"]) else "failed"


def _tokens(
    moment: Moment, chosen: Sequence[Row], most: int
) -> tuple[list[Row | None], dict[str, set[int]]]:
    """Return ids and log-probs (hundredths of a nat) of each rollout, and the ids by run."""
    columns = (
        "rollout_id", "completion_ids", "sampler_logprobs", "logprobs_reason", "sampled_bounds"
    )  # fmt: skip
    ids = {row["rollout_id"] for row in chosen}
    found: dict[str, Row] = {}
    for row in moment.read("rollout_tokens", among={"rollout_id": ids}, columns=columns):
        found[row["rollout_id"]] = {
            "ids": row["completion_ids"][:most],
            "logprobs": _shown_logprobs(row, most),
            "reason": row["logprobs_reason"],
        }
    vocabulary: dict[str, set[int]] = defaultdict(set)
    for row in chosen:
        vocabulary[row["source_run_id"]].update(found.get(row["rollout_id"], {}).get("ids", ()))
    return [found.get(row["rollout_id"]) for row in chosen], dict(vocabulary)


def _shown_logprobs(tokens: Row, most: int) -> list[int | None] | None:
    """Return the log-probs of the first tokens, None for one that was given between two turns."""
    if tokens["sampler_logprobs"] is None:
        return None
    logprobs = tokens["sampler_logprobs"][:most]
    mask = sampled_mask(tokens["sampled_bounds"], len(logprobs)) or (True,) * len(logprobs)
    pairs = zip(logprobs, mask, strict=True)
    return [_hundredths(logprob) if is_sampled else None for logprob, is_sampled in pairs]


def _hundredths(logprob: float) -> int:
    return round(100 * max(logprob, LEAST_LOGPROB))


def _prompts(moment: Moment, chosen: Sequence[Row], sampled: dict[str, Row]) -> dict[str, Row]:
    ids = {sampled[row["rollout_id"]]["prompt_id"] for row in chosen}
    most = min(MOST_CHARACTERS, MAX_CHARACTERS // max(1, len(ids)))
    found = {}
    for row in moment.read("prompts", among={"prompt_id": ids}):
        messages = json.loads(row["messages_json"])
        found[row["prompt_id"]] = {
            "messages": [[str(m["role"]), str(m["content"])[:most]] for m in messages],
            "answer": row["answer"],
            "difficulty": row["difficulty"],
            "task": row["task"],
        }
    return found


def _scores(moment: Moment, ids: Iterable[str]) -> dict[str, list[list[Any]]]:
    """Return the judgements of each rollout, in the order they were made."""
    columns = (
        "target_id", "run_id", "iteration", "scorer", "scorer_version", "kind", "value", "status",
        "feedback",
    )  # fmt: skip
    return _listed(moment.read("scores", among={"target_id": set(ids)}, columns=columns), columns)


def _uses(moment: Moment, run_ids: Sequence[str], ids: set[str]) -> dict[str, Any]:
    """Return the steps each rollout was planned into, and the picks of it or a state of it."""
    distilled = {
        row["event_id"]: row["rollout_id"]
        for row in moment.read("distillations", among={"rollout_id": ids})
    }
    columns = (
        "rollout_id", "run_id", "iteration", "step", "unit", "state", "age", "reward", "advantage",
        "num_loss_tokens", "importance_mean",
    )  # fmt: skip
    planned = moment.read(
        "replay_audit", among={"rollout_id": ids | distilled.keys(), "run_id": run_ids},
        columns=columns,
    )  # fmt: skip
    for row in planned:
        row["rollout_id"] = distilled.get(row["rollout_id"], row["rollout_id"])
    picked = ("rollout_id", "run_id", "iteration", "unit", "prefix_tokens", "value", "probability",
              "entry_id")  # fmt: skip
    picks = moment.read("picks", among={"rollout_id": ids, "run_id": run_ids}, columns=picked)
    return {"steps": _listed(planned, columns), "picks": _listed(picks, picked)}


def _kin(moment: Moment, sampled: dict[str, Row]) -> dict[str, Any]:
    """Return what answers or continues each rollout, and the state a continuation began from."""
    cut_at = {row["parent_id"] for row in sampled.values() if row["parent_id"].startswith("st")}
    columns = ("event_id", "rollout_id", "prefix_tokens", "cut")
    states = moment.read("states", among={"event_id": cut_at}, columns=columns)
    picked = moment.read(
        "picks", among={"rollout_id": sampled.keys()}, columns=("entry_id", "rollout_id")
    )
    owner = {row["entry_id"]: row["rollout_id"] for row in picked} | {i: i for i in sampled}
    of_child = ("parent_id", "event_id", "role", "iteration")
    children = moment.read("rollouts", among={"parent_id": owner.keys()}, columns=of_child)
    for row in children:
        row["parent_id"] = owner[row["parent_id"]]
    return {"states": {r["event_id"]: [r[c] for c in columns[1:]] for r in states},
            "children": _listed(children, of_child)}  # fmt: skip


def _reviews(moment: Moment, ids: Iterable[str]) -> dict[str, list[list[Any]]]:
    columns = ("rollout_id", "status", "leak", "what_went_wrong", "what_to_do", "memory_json")
    return _listed(moment.read("reviews", among={"rollout_id": set(ids)}, columns=columns), columns)


def _listed(rows: Iterable[Row], columns: Sequence[str]) -> dict[str, list[list[Any]]]:
    """Return rows as lists without their first column, by that column."""
    found: dict[str, list[list[Any]]] = defaultdict(list)
    for row in rows:
        found[row[columns[0]]].append([_short(row[name]) for name in columns[1:]])
    return found


def _short(value: Any) -> Any:
    """Return a float with five digits: a page is looked at."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
