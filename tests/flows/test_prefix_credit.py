"""Credit of given tokens, from rewards in the log to the gradient of the step that was planned."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import storage
from flows.planned import planned_steps
from flows.wiring import learner_config, model_spec
from rrl_core.policy.learner import Learner, LearnSample
from rrl_core.policy.model import Policy, load_policy_model
from tests.flows.conftest import RUN_ID, replay_config
from tests.policy_learner.models import alone_logprobs, gradient, gradient_of, relative_error

GRADIENT = 1e-3  # relative
EXACT = 1e-9
Row = dict[str, Any]


def credited(store: storage.Store) -> list[Row]:
    """The samples that were planned with credit for their given tokens."""
    rows = store.read("replays", run_id=RUN_ID)
    return [row for row in rows if row["unit"] == "state" and row["prefix_advantage"] > 0]


def first_credited(store: storage.Store) -> int:
    return min(row["iteration"] for row in credited(store))


def test_the_credit_is_what_continuations_gain_over_the_last_sixteen_attempts(
    replayed: storage.Store,
):
    rewards = {
        row["target_id"]: row["value"]
        for row in replayed.read("scores", run_id=RUN_ID)
        if row["kind"] == "reward"
    }
    rollouts = {row["event_id"]: row for row in replayed.read("rollouts", run_id=RUN_ID)}
    states = [row for row in replayed.read("replays", run_id=RUN_ID) if row["unit"] == "state"]
    assert states
    assert credited(replayed)
    for row in states:
        prompt_id = rollouts[row["rollout_id"]]["prompt_id"]
        earlier = [
            rewards[rollout_id]
            for rollout_id, rollout in rollouts.items()
            if rollout["prompt_id"] == prompt_id
            and rollout["role"] in ("attempt", "retry")
            and rollout["iteration"] < row["iteration"]
        ][-16:]
        group = [rewards[r["rollout_id"]] for r in states if r["group_id"] == row["group_id"]]
        gain = max(0.0, sum(group) / len(group) - sum(earlier) / len(earlier)) / 0.3
        p_hat = (sum(earlier) + 0.5) / (len(earlier) + 2)
        expected = gain if p_hat <= 0.25 else 0.0
        assert row["prefix_advantage"] == pytest.approx(expected, abs=EXACT)


def step_gradient(policy: Policy, samples: list[LearnSample], credit: str) -> torch.Tensor:
    start = policy.adapter_state()
    config = replace(learner_config(replay_config()), prefix_credit=credit, max_grad_norm=None)
    Learner(policy, config).step(samples)
    found = gradient(policy).clone()
    policy.load_adapter_state(start)
    return found


def as_prompt(sample: LearnSample) -> LearnSample:
    """The given tokens as part of the prompt: nothing but a mask."""
    return replace(
        sample, prompt_ids=sample.prompt_ids + sample.prefix_ids,
        prefix_ids=(), prefix_logprobs=None, prefix_advantage=0.0,
    )  # fmt: skip


def test_the_step_gives_given_tokens_no_gradient_or_the_documented_one(replayed: storage.Store):
    iteration = first_credited(replayed)
    [(_, samples)] = planned_steps(replayed, RUN_ID, iteration)
    [before] = replayed.read("policies", run_id=RUN_ID, iteration=iteration - 1)
    policy = load_policy_model(model_spec(replay_config()), seed=0)
    policy.load_adapter_bytes(replayed.artifacts.get(before["adapter_artifact"]))
    masked = step_gradient(policy, samples, "none")
    assert relative_error(masked, step_gradient(policy, [*map(as_prompt, samples)], "none")) < (
        GRADIENT
    )
    tokens = {row["rollout_id"]: row for row in replayed.read("rollout_tokens", run_id=RUN_ID)}
    states = {row["event_id"]: row for row in replayed.read("states", run_id=RUN_ID)}
    rollouts = {row["event_id"]: row for row in replayed.read("rollouts", run_id=RUN_ID)}
    advantages = {row["rollout_id"]: row["prefix_advantage"] for row in credited(replayed)}
    for credit in ("direct", "corrected"):
        loss = torch.zeros(())
        for sample in samples:
            if sample.rollout_id not in advantages:
                continue
            state = states[rollouts[sample.rollout_id]["parent_id"]]
            source = tokens[state["rollout_id"]]
            given = tuple(source["completion_ids"][: state["prefix_tokens"]])
            alone = LearnSample("s", "g", tuple(source["prompt_ids"]), given, None, 0.0)
            logprobs = alone_logprobs(policy, alone)
            sampled = torch.tensor(source["sampler_logprobs"][: len(given)])
            ratios = (logprobs.detach() - sampled).exp()
            weights = ratios.clamp(max=2.0) if credit == "corrected" else torch.ones(len(given))
            credit_term = advantages[sample.rollout_id] * (weights * logprobs).mean()
            loss = loss - credit_term / len(samples)
        expected = gradient_of(policy, loss)
        added = step_gradient(policy, samples, credit) - masked
        assert relative_error(added, expected) < GRADIENT
