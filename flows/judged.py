"""Rollouts judged with what the log knows of them: their length, and how new they are.

A scorer sees one completion, whatever stands beside it in a batch. What depends on others is a fact
of the log, read here and handed to it: an attempt is compared with the rest of its group, and with
the attempts at the same prompt in earlier iterations of its run and of the runs this was forked
from. Those never change any more, so novelty is the same whenever and by whomever it is asked for:
in a resumed run, in a fork, and by `rrl rescore`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.lineage import lineage_of
from rrl_core.exploration import shingle_novelty, shingles
from rrl_core.tasks.protocol import FactScorer, Judgement, Prompt, RolloutFacts, Scorer, Task
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import judge_all
from rrl_core.tasks.shaping import Shaping, shaped_task
from storage import Store

if TYPE_CHECKING:
    from flows.config import RunConfig

COMPARED_ROLES = ("attempt", "retry")  # whole answers to the prompt as it stands
MAX_HISTORY = 64  # attempts at a prompt, the newest, that novelty looks back on

Row = dict[str, Any]


def configured_task(config: "RunConfig") -> Task:
    """Return the task of a configuration, its reward shaped as the configuration says.

    Raises:
        TaskError: no such task or parameter, or data not as expected.
    """
    task = build_task(config.task.name, config.task.params)
    return shaped_task(task, Shaping(**config.reward.model_dump()))


class RolloutFactsReader:
    """Reads what scorers have to know of committed rollouts; what it read of a run it keeps.

    A group that is still being sampled when its run is first asked for is compared with what there
    is of it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._attempts: dict[str, dict[str, list[Row]]] = {}  # by run and prompt, in order
        self._shingles: dict[str, frozenset[str]] = {}  # by rollout

    def read(self, scorer: Scorer, rollouts: Sequence[Row]) -> list[RolloutFacts] | None:
        """Return what `scorer` has to know of rollouts; None where it asks for nothing."""
        if not isinstance(scorer, FactScorer):
            return None
        return [
            RolloutFacts(
                *_length(row), novelty=self._novelty(row) if scorer.needs_novelty else None
            )
            for row in rollouts
        ]

    def _novelty(self, row: Row) -> float | None:
        if row["role"] not in COMPARED_ROLES:
            return None
        others = [other for other in self._of_prompt(row) if other["event_id"] != row["event_id"]]
        group = [other for other in others if other["group_id"] == row["group_id"]]
        earlier = [other for other in others if other["iteration"] < row["iteration"]]
        compared = [*group, *earlier[-MAX_HISTORY:]]
        return shingle_novelty(self._shingled(row), map(self._shingled, compared))

    def _of_prompt(self, row: Row) -> list[Row]:
        """Return the attempts at a rollout's prompt that its run knows, oldest first."""
        run_id = row["run_id"]
        if run_id not in self._attempts:
            found: dict[str, list[Row]] = {}
            for other in lineage_of(self._store, run_id).read(self._store, "rollouts"):
                if other["role"] in COMPARED_ROLES and other["status"] == "ok":
                    found.setdefault(other["prompt_id"], []).append(other)
            for attempts in found.values():
                attempts.sort(key=lambda a: (a["iteration"], a["role"], a["sample_index"]))
            self._attempts[run_id] = found
        return self._attempts[run_id].get(row["prompt_id"], [])

    def _shingled(self, row: Row) -> frozenset[str]:
        if row["event_id"] not in self._shingles:
            self._shingles[row["event_id"]] = shingles(row["completion"])
        return self._shingles[row["event_id"]]


def _length(row: Row) -> tuple[int | None, int | None]:
    """Return a response's tokens and their limit; None for what an imported file does not tell."""
    sampled, limit = row["num_completion_tokens"], row["max_tokens"]
    return row["prefix_tokens"] + sampled if sampled >= 0 else None, limit if limit >= 0 else None


def judge_rollouts(
    store: Store, scorer: Scorer, prompts: Sequence[Prompt], rollouts: Sequence[Row]
) -> list[Judgement]:
    """Judge committed rollouts; `prompts` are theirs, in order."""
    completions = [row["completion"] for row in rollouts]
    return judge_all(scorer, prompts, completions, RolloutFactsReader(store).read(scorer, rollouts))
