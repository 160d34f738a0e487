"""Rollouts as training data for others: prompt, completion, reward.

Invariant: a completion goes out as the text it is; nothing is executed, and nothing read beyond the
commit that was asked about.
"""

from collections.abc import Iterator
from typing import Any

from storage.answers import printable
from storage.console import selected_ids
from storage.errors import QueryError
from storage.identity import event_id
from storage.store import Store

COLUMN = "rollout_id"
_ROWS_AT_ONCE = 1_024


def sft_examples(
    store: Store, query: str, as_of: int | None = None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (fraction done, example) of each rollout that a query names, in the order of their ids.

    An example holds prompt_id, messages_json, completion, and reward: by the newest reward scorer
    of the run that sampled it, NULL where it has not judged it. That of an episode of several turns
    has turns_json too: what was said after the prompt, a list of lists of messages; its completion
    is the transcript.

    Args:
        store: the store.
        query: one SELECT with the one column rollout_id.
        as_of: commit number; None is the newest.

    Raises:
        QueryError: the query is wrong, or names what is no answer to a prompt: no rollout with a
            completion, or a review.
        DamagedError: a segment it reads is missing or was changed.
    """
    number = store.number(as_of)
    ids = selected_ids(store, query, COLUMN, as_of=number)
    if not ids:
        raise QueryError("expected a query that names rollouts, came one that selects nothing")
    rewards = _rewards(store, set(ids), number)
    if len(rewards) < len(ids):
        unknown = printable(next(i for i in ids if i not in rewards))
        raise QueryError(
            f"the query names {len(ids) - len(rewards)} ids that are no rollouts with a completion "
            f"as of commit {number}, or reviews, which answer no prompt, the first `{unknown}`; "
            f"name `event_id` of `rollouts` whose status is ok, as {COLUMN}"
        )
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        chunk = ids[first : first + _ROWS_AT_ONCE]
        rows = store.read("rollouts", event_ids=chunk, as_of=number)
        places = {row["event_id"]: event_id("prompts", row) for row in rows}
        prompts = store.read("prompts", event_ids=places.values(), as_of=number)
        messages = {prompt["event_id"]: prompt["messages_json"] for prompt in prompts}
        turns = _turns(store, [row["event_id"] for row in rows if row["ending"]], number)
        for row in sorted(rows, key=lambda row: str(row["event_id"])):
            example = {
                "prompt_id": row["prompt_id"],
                "messages_json": messages[places[row["event_id"]]],
                "completion": row["completion"],
                "reward": rewards[row["event_id"]],
            } | turns.get(row["event_id"], {})
            yield (first + len(chunk)) / len(ids), example


def _turns(store: Store, episodes: list[str], as_of: int) -> dict[str, dict[str, str]]:
    """Return the column turns_json of each episode."""
    if not episodes:
        return {}
    query = """
        select turn.rollout_id, '[' || string_agg(turn.messages_json, ',' order by turn.turn) || ']'
        from turns as turn
        where turn.rollout_id in (select unnest($episodes::text[]))
        group by turn.rollout_id
    """
    found = store.sql(query, {"episodes": episodes}, as_of).fetchall()
    return {rollout_id: {"turns_json": said} for rollout_id, said in found}


def _rewards(store: Store, ids: set[str], as_of: int) -> dict[str, float | None]:
    """Return the reward of each of the rollouts that there is; reviews are left out."""
    query = """
        select judged.rollout_id, judged.reward
        from judged_rollouts as judged
        join rollouts as rollout on rollout.event_id = judged.rollout_id
        where rollout.role <> 'review' and rollout.arm is distinct from 'no_memory_review'
    """
    found: dict[str, float | None] = {}
    for batch in store.batches(query, as_of=as_of):
        columns = (batch.column(name).to_pylist() for name in ("rollout_id", "reward"))
        found |= {i: reward for i, reward in zip(*columns, strict=True) if i in ids}
    return found
