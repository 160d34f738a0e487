"""A new run that branches off from a stored one: its policy, its history, nothing copied."""

import re
from collections.abc import Sequence
from pathlib import Path

import storage
from flows.config import ConfigError, RunConfig, load_config, override_config
from flows.lineage import lineage_of
from flows.wiring import Fork, stored_config
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.tasks.registry import build_task
from storage import Store


def parse_fork(text: str) -> tuple[str, int]:
    """Return (run, iteration) of `RUN@ITERATION`.

    Raises:
        ConfigError: it is not of this form.
    """
    match = re.fullmatch(r"(.+)@(\d+)", text)
    if match is None:
        raise ConfigError(f"--fork {text}: expected RUN@ITERATION, such as demo-1@20")
    return match[1], int(match[2])


def plan_fork(
    store: Store, text: str, config_path: Path | None, overrides: Sequence[str]
) -> tuple[RunConfig, Fork]:
    """Return the configuration of a fork and where it branches off.

    Without a configuration it has its parent's. Its seeds are its parent's in any case, so that
    what is unchanged goes on as the parent did.

    Raises:
        ConfigError: not RUN@ITERATION, or the fork has no iterations left.
        StorageError: there is no such run or policy, or its optimizer state is no longer kept.
    """
    run_id, iteration = parse_fork(text)
    parent = stored_config(store, run_id)
    config = override_config(parent, overrides)
    if config_path is not None:
        config = load_config(config_path, [*overrides, f"run.seed={parent.run.seed}"])
    if config.run.seed != parent.run.seed:
        raise ConfigError(
            f"`run.seed` = {config.run.seed}: a fork inherits its parent's, {parent.run.seed}; "
            "leave it out, or start a new run"
        )
    if config.run.iterations <= iteration:
        raise ConfigError(
            f"`run.iterations` = {config.run.iterations}: expected more than the {iteration} the "
            "fork begins with; raise it with --set run.iterations=N"
        )
    _check_policy(store, run_id, iteration)
    _check_same(store, run_id, parent, config)
    _check_corrected(store, run_id, config)
    _check_refitted(store, run_id, parent, iteration)
    return config, Fork(run_id, iteration, _history_ends(store, run_id, iteration))


def _check_policy(store: Store, run_id: str, iteration: int) -> None:
    versions = {row["policy_version"]: row for row in store.read("policies", run_id=run_id)}
    if iteration not in versions:
        raise storage.StorageError(
            f"run {run_id} published no policy at iteration {iteration}; it has "
            f"{min(versions, default=0)} to {max(versions, default=0)}"
        )
    artifacts = [versions[iteration]["adapter_artifact"], versions[iteration]["optimizer_artifact"]]
    gone = [name for name in artifacts if name is not None and not store.artifacts.has(name)]
    if gone:
        raise storage.StorageError(
            f"iteration {iteration} of {run_id} cannot be forked: {gone[0]} is no longer kept. "
            'Train with `tracking.keep_optimizer = "all"`, or fork one of the last two iterations'
        )


def _check_same(store: Store, run_id: str, parent: RunConfig, config: RunConfig) -> None:
    """Refuse a fork whose history would not fit it: other cuts, other weights, other prompts."""
    for section, key in (
        ("value", "every"), ("value", "cuts"), ("model", "name"), ("model", "dtype"),
        ("model", "start_adapter"), ("model", "lora"), ("run", "mode"),
    ):  # fmt: skip
        before, now = (getattr(getattr(c, section), key) for c in (parent, config))
        if before != now:
            raise ConfigError(
                f"`{section}.{key}` = {now}: a fork keeps its parent's, {before}, because it "
                "shares its history and its policy; leave it out, or start a new run"
            )
    known = _prompt_ids(parent)
    if missing := known - _prompt_ids(config):
        raise ConfigError(
            f"`task`: {len(missing)} of the {len(known)} train prompts of {run_id} are missing; a "
            "fork may go back to any of them: keep the parent's data, or start a new run"
        )


def _check_corrected(store: Store, run_id: str, config: RunConfig) -> None:
    """Refuse a fork that would weigh old tokens by log-probs that are not of the distribution."""
    replay, learner = config.replay, config.learner
    is_corrected = ALGORITHMS[learner.algorithm].has_ratio and learner.correction != "none"
    if "trajectory" in replay.units and is_corrected:
        setting, way_out = f"`learner.correction` = {learner.correction!r}", "none"
    elif "state" in replay.units and replay.credit == "corrected":
        setting, way_out = "`replay.credit` = 'corrected'", "direct"
    else:
        return
    for stretch in lineage_of(store, run_id).stretches:
        sampler = stored_config(store, stretch.run_id).sampler
        if sampler.top_p < 1 or sampler.top_k > 0:
            raise ConfigError(
                f"{setting} weighs old tokens by log-probs of the full distribution, but "
                f"`sampler.top_p` = {sampler.top_p} of {stretch.run_id}, or its `sampler.top_k` = "
                f"{sampler.top_k}, cut it: set it to {way_out!r}, or leave out what reads them "
                f"from `replay.units` = {list(replay.units)}"
            )


def _prompt_ids(config: RunConfig) -> set[str]:
    task = build_task(config.task.name, config.task.params)
    return {prompt.prompt_id for prompt in task.prompts("train")}


def _check_refitted(store: Store, run_id: str, parent: RunConfig, iteration: int) -> None:
    """Refuse to fork between a policy and the refit that belongs to its iteration."""
    if not parent.is_refitted(iteration) or store.read(
        "views_pinned", run_id=run_id, iteration=iteration + 1
    ):
        return
    if not any(
        row["kind"] == "value" for row in store.read("scores", run_id=run_id, iteration=iteration)
    ):
        raise storage.StorageError(
            f"iteration {iteration} of {run_id} has a policy and not yet the judgement of history "
            f"that follows it: finish it with `rrl train --resume {run_id}`, or fork an earlier one"
        )


def _history_ends(store: Store, run_id: str, iteration: int) -> int:
    """Return the commit the parent's next iteration read history as of, or the newest one."""
    pins = store.read("views_pinned", run_id=run_id, iteration=iteration + 1)
    return int(pins[0]["as_of"]) if pins else store.head().number
