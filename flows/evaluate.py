"""Evaluation of a stored policy outside training: held-out prompts, in a stream of its own.

The stream `evaluate-<name>-<run>` has the run's configuration, with the number of prompts asked
for, and takes the steps of an evaluation within training. Seeds go by place, never by run: it
measures again what the run itself would have measured. Stopped anywhere, the same call goes on;
what is evaluated already is answered from the log.
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass

import storage
from flows.config import ConfigError, RunConfig, override_config, parse_config
from flows.progress import Progress
from flows.reflecting import SUFFIX, Mode, evaluated
from flows.translate import Row
from flows.wiring import Session, open_session, opened_row, stored_config, task_sha256
from rrl_core.tasks.registry import build_task
from storage import Store

# What an offline run has to have otherwise, so that its policies can be sampled.
ONLINE = ("run.mode=online", "offline.query=off", "sampler.prompts=1", "learner.steps=1")


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate.

    Mode `direct` takes the policy's answers; `reflect` lets it review each and answer again.
    `iteration` None is the newest published policy, `prompts` None as many held-out prompts as the
    run's configuration says. A name stands for one such number.
    """

    run_id: str
    iteration: int | None = None
    prompts: int | None = None
    name: str = "held_out"
    mode: Mode = "direct"

    @property
    def stream(self) -> str:
        """The stream that holds the evaluation."""
        suffix = SUFFIX if self.mode == "reflect" else ""
        return f"evaluate-{self.name}{suffix}-{self.run_id}"


def evaluate(store: Store, request: EvaluateRequest, progress: Progress) -> list[Row]:
    """Evaluate one stored policy and return its committed `evaluations` rows, one per scorer.

    Raises:
        StorageError: no such run, no such policy, or its adapter is gone.
        ConfigError: the name has other settings, or there are not as many held-out prompts.
    """
    config = _config(store, request)
    policy = _policy(store, request)
    version = int(policy["policy_version"])
    done = store.read("evaluations", run_id=request.stream, iteration=version)
    if done:
        return done
    adapter = store.artifacts.get(policy["adapter_artifact"])
    facts = {
        "kind": "evaluate",
        "parent_run_id": request.run_id,
        "parent_iteration": policy["iteration"],
    }
    with open_session(store, request.stream, config, progress, request.run_id, facts) as session:
        try:
            session.policy.load_adapter_bytes(adapter)
            session.sampler.load_policy(session.policy, version)
            rows = evaluated(session, version, request.name, request.mode)
        except BaseException as error:
            with suppress(storage.StorageError, OSError):  # the first error is the one to show
                _end(session, facts, "failed", f"{type(error).__name__}: {error}"[:2000])
            raise
        _end(session, facts, "finished")
    return rows


def _end(session: Session, facts: Row, what: str, reason: str | None = None) -> None:
    ended = {
        "run_epoch": session.writer.epoch,
        "what": what,
        "reason": reason,
        "elapsed_s": time.monotonic() - session.started_s,
    }
    row = opened_row(session.config, task_sha256(session.task)) | facts | ended
    session.writer.append({"runs": [row]}, batch_key=what)


def _config(store: Store, request: EvaluateRequest) -> RunConfig:
    """Return the run's configuration with the number of prompts asked for, and with a sampler."""
    if not re.fullmatch(r"[a-z0-9_]{1,40}", request.name) or request.name.endswith(SUFFIX):
        raise ConfigError(
            f"name {request.name!r}: expected at most 40 of a-z, 0-9 and `_`, without `{SUFFIX}` "
            "at the end"
        )
    config = stored_config(store, request.run_id)
    if config.run.mode == "offline":
        config = override_config(config, ONLINE)
    num_there = len(build_task(config.task.name, config.task.params).prompts("eval"))
    num_prompts = request.prompts
    if num_prompts is None:
        num_prompts = min(config.evaluation.prompts, num_there)
    if not 1 <= num_prompts <= num_there:
        raise ConfigError(
            f"expected 1 to {num_there} prompts, as many as the task of {request.run_id} holds "
            f"out; came {num_prompts}"
        )
    evaluation = config.evaluation.model_copy(update={"prompts": num_prompts})
    config = config.model_copy(update={"evaluation": evaluation})
    before = store.read("runs", run_id=request.stream)
    if before and _opened_with(before[0]) != config:
        raise ConfigError(
            f"evaluations named {request.name!r} of {request.run_id} were made with another number "
            f"of prompts than {num_prompts}: choose another name, or the number of before"
        )
    return config


def _opened_with(run: Row) -> RunConfig:
    """Return what a stream was opened with; keys that came since have their defaults."""
    return parse_config(json.loads(run["config_json"]), f"configuration of {run['run_id']}")


def _policy(store: Store, request: EvaluateRequest) -> Row:
    """Return the `policies` row of the policy to evaluate."""
    policies = {int(row["iteration"]): row for row in store.read("policies", run_id=request.run_id)}
    if not policies:
        raise storage.StorageError(f"run {request.run_id} has published no policy yet")
    iteration = max(policies) if request.iteration is None else request.iteration
    if iteration not in policies:
        raise storage.StorageError(
            f"run {request.run_id} published no policy in iteration {iteration}: expected one of "
            f"{min(policies)} to {max(policies)}"
        )
    return policies[iteration]
