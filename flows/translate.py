"""The only mapping between core records and stored rows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import storage
from rrl_core.policy.learner import LearnSample, SampleStats, StepResult
from rrl_core.policy.records import Term
from rrl_core.sampling.protocol import Completion, SampleRequest, SamplingParams, Turn
from rrl_core.spans import sampled_mask
from rrl_core.tasks.protocol import Judgement, Messages, Prompt, Scorer
from rrl_core.tasks.signature import solution_signature
from rrl_core.value.health import Health

Row = dict[str, Any]
TERMS: dict[str, Term] = {"review": "review", "second_attempt": "second_attempt"}


def prompt_row(prompt: Prompt) -> Row:
    """Return the `prompts` row of a prompt."""
    return {
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "split": prompt.split,
        "messages_json": json.dumps([dict(m) for m in prompt.messages], ensure_ascii=False),
        "answer": prompt.answer,
        "difficulty": prompt.difficulty,
        "meta_json": json.dumps(dict(prompt.meta), sort_keys=True, ensure_ascii=False),
    }


def stored_messages(messages_json: str) -> Messages:
    """Return chat messages as they were stored."""
    return tuple(json.loads(messages_json))


def stored_prompt(row: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a row that has the columns of `prompts`."""
    return Prompt(
        prompt_id=row["prompt_id"],
        task=row["task"],
        split=row["split"],
        messages=stored_messages(row["messages_json"]),
        answer=row["answer"],
        difficulty=row["difficulty"],
        meta=json.loads(row["meta_json"]),
    )


def rollout_place(run_id: str, iteration: int, role: str, prompt_id: str, sample_index: int) -> Row:
    """Return the place of a rollout without parent that was never tried before."""
    return {
        "run_id": run_id,
        "iteration": iteration,
        "role": role,
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "parent_id": "",
        "attempt": 0,
    }


def group_id(place: Mapping[str, Any]) -> str:
    """Return the id shared by the rollouts of one prompt or state in one phase of a run."""
    parts = [place["run_id"], place["iteration"], place["role"], place["prompt_id"]]
    parts += [place["parent_id"]] if place["parent_id"] else []
    return "g-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def rollout_rows(
    place: Mapping[str, Any],
    request: SampleRequest,
    params: SamplingParams,
    completion: Completion,
    facts: Mapping[str, Any],
) -> tuple[Row, Row]:
    """Return the `rollouts` and `rollout_tokens` rows of one completion.

    `facts` are what all rollouts of a sampler batch share: policy, engine, batch key, seconds.
    """
    has_logprobs = completion.sampler_logprobs is not None
    rollout = {
        **place,
        **facts,
        "group_id": group_id(place),
        "num_prompt_tokens": len(request.prompt_ids),
        "prefix_tokens": 0,
        "num_completion_tokens": completion.num_sampled_tokens,
        "finish_reason": completion.finish_reason,
        "status": "ok" if completion.error is None else "error",
        "error": completion.error,
        "completion": completion.text,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "seed": request.seed,
        "logprob_mode": "processed" if has_logprobs else "none",
        "ending": completion.ending,
    }
    tokens = {
        "run_id": place["run_id"],
        "iteration": place["iteration"],
        "rollout_id": storage.event_id("rollouts", place),
        "prompt_ids": list(request.prompt_ids),
        "completion_ids": list(completion.completion_ids),
        "sampler_logprobs": list(completion.sampler_logprobs or ()) if has_logprobs else None,
        "logprobs_reason": completion.logprobs_reason,
        "sampled_bounds": _sampled_bounds(completion),
    }
    return rollout, tokens


def _sampled_bounds(completion: Completion) -> list[int] | None:
    """Return where what was sampled starts and ends; None: it is all there is."""
    if completion.num_sampled_tokens == len(completion.completion_ids):
        return None
    sampled = [turn for turn in completion.turns if turn.speaker == "assistant"]
    return [
        bound
        for turn in sampled
        for bound in (turn.first_token, turn.first_token + turn.num_tokens)
    ]


def turn_rows(place: Mapping[str, Any], completion: Completion) -> list[Row]:
    """Return the `turns` rows of an episode; none of a single completion."""
    return [
        {
            "run_id": place["run_id"],
            "iteration": place["iteration"],
            "rollout_id": storage.event_id("rollouts", place),
            "turn": number,
            "role": turn.speaker,
            "first_token": turn.first_token,
            "num_tokens": turn.num_tokens,
            "messages_json": json.dumps([dict(m) for m in turn.messages], ensure_ascii=False),
            "status": turn.status,
            "policy_version": turn.policy_version,
        }
        for number, turn in enumerate(completion.turns)
    ]


def stored_turn(row: Mapping[str, Any]) -> Turn:
    """Return the turn of a `turns` row."""
    return Turn(
        row["role"],
        row["first_token"],
        row["num_tokens"],
        stored_messages(row["messages_json"]),
        row["status"],
        row["policy_version"],
    )


def score_row(rollout: Row, scorer: Scorer, judged: Judgement, iteration: int | None = None) -> Row:
    """Return the `scores` row of one judgement, made in the rollout's iteration or another."""
    score = judged.score
    return {
        "iteration": rollout["iteration"] if iteration is None else iteration,
        "target_id": rollout["event_id"],
        "scorer": scorer.name,
        "scorer_version": scorer.version,
        "attempt": 0,
        "target_kind": "rollout",
        "kind": "reward",
        "value": score.value,
        "status": score.status,
        "components_json": json.dumps(dict(score.components), sort_keys=True),
        "feedback": score.feedback,
        "elapsed_ms": judged.elapsed_ms,
        "signature": solution_signature(rollout["completion"]) if score.status == "ok" else None,
    }


def value_model_row(facts: Row, examined: Health) -> Row:
    """Return the `value_models` row of a model that was fitted and examined."""
    shared = ("num_states", "num_prompts", "num_mixed_prompts", "auroc", "within_prompt_auroc",
              "brier", "length_corr", "signature_corr", "verdict")  # fmt: skip
    parts = {"calibration": examined.calibration, "by_age": examined.by_age}
    metrics = {name: [asdict(bucket) for bucket in buckets] for name, buckets in parts.items()}
    own = {name: getattr(examined, name) for name in shared}
    return facts | own | {"scorer": "value", "metrics_json": json.dumps(metrics)}


def value_row(iteration: int, state_id: str, version: str, value: float | None) -> Row:
    """Return the `scores` row of a state judged by a value model; None where it has no features."""
    return {
        "iteration": iteration,
        "target_id": state_id,
        "scorer": "value",
        "scorer_version": version,
        "attempt": 0,
        "target_kind": "state",
        "kind": "value",
        "value": value,
        "status": "scorer_error" if value is None else "ok",
        "components_json": "{}",
        "feedback": "the features are not finite" if value is None else "",
        "elapsed_ms": 0.0,
    }


def failure_row(iteration: int, phase: str, subject: str, kind: str, message: str) -> Row:
    """Return a `failures` row of a first attempt."""
    return {
        "iteration": iteration,
        "phase": phase,
        "subject": subject,
        "attempt": 0,
        "kind": kind,
        "message": message,
    }


def learn_sample(replay: Row, rollout: Row, tokens: Row, source: Row | None) -> LearnSample:
    """Return what the learner needs of one planned sample, from rows read back.

    `source` are the tokens of the rollout that a continuation's given tokens come from.
    """
    logprobs, num_given = tokens["sampler_logprobs"], replay["prefix_tokens"] or 0
    num_prompt = len(tokens["prompt_ids"]) - num_given
    given_logprobs = given_mask = None
    if num_given and source is not None:
        given_mask = sampled_mask(source["sampled_bounds"], num_given)
        if source["sampler_logprobs"] is not None:
            given_logprobs = tuple(source["sampler_logprobs"][:num_given])
    return LearnSample(
        rollout_id=replay["rollout_id"],
        group_id=replay["group_id"],
        term=TERMS.get(replay["unit"], "attempt"),
        weight=1.0 if replay["weight"] is None else replay["weight"],
        prompt_ids=tuple(tokens["prompt_ids"][:num_prompt]),
        completion_ids=tuple(tokens["completion_ids"]),
        sampler_logprobs=None if logprobs is None else tuple(logprobs),
        advantage=replay["advantage"],
        temperature=rollout["temperature"],
        prefix_ids=tuple(tokens["prompt_ids"][num_prompt:]),
        prefix_logprobs=given_logprobs,
        prefix_advantage=replay["prefix_advantage"] or 0.0,
        reward=replay["reward"],
        is_truncated=rollout["finish_reason"] == "length",
        loss_mask=sampled_mask(tokens["sampled_bounds"], len(tokens["completion_ids"])),
        prefix_mask=given_mask,
    )


def distill_sample(
    replay: Row, second: Row, second_tokens: Row, attempt_tokens: Row
) -> LearnSample:
    """Return a second attempt as a target for the prompt of the attempt that failed.

    The sampler saw it after a review, so its log-probs say nothing of it here.
    """
    return LearnSample(
        rollout_id=replay["rollout_id"],
        group_id=replay["group_id"],
        term="distill",
        weight=replay["weight"],
        prompt_ids=tuple(attempt_tokens["prompt_ids"]),
        completion_ids=tuple(second_tokens["completion_ids"]),
        sampler_logprobs=None,
        advantage=replay["advantage"],
        temperature=second["temperature"],
        loss_mask=sampled_mask(
            second_tokens["sampled_bounds"], len(second_tokens["completion_ids"])
        ),
    )


def update_row(iteration: int, step: int, batch_id: str, algorithm: str, result: StepResult) -> Row:
    """Return the `updates` row of one optimizer step."""
    return {
        "iteration": iteration,
        "step": step,
        "batch_id": batch_id,
        "algorithm": algorithm,
        "loss": result.loss,
        "policy_loss": result.policy_loss,
        "kl_loss": result.kl_loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "num_sequences": result.num_sequences,
        "num_loss_tokens": result.num_loss_tokens,
        "is_skipped": result.is_skipped,
        "metrics_json": json.dumps(result.metrics, sort_keys=True),
        "learn_s": result.elapsed_s,
    }


def learned_rows(iteration: int, step: int, samples: Sequence[SampleStats]) -> list[Row]:
    """Return the `learned_samples` rows of one optimizer step."""
    return [{"iteration": iteration, "step": step, **vars(stats)} for stats in samples]
