"""Learning from history alone: which rollouts the query leaves, and an iteration's share of them.

The query is asked as of the run's first pin, for all iterations and for a resumed run alike. What
it names is looked at by content: who has no token ids teaches nothing, who has no sampler log-probs
teaches nothing under an algorithm that compares policies. All of it is a function of the log, the
configuration and the seed, so `rrl audit` derives it again.

    A = (r - p_hat(x)) / 0.3     p_hat(x): the prompt's last 16 on-policy attempts as of the pin

per unit of `replay.reward_range`.

Our choices:
1. sft learns from all that is named, with the weight of 1; raft from what did better than its
   prompt usually does (A > 0: with rewards of 0 and 1 the successes), with the same weight.
2. A rollout is as old as the run: policy versions of other runs say nothing about this one.
3. What the present scorer has not judged is judged when the first batch is planned.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

import storage
from flows.batching import batch_id_of
from flows.config import RunConfig
from flows.judged import judge_rollouts
from flows.lineage import lineage_of
from flows.translate import Row, failure_row, score_row, stored_prompt
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.policy.learner import plan_steps
from rrl_core.replay.credit import offline_advantage
from rrl_core.seeds import derive_seed
from rrl_core.tasks.selection import select_rollouts
from storage import Store

if TYPE_CHECKING:
    from flows.wiring import Session

VIEW = "judged_rollouts"
QUERY_COLUMN = "rollout_id"
USABLE, NOT_JUDGED, NOT_REWARDED = "usable", "not_judged", "not_rewarded"
REASONS = {
    "other_task": "their prompt belongs to another task",
    "held_out": "their prompt is held out for evaluation",
    "not_whole": "they were given more than the prompt, or sampled for other ends than learning",
    "greedy": "they were sampled greedily or at an unknown temperature, so none says how likely "
    "they were",
    "no_tokens": "their token ids are not stored; text is never encoded again",
    "no_logprobs": "there are not as many stored sampler log-probs as token ids",
    "cut_distribution": "top_p or top_k cut the distribution their log-probs are of, so no "
    'correction holds; `learner.correction` = "none" learns from them',
    "no_policy": "the run they come from names no base model",
    "no_reward": "the reward scorer could not judge them",
    NOT_JUDGED: "the reward scorer has not judged them",
    NOT_REWARDED: "they did no better than their prompt usually does",
}
_WHOLE_ROLES = ("attempt", "retry", "imported")  # sampled from the prompt alone
_JUDGED_AT_ONCE = 1_024
_KEPT = pa.schema(
    [(name, pa.string()) for name in ("rollout_id", "run_id", "group_id", "score_id")]
    + [(name, pa.string()) for name in ("prompt_id", "base_digest")]
    + [(name, pa.float64()) for name in ("reward", "p_hat")]
)


@dataclass
class Selection:
    """What a run's query names as of its first pin: what may be learned from, and what not."""

    usable: pa.Table
    reasons: Counter[str]
    examples: dict[str, str]  # a rollout id for each reason
    unjudged: list[str] = field(default_factory=list)

    def reasons_json(self) -> str:
        """Return the number of rollouts by reason, as JSON."""
        return json.dumps({"trajectory": dict(sorted(self.reasons.items()))})

    def sha256(self) -> str:
        """Return the hash of the numbers by reason and of the ids of what may be learned from."""
        content = [self.reasons_json(), *self.usable["rollout_id"].to_pylist()]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


def select(store: Store, run_id: str, config: RunConfig, judge: tuple[str, str]) -> Selection:
    """Return what an offline run may learn from.

    Args:
        store: the store.
        run_id: the run; it has a pin.
        config: its configuration.
        judge: name and version of the reward scorer.

    Raises:
        QueryError: the query is not one reading SELECT, has another column, or names what is no
            rollout.
    """
    as_of = first_pin(store, run_id)
    named = named_ids(store, config, as_of)
    own = {r["target_id"]: r for r in store.read("scores", run_id=run_id) if _is_by(r, judge)}
    selection = Selection(_KEPT.empty_table(), Counter(), {})
    usable = []
    num_named = 0
    arguments = {"scorer": judge[0], "scorer_version": judge[1]}
    for batch in store.batches(VIEW, arguments, as_of):
        rows = batch.filter(_wanted(batch, named)).to_pylist()
        num_named += len(rows)
        kept = []
        for row in rows:
            made = own.get(row["rollout_id"])
            if row["score_id"] is None and made is not None:
                row |= {"score_id": made["event_id"], "reward": made["value"]}
            reason = why_not(row, config)
            selection.reasons[reason] += 1
            example = selection.examples.get(reason, row["rollout_id"])
            selection.examples[reason] = min(example, row["rollout_id"])
            if reason == NOT_JUDGED:
                selection.unjudged.append(row["rollout_id"])
            elif reason == USABLE:
                kept.append(row)
        usable.append(pa.RecordBatch.from_pylist(kept, _KEPT))
    _check_exist(named, num_named, as_of)
    selection.usable = pa.Table.from_batches(usable, _KEPT).sort_by("rollout_id")
    return selection


def first_pin(store: Store, run_id: str) -> int:
    """Return the commit an offline run asks history as of: its first pin's.

    A fork of an offline run has its parent's, so that it goes on as its parent did. A run without
    one will have the newest commit.
    """
    first = run_id
    for stretch in lineage_of(store, run_id).stretches:
        opened = store.read("runs", run_id=stretch.run_id)[:1]
        if not opened or json.loads(opened[0]["config_json"])["run"].get("mode") != "offline":
            break
        first = stretch.run_id
    pins = store.read("views_pinned", run_id=first)
    if not pins:
        return store.head().number
    return int(min(pins, key=lambda pin: int(pin["iteration"]))["as_of"])


def why_not(row: Row, config: RunConfig) -> str:
    """Return `usable`, or the first reason why a row of the view teaches this run nothing."""
    algorithm = ALGORITHMS[config.learner.algorithm]
    num_ids, num_logprobs = row["num_completion_ids"], row["num_logprobs"]
    has_logprobs = num_logprobs == num_ids
    may_lack_them = num_logprobs is None and not algorithm.has_ratio
    is_corrected = algorithm.has_ratio and config.learner.correction != "none"
    for reason, applies in (
        ("other_task", row["task"] != config.task.name),
        ("held_out", row["split"] != "train"),
        ("not_whole", row["prefix_tokens"] > 0 or row["role"] not in _WHOLE_ROLES),
        ("greedy", not row["temperature"] > 0),
        ("no_tokens", not (num_ids and row["num_prompt_ids"])),
        ("no_logprobs", not (has_logprobs or may_lack_them)),
        ("cut_distribution", is_corrected and (0 < row["top_p"] < 1 or row["top_k"] > 0)),
        ("no_policy", row["base_digest"] is None),
        (NOT_JUDGED, row["score_id"] is None),
        ("no_reward", row["score_id"] is not None and row["reward"] is None),
    ):
        if applies:
            return reason
    if algorithm.only_positive and not _advantage(config, row) > 0:
        return NOT_REWARDED
    return USABLE


def _advantage(config: RunConfig, row: Row) -> float:
    return float(offline_advantage(row["reward"], row["p_hat"], config.replay.reward_range))


@dataclass(frozen=True)
class Decision:
    """What an iteration of an offline run learns from: its `replay_plans` and `replays` rows."""

    plan: Row
    replays: list[Row]


def decide(config: RunConfig, iteration: int, selection: Selection) -> Decision:
    """Return an iteration's share of a selection, cut into optimizer steps.

    Raises:
        TaskError: less is left than an iteration takes.
    """
    run, learner, number = config.run, config.learner, config.offline.samples
    places = select_rollouts(len(selection.usable), iteration, number, run.seed)
    chosen: list[dict[str, Any]] = selection.usable.take(places).to_pylist()
    ids = [row["rollout_id"] for row in chosen]
    seed = derive_seed(run.seed, "steps", iteration)
    replays = []
    for step, members in enumerate(plan_steps(ids, learner.steps, learner.epochs, seed)):
        facts = {"step": step, "batch_id": batch_id_of([ids[i] for i in members])}
        replays += [
            {"iteration": iteration, "position": position, **facts, **_sample(config, chosen[i])}
            | {"age": iteration - 1}
            for position, i in enumerate(members)
        ]
    plan = {
        "iteration": iteration,
        "num_candidates": selection.reasons.total(),
        "num_eligible": selection.reasons[USABLE],
        "num_picked": len(chosen),
        "share": 1.0,
        "priority_entropy": None,
        "waiting_reason": None,
        "reasons_json": selection.reasons_json(),
        "buffer_sha256": selection.sha256(),
    }
    return Decision(plan, replays)


def _sample(config: RunConfig, row: Row) -> Row:
    """Return what the `replays` row of a rollout says about it."""
    has_ratio = ALGORITHMS[config.learner.algorithm].has_ratio
    return {
        "rollout_id": row["rollout_id"],
        "unit": "trajectory",
        "source_run_id": row["run_id"],
        "group_id": row["group_id"],
        "score_id": row["score_id"],
        "reward": row["reward"],
        "advantage": _advantage(config, row) if has_ratio else 1.0,
        "priority": None,
        "probability": None,
        "pick_kind": "uniform",
        "pick_id": None,
        "prefix_tokens": None,
        "prefix_advantage": None,
    }


def plan_batch(session: "Session", iteration: int) -> int:
    """Commit what an iteration learns from, and what of the query is left out; return the samples.

    Raises:
        QueryError: nothing is left, the runs asked about have another base model, or the query
            answers otherwise than before.
        TaskError: less is left than an iteration takes.
    """
    run_id, store = session.run_id, session.store
    if session.selection is None:
        session.selection = _checked_selection(session, iteration)
    decided = decide(session.config, iteration, session.selection)
    is_first = not store.read("replay_plans", run_id=run_id)
    left_out = _failures(iteration, session.selection) if is_first else []
    session.writer.append(
        {"replay_plans": [decided.plan], "replays": decided.replays, "failures": left_out},
        batch_key=f"i{iteration:06d}-batch",
    )
    return len(decided.replays)


def _checked_selection(session: "Session", iteration: int) -> Selection:
    run_id, store, scorer = session.run_id, session.store, session.reward_scorer
    judge = (scorer.name, scorer.version)
    with session.progress.status("asking history what there is to learn from"):
        selection = select(store, run_id, session.config, judge)
    if selection.unjudged:
        _judge(session, iteration, selection.unjudged)
        selection = select(store, run_id, session.config, judge)
    if not selection.reasons[USABLE]:
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(selection.reasons.items()))
        raise _nothing_left(counts or "no rows")
    _check_base(selection, session.policy.base_digest)
    plans = store.read("replay_plans", run_id=run_id)
    if plans and plans[0]["buffer_sha256"] != selection.sha256():
        raise storage.QueryError(
            f"`offline.query` answers otherwise than in iteration {plans[0]['iteration']}, as of "
            "the same commit: leave out what is random, the time, and later commits"
        )
    return selection


def _judge(session: "Session", iteration: int, rollout_ids: list[str]) -> None:
    """Judge rollouts by the present scorer, and commit the judgements as this run's."""
    scorer, store = session.reward_scorer, session.store
    with session.progress.phase("judging history", len(rollout_ids)) as advance:
        for number, first in enumerate(range(0, len(rollout_ids), _JUDGED_AT_ONCE)):
            ids = rollout_ids[first : first + _JUDGED_AT_ONCE]
            rollouts = store.read("rollouts", event_ids=ids)
            places = [storage.event_id("prompts", rollout) for rollout in rollouts]
            prompts = {
                p["event_id"]: stored_prompt(p) for p in store.read("prompts", event_ids=places)
            }
            judged = judge_rollouts(store, scorer, [prompts[p] for p in places], rollouts)
            rows = [
                score_row(r, scorer, j, iteration) for r, j in zip(rollouts, judged, strict=True)
            ]
            key = f"i{iteration:06d}-history-scores-{number:04d}"
            session.writer.append({"scores": rows}, batch_key=key)
            advance(len(ids))


def _check_base(selection: Selection, ours: str) -> None:
    foreign = selection.usable.filter(pc.not_equal(selection.usable["base_digest"], ours))
    if len(foreign):
        row = foreign.slice(0, 1).to_pylist()[0]
        raise storage.QueryError(
            f"expected rollouts of our base model, {ours}; those of run {row['run_id']} are of "
            f"{row['base_digest']}: their token ids and log-probs mean something else here. Ask "
            "for runs of this model, or set `model.name` to theirs"
        )


def _failures(iteration: int, selection: Selection) -> list[Row]:
    """Return one `failures` row for each reason why rollouts are left out."""
    return [
        failure_row(
            iteration, "plan", f"offline.query: {reason}", reason,
            f"{number} rollouts are left out, such as {selection.examples[reason]}: "
            f"{REASONS[reason]}",
        )
        for reason, number in sorted(selection.reasons.items())
        if reason not in (USABLE, NOT_REWARDED)
    ]  # fmt: skip


def named_ids(store: Store, config: RunConfig, as_of: int) -> pa.Array | None:
    """Return the ids that the query names; None where there is no query.

    Raises:
        QueryError: the query is not one reading SELECT, has another column, names a NULL, or may
            answer otherwise later.
    """
    if config.offline.query is None:
        return None
    ids = storage.console.selected_ids(
        store, config.offline.query, QUERY_COLUMN, as_of=as_of, is_repeated=True
    )
    return pa.array(ids, pa.string())


def check_named(store: Store, run_id: str, config: RunConfig, judge: tuple[str, str]) -> None:
    """Refuse a query that names too little, before a run is opened.

    Args:
        store: the store.
        run_id: the run that goes on, or the one a fork branches off; an unknown one asks now.
        config: its configuration.
        judge: name and version of the reward scorer.

    Raises:
        QueryError: as `named_ids`; or what it names is nothing, or no rollout.
        TaskError: it names fewer rollouts than an iteration takes.
    """
    as_of = first_pin(store, run_id)
    named = named_ids(store, config, as_of)
    arguments = {"scorer": judge[0], "scorer_version": judge[1]}
    batches = store.batches(VIEW, arguments, as_of)
    num_named = sum(_wanted(batch, named).true_count for batch in batches)
    _check_exist(named, num_named, as_of)
    if not num_named:
        raise _nothing_left("no rows")
    select_rollouts(num_named, 1, config.offline.samples, config.run.seed)


def _check_exist(named: pa.Array | None, num_found: int, as_of: int) -> None:
    if named is not None and num_found < len(named):
        raise storage.QueryError(
            f"`offline.query` names {len(named) - num_found} ids that are no rollouts with a "
            f"completion as of commit {as_of}; select `rollouts.event_id as {QUERY_COLUMN}` of "
            "those whose status is ok"
        )


def _nothing_left(counts: str) -> storage.QueryError:
    return storage.QueryError(
        f"expected rollouts to learn from, `offline.query` leaves none: {counts}; ask for others"
    )


def _wanted(batch: pa.RecordBatch, named: pa.Array | None) -> pa.BooleanArray:
    if named is None:
        return pc.is_in(batch["role"], pa.array(_WHOLE_ROLES))
    return pc.is_in(batch["rollout_id"], named)


def _is_by(score: Row, judge: tuple[str, str]) -> bool:
    return (score["scorer"], score["scorer_version"]) == judge
