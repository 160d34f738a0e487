"""The steps of an iteration: each finds its session by run id and appends what the log lacks.

Every step may be called again: what is committed is kept, so a resumed run is the same loop.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import storage
from flows.batching import replay_rows
from flows.evaluation import evaluation_rows
from flows.generation import Phase, attempts_phase, evaluation_phase, generate_phase, record_failure
from flows.translate import Row, learn_sample, learned_rows, score_row, update_row
from flows.wiring import Session, session_of
from rrl_core.policy.learner import LearnSample
from rrl_core.tasks.protocol import Prompt
from rrl_core.tasks.scorers import score_all
from rrl_core.tasks.selection import select_prompts

MANY_SEGMENTS = 128  # small ones of a run: from here on reading them costs more than merging them


def start(run_id: str) -> int:
    """Load the newest published policy, publishing version 0 first where there is none."""
    session = session_of(run_id)
    policies = session.store.read("policies", run_id=run_id)
    if not policies:
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
    versions = {scorer.name: scorer.version for scorer in session.task.scorers}
    row = {
        "iteration": iteration,
        "as_of": head.number,
        "as_of_sha256": head.sha256,
        "scorer_versions_json": json.dumps(versions),
    }
    closes = iteration - 1 if iteration > 0 else None
    committed = session.writer.append(
        {"views_pinned": [row]}, batch_key=f"i{iteration:06d}-pin", closes_iteration=closes
    )
    return int(committed.rows["views_pinned"][0]["as_of"])


def pick(run_id: str, iteration: int) -> list[str]:
    """Choose the prompts that get fresh groups; return their ids."""
    return [prompt.prompt_id for prompt in _picked(session_of(run_id), iteration)]


def generate(run_id: str, iteration: int) -> int:
    """Sample the iteration's fresh groups; return how many sequences were new."""
    session = session_of(run_id)
    phase = attempts_phase(session, iteration, _picked(session, iteration))
    return _sampled(session, phase)


def score(run_id: str, iteration: int, role: str = "attempt") -> int:
    """Judge every rollout of `role` that a scorer has not judged yet; return the new scores."""
    session = session_of(run_id)
    rollouts = _rollouts(session, iteration, role)
    prompts = {p.prompt_id: p for p in session.prompts("train" if role == "attempt" else "eval")}
    done = {
        (row["target_id"], row["scorer"], row["scorer_version"])
        for row in session.store.read("scores", run_id=run_id, iteration=iteration)
    }
    rows: list[Row] = []
    for scorer in session.task.scorers:
        judge = (scorer.name, scorer.version)
        missing = [r for r in rollouts if (r["event_id"], *judge) not in done]
        started = time.perf_counter()
        judged = score_all(
            scorer, [prompts[r["prompt_id"]] for r in missing], [r["completion"] for r in missing]
        )
        elapsed_ms = (time.perf_counter() - started) * 1e3 / max(1, len(missing))
        rows += [score_row(r, scorer, s, elapsed_ms) for r, s in zip(missing, judged, strict=True)]
    session.writer.append({"scores": rows}, batch_key=f"i{iteration:06d}-{role}-scores")
    return len(rows)


def plan_batch(run_id: str, iteration: int) -> int:
    """Turn scored groups into the batch of each optimizer step; return the samples planned."""
    session = session_of(run_id)
    rollouts = _rollouts(session, iteration, "attempt")
    rows = replay_rows(session.config, iteration, rollouts, _rewards(session, iteration))
    session.writer.append({"replays": rows}, batch_key=f"i{iteration:06d}-batch")
    return len(rows)


def learn(run_id: str, iteration: int) -> int:
    """Take the planned optimizer steps and publish the policy in one commit; return its version."""
    session = session_of(run_id)
    if session.sampler.policy_version >= iteration:  # published before the run was resumed
        return iteration
    steps = _planned_samples(session, iteration)
    session.sampler.sleep()
    unique = {s.rollout_id: s for _, batch in steps for s in batch}
    # Later steps of an iteration are off-policy: they need the log-probs from before the first.
    session.learner.prepare(list(unique.values()) if len(steps) > 1 else [])
    updates: list[Row] = []
    learned: list[Row] = []
    with session.progress.phase(f"learning of iteration {iteration}", len(steps)) as advance:
        for step, (batch_id, samples) in enumerate(steps):
            result = session.learner.step(samples)
            updates.append(
                update_row(iteration, step, batch_id, session.config.learner.algorithm, result)
            )
            learned.extend(learned_rows(iteration, step, result.samples))
            advance(1)
    _publish(session, iteration, iteration, {"updates": updates, "learned_samples": learned})
    session.sampler.wake()
    session.sampler.load_policy(session.policy, iteration)
    return iteration


def evaluate(run_id: str, iteration: int) -> int:
    """Sample and judge the held-out prompts with the present policy; return the new sequences."""
    session = session_of(run_id)
    num_new = _sampled(session, evaluation_phase(session, iteration))
    if session.should_stop:
        return num_new
    score(run_id, iteration, "evaluation")
    rows = evaluation_rows(
        _rollouts(session, iteration, "evaluation"),
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


def finish(run_id: str, what: str, reason: str | None = None) -> int:
    """Record how the run came to its end; return the commit."""
    session = session_of(run_id)
    closed = session.writer.last_closed_iteration
    with _recorded_tracking(session, 0 if closed is None else closed + 1):
        session.tracker.close(what)
    facts = session.store.read("runs", run_id=run_id)[-1]
    kept = (
        "config_json", "seed_root", "planned_iterations", "code_version", "packages_json",
        "task_sha256",
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


def _picked(session: Session, iteration: int) -> list[Prompt]:
    prompts = session.prompts("train")
    run, per_iteration = session.config.run, session.config.sampler.prompts
    return [prompts[i] for i in select_prompts(len(prompts), iteration, per_iteration, run.seed)]


def _sampled(session: Session, phase: Phase) -> int:
    started = time.monotonic()
    num_new = generate_phase(session, phase)
    session.progress.sampled(num_new, time.monotonic() - started)
    return num_new


def _rollouts(session: Session, iteration: int, role: str) -> list[Row]:
    """Return the iteration's committed rollouts of `role` that hold a completion."""
    rows = session.store.read("rollouts", run_id=session.run_id, iteration=iteration)
    return [row for row in rows if row["role"] == role and row["status"] == "ok"]


def _rewards(session: Session, iteration: int) -> dict[str, Row]:
    """Return the committed row of the reward scorer by rollout id."""
    scorer = session.reward_scorer
    rows = session.store.read("scores", run_id=session.run_id, iteration=iteration)
    wanted = (scorer.name, scorer.version)
    return {r["target_id"]: r for r in rows if (r["scorer"], r["scorer_version"]) == wanted}


def _planned_samples(session: Session, iteration: int) -> list[tuple[str, list[LearnSample]]]:
    """Return (batch id, samples) of each planned step, read back from the log."""
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    rollouts = {row["event_id"]: row for row in read("rollouts")}
    tokens = {row["rollout_id"]: row for row in read("rollout_tokens")}
    steps: dict[int, list[Row]] = {}
    for row in read("replays"):
        steps.setdefault(row["step"], []).append(row)
    planned = []
    for step in sorted(steps):
        rows = sorted(steps[step], key=lambda row: int(row["position"]))
        samples = [
            learn_sample(r, rollouts[r["rollout_id"]], tokens[r["rollout_id"]]) for r in rows
        ]
        planned.append((rows[0]["batch_id"], samples))
    return planned


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
            session.learner.optimizer_state(), f"optimizer_{session.run_id.replace('-', '_')}"
        )
        if version > 0
        else None,
    }
    session.writer.append({**learned, "policies": [row]}, batch_key=f"i{iteration:06d}-publish")
    _drop_optimizer_states(session, version)


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
