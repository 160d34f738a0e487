"""Judges completions while others are still being generated.

Which scores come out does not depend on what was begun early: the pool only saves the time.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rrl_core.tasks.protocol import (
    FactScorer,
    Judgement,
    ParallelScorer,
    Prompt,
    RolloutFacts,
    Scorer,
)
from rrl_core.tasks.scorers import judge_one, judge_with_facts


@dataclass(frozen=True)
class Asked:
    """A completion to be judged; `key` names it."""

    key: str
    prompt: Prompt
    completion: str


class ScoringPool:
    """The judgements of a task's scorers, begun as completions come and collected in order.

    Scorers that wait for child processes are asked from threads. The others take microseconds, and
    are asked when their scores are wanted.
    """

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._threads = {
            scorer.name: (scorer, ThreadPoolExecutor(scorer.num_parallel, "score"))
            for scorer in scorers
            if isinstance(scorer, ParallelScorer)
        }
        self._begun: dict[tuple[str, str], tuple[Asked, Future[Judgement]]] = {}

    @property
    def has_waiting_scorers(self) -> bool:
        """Whether there is anything to gain by `begin`."""
        return bool(self._threads)

    def begin(self, asked: Asked) -> None:
        """Begin to judge a completion by every scorer that waits; returns at once."""
        for name in self._threads:
            self._submit(name, asked)

    def judge(
        self, scorer: Scorer, asked: Sequence[Asked], facts: Sequence[RolloutFacts] | None = None
    ) -> list[Judgement]:
        """Return the judgement of each completion, in order; what was not begun is begun now.

        What was begun under the same key for another prompt or completion is not used. `facts` are
        as `judge_all` takes them. Judgements are kept until `forget`: an outcome is also shaped.
        """
        if isinstance(scorer, FactScorer):
            texts = [one.completion for one in asked]
            return judge_with_facts(scorer, self.judge(scorer.outcome, asked), texts, facts)
        if scorer.name not in self._threads:
            return [judge_one(scorer, one.prompt, one.completion) for one in asked]
        for one in asked:
            begun = self._begun.get((scorer.name, one.key))
            if begun is None or begun[0] != one:
                self._submit(scorer.name, one)
        return [self._begun[scorer.name, one.key][1].result() for one in asked]

    def forget(self) -> None:
        """Drop what was begun; what is being judged goes on to its end, and is not kept."""
        for _, judgement in self._begun.values():
            judgement.cancel()
        self._begun.clear()

    def close(self) -> None:
        """Drop everything, without waiting for it."""
        self.forget()
        for _, threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, name: str, asked: Asked) -> None:
        scorer, threads = self._threads[name]
        judgement = threads.submit(judge_one, scorer, asked.prompt, asked.completion)
        self._begun[name, asked.key] = (asked, judgement)
