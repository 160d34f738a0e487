"""Judges of history by name: a reward, a language model, or a value model, behind one protocol."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from flows.config import ConfigError, load_config, task_overrides
from flows.judged import RolloutFactsReader, configured_task
from flows.translate import Row, score_row, stored_prompt
from rrl_core.tasks.judge import JudgeScorer, load_judge
from rrl_core.tasks.protocol import Scorer
from rrl_core.tasks.registry import ScorerKind, build_scorer, scorer_kind
from rrl_core.tasks.scorers import judge_all
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
        judgements = judge_all(
            self._scorer,
            [stored_prompt(rollout) for rollout in shard.rollouts],
            [rollout["completion"] for rollout in shard.rollouts],
            self._facts.read(self._scorer, shard.rollouts),
        )
        judged = Judged()
        for rollout, judgement in zip(shard.rollouts, judgements, strict=True):
            row = score_row(rollout, self._scorer, judgement, place.iteration)
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
            for number, attempt in enumerate(attempts, rollout["attempt"]):
                row = score_row(rollout, self._scorer, attempt, place.iteration)
                judged.scores.append(row | {"attempt": number, "kind": self.kind})
        return judged


def make_judge(
    store: Store,
    scorer: str,
    run_id: str | None = None,
    version: str | None = None,
    settings: Sequence[str] = (),
) -> HistoryJudge:
    """Return the judge that `scorer` names.

    Args:
        store: holds the value models, and the configurations of runs.
        scorer: one of `rrl_core.tasks.registry.SCORERS`, `module:function`, `config:FILE.toml` (the
            reward of a configuration), `judge:FILE.toml`, `value` or `value:VERSION`.
        run_id: whose newest value model `value` is, None: the newest of all; and whose task's
            parameters a reward has, None: the defaults.
        version: of a value model, where `value` was asked for before and must mean the same.
        settings: parameters of a reward other than the run's, as `task.key=value`.

    Raises:
        TaskError: there is no such scorer or parameter, or it cannot be loaded.
        ConfigError: the settings are malformed, or what is named has none.
        StorageError: there is no such value model, or its artifact is missing.
    """
    name, _, rest = scorer.partition(":")
    if name in ("value", "judge") and settings:
        raise ConfigError(f"--set {settings[0]}: expected none, `{scorer}` has no parameters")
    if name == "value":
        from flows.value_judging import load_value_judge

        return load_value_judge(store, run_id, rest or version)
    if name == "judge":
        return LanguageJudge(load_judge(Path(rest)))
    if name == "config" and rest.endswith(".toml"):
        return RewardJudge(configured_task(load_config(Path(rest))).scorers[0], store)
    kind = scorer_kind(scorer)
    params = _run_params(store, kind, run_id) | task_overrides(settings)
    return RewardJudge(build_scorer(scorer, params), store)


def _run_params(store: Store, kind: ScorerKind, run_id: str | None) -> dict[str, Any]:
    """Return the parameters a run's task gives to scorers of this kind."""
    if run_id is None:
        return {}
    config = json.loads(store.read("runs", run_id=run_id)[0]["config_json"])
    task = config.get("task")
    if not isinstance(task, dict) or kind.task not in (None, task.get("name")):
        return {}
    return {name: value for name, value in task.items() if name in kind.settings.model_fields}
