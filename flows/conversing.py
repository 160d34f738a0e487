"""Rollouts of several turns: an episode is one rollout, and here rows of the log become its start.

Whatever answers a prompt has the task's environment, where it has one: attempts, continuations,
retries, second attempts, controls and evaluations. A review is a single completion. How an episode
goes on is told in `rrl_core/sampling/episodes.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import storage
from flows.translate import Row, stored_turn
from flows.wiring import Session
from rrl_core.sampling.episodes import Start, play
from rrl_core.sampling.protocol import Completion, OnFinished, Turn
from rrl_core.tasks.protocol import environment_of
from storage import Store

if TYPE_CHECKING:
    from flows.generation import Phase, PlannedRollout


def sample(
    session: Session,
    phase: "Phase",
    planned: Sequence["PlannedRollout"],
    on_finished: OnFinished | None = None,
) -> list[Completion]:
    """Return what was sampled of each rollout: a completion, or a whole episode.

    `on_finished` is told of single completions as they come; episodes come all at once.

    Raises:
        SamplerError: the engine as a whole failed; nothing was kept.
    """
    environment = environment_of(session.task)
    if environment is None or not phase.has_turns:
        return session.sampler.generate([p.request for p in planned], phase.params, on_finished)
    starts = [
        Start(
            p.group.prompt,
            p.group.prompt.messages if p.group.messages is None else p.group.messages,
            p.request,
            p.group.turns,
        )
        for p in planned
    ]
    return play(starts, session.sampler, session.policy, environment, phase.params)


def given_turns(
    store: Store, tokens: Mapping[str, Row], prefixes: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], tuple[Turn, ...]]:
    """Return the turns that the first tokens of episodes hold; the last may be cut in its middle.

    What has no rows in `turns`, such as an imported response, is one turn of the policy's.

    Args:
        store: the store.
        tokens: rows of `rollout_tokens`, by rollout id.
        prefixes: rollout ids with the number of tokens that are given.

    Returns:
        The turns of each of `prefixes`.
    """
    ids = [event_id for row in tokens.values() for event_id in _turn_ids(row)]
    turns: dict[str, list[Turn]] = {rollout_id: [] for rollout_id in tokens}
    rows = store.read("turns", event_ids=ids) if ids else []
    for row in sorted(rows, key=lambda row: int(row["turn"])):
        turns[row["rollout_id"]].append(stored_turn(row))
    return {
        (i, given): _cut(turns[i] or [Turn("assistant", 0, given, (), "stop")], given)
        for i, given in prefixes
    }


def _turn_ids(tokens: Row) -> list[str]:
    """Return the ids of an episode's turns: what was sampled and what was given take turns."""
    bounds = tokens["sampled_bounds"]
    num_turns = 1 if bounds is None else len(bounds) - 1 + (bounds[0] > 0)
    return [storage.event_id("turns", {**tokens, "turn": number}) for number in range(num_turns)]


def _cut(turns: Sequence[Turn], num_tokens: int) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            turn.speaker, turn.first_token, min(turn.num_tokens, num_tokens - turn.first_token),
            turn.messages, turn.status, turn.policy_version,
        )
        for turn in turns
        if turn.first_token < num_tokens
    )  # fmt: skip
