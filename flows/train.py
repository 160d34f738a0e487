"""Training: generate with the present policy, judge, learn, publish; every step is an event.

The loop is that of GRPO (Shao et al. 2024, arXiv 2402.03300) with these departures:

1. The learner trains only on rows read back from the event log, never on what a sampler returned.
2. An iteration first pins the commit it reads history as of; a resumed iteration keeps its pin.
3. `pick` chooses what of its history an iteration goes back to: promising states, old successes,
   prompts once solved (RRL, arXiv 2504.14363). Every few iterations history is judged again.
4. A failed attempt may be reviewed and tried again; what that fixes is distilled (SRRL,
   arXiv 2607.05541).
5. Every step may be called again: what is committed is kept. Resuming is running the same loop.
6. An offline run samples nothing: its batches are planned from history alone (`offline.py`).
7. Iteration 0 publishes and evaluates the start policy, so every gain has its baseline in the log.
"""

import re
import secrets
from contextlib import suppress
from datetime import UTC, datetime

from flows import tasks
from flows.config import ConfigError, RunConfig
from flows.orchestrate import Orchestrator, Steps, StopRequested, run_loop
from flows.progress import Progress
from flows.wiring import Fork, open_session, session_of
from storage import StorageError, Store


def train_loop(run_id: str, step: Steps) -> None:
    """Alternate generation and learning until the planned iterations, or the budget, are spent."""
    session = session_of(run_id)
    newest = step.start(run_id)
    planned = session.config.run.iterations
    for iteration in range(newest, planned + 1):
        step.pin(run_id, iteration)
        if iteration > session.lineage.first_iteration:
            if session.config.run.mode != "offline":
                step.pick(run_id, iteration)
                step.generate(run_id, iteration)
                step.score(run_id, iteration)
                if session.config.review.gate is not None:
                    step.review(run_id, iteration)
                    step.try_again(run_id, iteration)
                    step.score(run_id, iteration, "second_attempt")
            step.plan_batch(run_id, iteration)
            step.learn(run_id, iteration)
            if session.config.is_refitted(iteration):
                step.refit(run_id, iteration)
                step.rescore(run_id, iteration)
        is_last = tasks.is_spent(run_id)
        if session.config.is_evaluated(iteration, is_last):
            step.evaluate(run_id, iteration)
        step.track(run_id, iteration)
        step.compact(run_id)
        session.progress.iteration_done(session.store, run_id, iteration, planned)
        if is_last:
            break


def train(
    store: Store,
    config: RunConfig,
    run_id: str,
    orchestrator: Orchestrator,
    progress: Progress,
    fork: Fork | None = None,
) -> str:
    """Train a new run, or go on with a stored one; return how it ended: finished or interrupted.

    A new run with a `fork` goes on from its parent's policy, with the parent's history.

    Raises:
        SupersededError: another process opened the same run; this one has stopped writing.
        StorageError, TaskError, SamplerError: named in their messages; nothing committed is lost.
    """
    facts = None if fork is None else vars(fork)
    with open_session(store, run_id, config, progress, facts=facts):
        try:
            run_loop(train_loop, run_id, orchestrator, store.path)
        except StopRequested:
            tasks.finish(run_id, "interrupted", "stopped by the user")
            return "interrupted"
        except BaseException as error:
            how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(StorageError, OSError):  # the first error is the one to show
                tasks.finish(run_id, how, f"{type(error).__name__}: {error}"[:2000])
            raise
        tasks.finish(run_id, "finished")
    return "finished"


def check_run_id(run_id: str) -> None:
    """Raise `ConfigError` unless a new run may have this id."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,99}", run_id):
        raise ConfigError(
            f"run id {run_id!r}: expected at most 100 of a-z, 0-9 and `-`, the first no `-`"
        )


def new_run_id(name: str) -> str:
    """Return a fresh run id: name, UTC time, four random hex digits."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
