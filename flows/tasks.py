"""The steps of an iteration: each finds its session by run id and appends what the log lacks.

Every step may be called again: what is committed is kept, so a resumed run is the same loop.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import storage
from flows import fetching, offline, refitting, replaying, reviewing
from flows.batching import replay_rows
from flows.evaluation import evaluation_rows
from flows.generation import (
    Phase,
    evaluation_phase,
    generate_phase,
    record_failure,
    review_phase,
    second_phase,
    training_phase,
)
from flows.judged import RolloutFactsReader
from flows.metrics import distilled_share
from flows.planned import TRAINED_ROLES, planned_steps
from flows.retrying import compare_with_old
from flows.reviewed import distillation_rows, reviewed_groups
from flows.substituting import samples_of
from flows.translate import Row, learned_rows, score_row, update_row
from flows.wiring import Session, session_of
from rrl_core.policy.learner import take_steps
from rrl_core.tasks.protocol import Split
from rrl_core.tasks.scoring_pool import Asked

SCORED: dict[str, tuple[tuple[str, ...], Split]] = {  # by phase: roles, and split of their prompts
    "attempt": (TRAINED_ROLES, "train"),
    "second_attempt": (reviewing.ANSWER_ROLES, "train"),
    "evaluation": (("evaluation",), "eval"),
    "reflection": (("second_attempt",), "eval"),
}
MUCH_DISTILLED = 0.3  # of the tokens trained on
MANY_SEGMENTS = 128  # small ones of a run: from here on reading them costs more than merging them


def start(run_id: str) -> int:
    """Load the newest published policy, publishing the one the run starts from where none is."""
    session = session_of(run_id)
    policies = session.store.read("policies", run_id=run_id)
    if not policies:
        if session.lineage.first_iteration > 0:
            _adopt(session)
        else:
            _publish(session, iteration=0, version=0, learned={})
        policies = session.store.read("policies", run_id=run_id)
    newest = max(policies, key=lambda row: int(row["policy_version"]))
    session.policy.load_adapter_bytes(session.store.artifacts.get(newest["adapter_artifact"]))
    if newest["optimizer_artifact"] is not None:
        session.learner.load_optimizer_state(
            session.store.artifacts.get(newest["optimizer_artifact"])
        )
    session.sampler.load_policy(session.policy, newest["policy_version"])
    return int(newest["policy_version"])


def pin(run_id: str, iteration: int) -> int:
    """Fix the commit this iteration reads history as of; the first pin of an iteration holds."""
    session = session_of(run_id)
    head = session.store.head()
    is_offline = session.config.run.mode == "offline"
    views = (offline.VIEW,) if is_offline else replaying.PINNED_VIEWS
    if session.config.review.gate is not None:
        views = (*views, reviewing.VIEW)
    versions = {scorer.name: scorer.version for scorer in session.task.scorers}
    judge = replaying.value_version(session.store, run_id, head.number)
    if judge != replaying.NO_MODEL:
        versions[replaying.VALUE_SCORER] = judge
    row = {
        "iteration": iteration,
        "as_of": head.number,
        "as_of_sha256": head.sha256,
        "scorer_versions_json": json.dumps(versions),
        "views_json": json.dumps(storage.view_digests(*views)),
    }
    closes = iteration - 1 if iteration > 0 else None
    committed = session.writer.append(
        {"views_pinned": [row]}, batch_key=f"i{iteration:06d}-pin", closes_iteration=closes
    )
    return int(committed.rows["views_pinned"][0]["as_of"])


def pick(run_id: str, iteration: int) -> int:
    """Choose what of its history the iteration goes back to; return the number of picks."""
    session = session_of(run_id)
    read = partial(session.store.read, run_id=run_id, iteration=iteration)
    if not session.config.replay.units or read("replay_plans"):
        return len(read("picks"))
    pinned = replaying.Pin.of_row(read("views_pinned")[0])
    decided = replaying.decide(session.store, run_id, session.config, iteration, pinned)
    fetching.keep(session, decided)
    session.writer.append(
        {"replay_plans": [decided.plan], "picks": decided.picks}, batch_key=f"i{iteration:06d}-pick"
    )
    return len(decided.picks)


def generate(run_id: str, iteration: int) -> int:
    """Sample fresh groups, continuations and retries; return how many sequences were new."""
    session = session_of(run_id)
    fetching.begin(session, iteration)
    phase = training_phase(session, iteration, replaying.groups(session, iteration))
    return _sampled(session, phase)


def review(run_id: str, iteration: int) -> int:
    """Review failed attempts, and read the reviews; return how many sequences were new."""
    session = session_of(run_id)
    chosen = reviewing.gated_of(session, iteration)
    phase = review_phase(session, iteration, reviewing.review_groups(session, chosen))
    num_new = _sampled(session, phase)
    _note_refused(session, iteration, phase)
    if not session.should_stop:
        rows = reviewing.review_rows(session, iteration, chosen)
        session.writer.append(rows, batch_key=f"i{iteration:06d}-reviews")
    return num_new


def try_again(run_id: str, iteration: int) -> int:
    """Sample a second attempt after every review, and control answers; return the new sequences."""
    session = session_of(run_id)
    phase = second_phase(session, iteration, reviewing.second_groups(session, iteration))
    num_new = _sampled(session, phase)
    _note_refused(session, iteration, phase)
    return num_new


def score(run_id: str, iteration: int, phase: str = "attempt") -> int:
    """Judge every rollout of a phase that a scorer has not judged yet; return the new scores."""
    session = session_of(run_id)
    roles, split = SCORED[phase]
    rollouts = _rollouts(session, iteration, roles)
    prompts = {p.prompt_id: p for p in session.prompts(split)}
    done = {
        (row["target_id"], row["scorer"], row["scorer_version"])
        for row in session.store.read("scores", run_id=run_id, iteration=iteration)
    }
    facts, rows = RolloutFactsReader(session.store), list[Row]()
    for scorer in session.task.scorers:
        judge = (scorer.name, scorer.version)
        missing = [r for r in rollouts if (r["event_id"], *judge) not in done]
        judged = session.scoring.judge(
            scorer,
            [Asked(r["event_id"], prompts[r["prompt_id"]], r["completion"]) for r in missing],
            facts.read(scorer, missing),
        )
        rows += [score_row(r, scorer, j) for r, j in zip(missing, judged, strict=True)]
    session.scoring.forget()
    session.writer.append({"scores": rows}, batch_key=f"i{iteration:06d}-{phase}-scores")
    return len(rows)


def plan_batch(run_id: str, iteration: int) -> int:
    """Turn scored groups into the batch of each optimizer step; return the samples planned.

    What was replayed is compared with what it was replayed for, in the same commit.
    """
    session = session_of(run_id)
    if session.config.run.mode == "offline":
        return offline.plan_batch(session, iteration)
    judge = (session.reward_scorer.name, session.reward_scorer.version)
    past = fetching.fetched(session, iteration)
    samples = samples_of(session.store, session.config, (run_id, iteration), judge, past)
    [pinned] = session.store.read("views_pinned", run_id=run_id, iteration=iteration)
    reviewed = reviewed_groups(session.store, run_id, iteration, judge)
    is_old = pinned["views_json"] is None
    rows = replay_rows(session.config, iteration, samples.scored, is_old, reviewed)
    compared = compare_with_old(session, iteration, samples)
    session.writer.append(
        {
            "picks": samples.substitutes,
            "replays": rows,
            "distillations": distillation_rows(session.config, reviewed),
            "retries": compared.retries,
            "scores": compared.scores,
        },
        batch_key=f"i{iteration:06d}-batch",
    )
    return len(rows)


def learn(run_id: str, iteration: int) -> int:
    """Take the planned optimizer steps and publish the policy in one commit; return its version."""
    session = session_of(run_id)
    if session.sampler.policy_version >= iteration:  # published before the run was resumed
        return iteration
    old = fetching.taken(session, iteration)
    steps = planned_steps(session.store, run_id, iteration, old)
    session.sampler.sleep()
    updates: list[Row] = []
    learned: list[Row] = []
    with session.progress.phase(f"learning of iteration {iteration}", len(steps)) as advance:
        results = take_steps(session.learner, [samples for _, samples in steps])
        for step, ((batch_id, _), result) in enumerate(zip(steps, results, strict=True)):
            updates.append(
                update_row(iteration, step, batch_id, session.config.learner.algorithm, result)
            )
            learned.extend(learned_rows(iteration, step, result.samples))
            advance(1)
    _publish(session, iteration, iteration, {"updates": updates, "learned_samples": learned})
    _note_distilled(session, iteration)
    session.sampler.wake()
    session.sampler.load_policy(session.policy, iteration)
    return iteration


def refit(run_id: str, iteration: int) -> str:
    """Fit a value model on the run's history and examine it; return its verdict."""
    return refitting.refit(session_of(run_id), iteration)


def rescore(run_id: str, iteration: int) -> int:
    """Judge the run's states by the newest value model; return the new scores."""
    return refitting.rescore(session_of(run_id), iteration)


def evaluate(run_id: str, iteration: int) -> int:
    """Sample and judge the held-out prompts with the present policy; return the new sequences."""
    session = session_of(run_id)
    num_new = _sampled(session, evaluation_phase(session, iteration))
    if session.should_stop:
        return num_new
    score(run_id, iteration, "evaluation")
    rows = evaluation_rows(
        _rollouts(session, iteration, ("evaluation",)),
        session.store.read("scores", run_id=run_id, iteration=iteration),
    )
    session.writer.append({"evaluations": rows}, batch_key=f"i{iteration:06d}-evaluation")
    return num_new


def track(run_id: str, iteration: int) -> None:
    """Project the iteration to MLflow; a failing tracker is recorded, never fatal."""
    session = session_of(run_id)
    with _recorded_tracking(session, iteration):
        session.tracker.log_iteration(session.store, iteration)


def compact(run_id: str) -> int:
    """Merge the run's small segments once there are many; return how many mergers that took."""
    store = session_of(run_id).store
    if storage.num_small_segments(store, run_id) <= MANY_SEGMENTS:
        return 0
    num_merged = sum(1 for _ in storage.compact(store, run_id))
    storage.collect(store)
    return num_merged


def is_spent(run_id: str) -> bool:
    """Return whether training has sampled as many tokens as the run may."""
    session = session_of(run_id)
    limit = session.config.run.budget_tokens
    if limit is None:
        return False
    budget = session.store.view("sampled_budget", run_id=run_id)
    return bool(sum(row["num_tokens"] for row in budget if row["is_training"]) >= limit)


def finish(run_id: str, what: str, reason: str | None = None) -> int:
    """Record how the run came to its end; return the commit."""
    session = session_of(run_id)
    closed = session.writer.last_closed_iteration
    with _recorded_tracking(session, 0 if closed is None else closed + 1):
        session.tracker.close(what)
    facts = session.store.read("runs", run_id=run_id)[-1]
    kept = (
        "config_json", "seed_root", "planned_iterations", "code_version", "packages_json",
        "task_sha256", "kind", "parent_run_id", "parent_iteration", "parent_as_of",
    )  # fmt: skip
    row = {key: facts[key] for key in kept} | {
        "run_epoch": session.writer.epoch,
        "what": what,
        "reason": reason,
        "elapsed_s": time.monotonic() - session.started_s,
    }
    closes = session.config.run.iterations if what == "finished" else None
    return session.writer.append({"runs": [row]}, batch_key=what, closes_iteration=closes).commit


@contextmanager
def _recorded_tracking(session: Session, iteration: int) -> Iterator[None]:
    """Record what goes wrong as a failure of `iteration`: training goes on without MLflow."""
    try:
        yield
    except Exception as error:
        record_failure(session, iteration, "track", "mlflow", error)


def _sampled(session: Session, phase: Phase) -> int:
    started = time.monotonic()
    num_new = generate_phase(session, phase)
    session.progress.sampled(num_new, time.monotonic() - started)
    return num_new


def _note_distilled(session: Session, iteration: int) -> None:
    """Warn where much of what was learned from is distilled."""
    share = distilled_share(session.store, session.run_id, iteration)
    if share is not None and share > MUCH_DISTILLED:
        session.progress.note(
            f"iteration {iteration}: {share:.0%} of the tokens trained on are distilled; above "
            f"{MUCH_DISTILLED:.0%} the policy mostly imitates itself: lower `review.distill_coef`, "
            "or sample more attempts"
        )


def _note_refused(session: Session, iteration: int, phase: Phase) -> None:
    """Say how many of a phase's rollouts the sampler could not serve."""
    roles = {group.role for group in phase.groups}
    rows = session.store.read("rollouts", run_id=session.run_id, iteration=iteration)
    asked = [row for row in rows if row["role"] in roles]
    num_refused = sum(row["status"] != "ok" for row in asked)
    if num_refused:
        session.progress.note(
            f"iteration {iteration}: {num_refused} of {len(asked)} rollouts of phase {phase.name} "
            "did not fit `sampler.context_tokens`: raise it, or lower `review.memory_tokens`"
        )


def _rollouts(session: Session, iteration: int, roles: tuple[str, ...]) -> list[Row]:
    """Return the iteration's committed rollouts of `roles` that hold a completion."""
    rows = session.store.read("rollouts", run_id=session.run_id, iteration=iteration)
    return [
        row
        for row in rows
        if row["role"] in roles and row["status"] == "ok" and row["arm"] != reviewing.UNREVIEWED_ARM
    ]


def _publish(session: Session, iteration: int, version: int, learned: dict[str, list[Row]]) -> None:
    """Store the artifacts durably, then commit the policy together with what it learned from."""
    artifacts = session.store.artifacts
    policy = session.policy
    adapter_digest = policy.adapter_digest()
    row = {
        "policy_version": version,
        "iteration": iteration,
        "base_digest": policy.base_digest,
        "adapter_digest": adapter_digest,
        "policy_digest": policy.digest(adapter_digest),
        "adapter_artifact": artifacts.put(policy.adapter_bytes(), "adapter"),
        "optimizer_artifact": artifacts.put(
            session.learner.optimizer_state(), _optimizer_kind(session)
        )
        if version > 0
        else None,
    }
    session.writer.append({**learned, "policies": [row]}, batch_key=f"i{iteration:06d}-publish")
    _drop_optimizer_states(session, version)


def _adopt(session: Session) -> None:
    """Publish the policy the run was forked at as its own, with the optimizer's state."""
    iteration = session.lineage.first_iteration
    parent = session.lineage.stretches[1].run_id
    [row] = session.store.read("policies", run_id=parent, iteration=iteration)
    kept = ("policy_version", "iteration", "base_digest", "adapter_digest", "policy_digest",
            "adapter_artifact")  # fmt: skip
    artifact = row["optimizer_artifact"]
    if artifact is not None:
        state = session.store.artifacts.get(artifact)
        artifact = session.store.artifacts.put(state, _optimizer_kind(session))
    adopted = {name: row[name] for name in kept} | {"optimizer_artifact": artifact}
    session.writer.append({"policies": [adopted]}, batch_key=f"i{iteration:06d}-publish")


def _optimizer_kind(session: Session) -> str:
    return f"optimizer_{session.run_id.replace('-', '_')}"


def _drop_optimizer_states(session: Session, version: int) -> None:
    """Delete the optimizer states that `tracking.keep_optimizer` does not keep.

    Their artifacts carry the run's id in their kind, so no other run can refer to them.
    """
    keep = session.config.tracking.keep_optimizer
    if keep == "all":
        return
    rows = session.store.read("policies", run_id=session.run_id)
    kept = {
        row["optimizer_artifact"]
        for row in rows
        if row["policy_version"] >= version - 1
        or (keep == "evaluated" and session.config.is_evaluated(row["iteration"]))
    }
    for row in rows:
        artifact = row["optimizer_artifact"]
        if artifact is not None and artifact not in kept:
            session.store.artifacts.delete(artifact)
