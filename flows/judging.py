"""Judges of history by name: a reward, a language model, or a value model, behind one protocol."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from flows.config import load_config
from flows.judged import RolloutFactsReader, configured_task
from flows.translate import Row, score_row, stored_prompt
from rrl_core.tasks.judge import JudgeScorer, load_judge
from rrl_core.tasks.protocol import Scorer
from rrl_core.tasks.scorers import BUILT_IN, load_reward, score_all
from storage import Store
from storage.slices import ShardRows

Kind = Literal["reward", "value", "judge"]
TargetKind = Literal["rollout", "state"]


@dataclass(frozen=True)
class ShardPlace:
    """Where the judgements of a shard are written: the stream, and the shard as its iteration."""

    run_id: str
    iteration: int


@dataclass
class Judged:
    """The rows a shard gives: `scores`, new `states`; `skipped` rollouts by reason."""

    scores: list[Row] = field(default_factory=list)
    states: list[Row] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


class HistoryJudge(Protocol):
    """One version of a scorer, ready to judge committed rollouts or the states they pass."""

    name: str
    version: str
    kind: Kind
    target_kind: TargetKind
    unfit_runs: tuple[str, ...]  # whose states it cannot judge
    notices: tuple[str, ...]  # what a reader of its scores should know

    def judge(self, shard: ShardRows, place: ShardPlace) -> Judged:
        """Return the judgements of everything in `shard` that has none."""


class RewardJudge:
    """A reward: a function of prompt and completion. What it raises costs one score."""

    kind: Kind = "reward"
    target_kind: TargetKind = "rollout"
    unfit_runs: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def __init__(self, scorer: Scorer, store: Store) -> None:
        self.name, self.version = scorer.name, scorer.version
        self._scorer = scorer
        self._facts = RolloutFactsReader(store)

    def judge(self, shard: ShardRows, place: ShardPlace) -> Judged:
        """Return one score per rollout."""
        judged = Judged()
        for rollout in shard.rollouts:
            started = time.perf_counter()
            facts = self._facts.read(self._scorer, [rollout])
            [score] = score_all(
                self._scorer, [stored_prompt(rollout)], [rollout["completion"]], facts
            )
            elapsed_ms = (time.perf_counter() - started) * 1e3
            rollout["iteration"] = place.iteration
            row = score_row(rollout, self._scorer, score, elapsed_ms)
            judged.scores.append(row | {"attempt": rollout["attempt"]})
        return judged


class LanguageJudge:
    """A language model that is asked; an attempt that failed is a score of its own."""

    kind: Kind = "judge"
    target_kind: TargetKind = "rollout"
    unfit_runs: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def __init__(self, scorer: JudgeScorer) -> None:
        self.name, self.version = scorer.name, scorer.version
        self._scorer = scorer

    def judge(self, shard: ShardRows, place: ShardPlace) -> Judged:
        """Return the scores of every rollout, one for each attempt.

        Raises:
            JudgeError: the endpoint cannot be reached, or refuses everything.
        """
        judged = Judged()
        tries = self._scorer.judge_all(
            [stored_prompt(rollout) for rollout in shard.rollouts],
            [rollout["completion"] for rollout in shard.rollouts],
        )
        for rollout, attempts in zip(shard.rollouts, tries, strict=True):
            rollout["iteration"] = place.iteration
            for number, attempt in enumerate(attempts, rollout["attempt"]):
                row = score_row(rollout, self._scorer, attempt.score, attempt.elapsed_ms)
                judged.scores.append(row | {"attempt": number, "kind": self.kind})
        return judged


def make_judge(
    store: Store, scorer: str, run_id: str | None = None, version: str | None = None
) -> HistoryJudge:
    """Return the judge that `scorer` names.

    Args:
        store: holds the value models.
        scorer: `final_number`, `strict_format`, `module:function`, `config:FILE.toml` (the reward
            of a configuration), `judge:FILE.toml`, `value` or `value:VERSION`.
        run_id: whose newest value model `value` is; None: the newest of all.
        version: of a value model, where `value` was asked for before and must mean the same.

    Raises:
        TaskError, ConfigError: there is no such scorer, or it cannot be loaded.
        StorageError: there is no such value model, or its artifact is missing.
    """
    name, _, rest = scorer.partition(":")
    if name == "value":
        from flows.value_judging import load_value_judge

        return load_value_judge(store, run_id, rest or version)
    if name == "judge":
        return LanguageJudge(load_judge(Path(rest)))
    if name == "config" and rest.endswith(".toml"):
        return RewardJudge(configured_task(load_config(Path(rest))).scorers[0], store)
    return RewardJudge(BUILT_IN[scorer] if scorer in BUILT_IN else load_reward(scorer), store)
