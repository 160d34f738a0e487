"""Reviews and second attempts as an iteration learns from them, read back from the log.

The reviews of one attempt and the second attempts they led to are one group (SRRL, arXiv
2607.05541): a review is worth what its second attempt earned, compared with the others'. A
successful second attempt is distilled: it becomes a target for the prompt alone.

Our choice: whether a prompt is solved already, so that nothing is distilled for it, is told by its
last 16 attempts, those of the iteration itself included: they are the newest there are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import storage
from flows.config import RunConfig
from flows.lineage import lineage_of
from flows.translate import Row, stored_prompt
from rrl_core.replay.outcomes import SUCCESS, is_success
from rrl_core.review.credit import is_distilled, review_advantages
from rrl_core.review.formats import ReviewFormat, load_format, parse_review
from rrl_core.review.leak import leak_stratum
from rrl_core.tasks.protocol import Messages, Prompt
from rrl_core.value.counts import success_rate
from storage import Store

RECENT = 16  # attempts that tell how often a prompt is solved


@dataclass(frozen=True)
class Tried:
    """A review, the second attempt it led to, and the score of that."""

    review: Row
    second: Row
    score: Row
    advantage: float


@dataclass(frozen=True)
class ReviewedGroup:
    """A failed attempt, how often its prompt succeeds, and what its reviews led to."""

    attempt: Row
    p_hat: float
    tried: list[Tried]


def reviewed_groups(
    store: Store, run_id: str, iteration: int, scorer: tuple[str, str]
) -> list[ReviewedGroup]:
    """Return what an iteration reviewed, in the order sampled; what was not scored is left out."""
    read = partial(store.read, run_id=run_id, iteration=iteration)
    rollouts = {r["event_id"]: r for r in read("rollouts") if r["status"] == "ok"}
    seconds = {r["parent_id"]: r for r in rollouts.values() if r["role"] == "second_attempt"}
    if not seconds:
        return []
    scores = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == scorer and row["value"] is not None
    }
    of_attempt: dict[str, list[tuple[Row, Row]]] = {}
    for rollout in rollouts.values():
        second = seconds.get(rollout["event_id"])
        if rollout["role"] == "review" and second is not None and second["event_id"] in scores:
            of_attempt.setdefault(rollout["parent_id"], []).append((rollout, second))
    attempts = _attempts(store, rollouts, of_attempt)
    prompts = {attempt["prompt_id"] for attempt in attempts.values()}
    rates = _success_rates(store, run_id, iteration, prompts, list(rollouts.values()), scores)
    groups = []
    for attempt_id, pairs in of_attempt.items():
        found = [scores[second["event_id"]] for _, second in pairs]
        advantages = review_advantages([score["value"] for score in found])
        tried = [
            Tried(review, second, score, advantage)
            for (review, second), score, advantage in zip(pairs, found, advantages, strict=True)
            if advantage is not None
        ]
        attempt = attempts[attempt_id]
        groups.append(ReviewedGroup(attempt, rates[attempt["prompt_id"]], tried))
    return groups


def _attempts(
    store: Store, rollouts: Mapping[str, Row], attempt_ids: Iterable[str]
) -> dict[str, Row]:
    """Return what was reviewed, by id; `rollouts` are those of the iteration: others are older."""
    found = {i: rollouts[i] for i in attempt_ids if i in rollouts}
    missing = [i for i in attempt_ids if i not in rollouts]
    older = store.read("rollouts", event_ids=missing) if missing else []
    return found | {row["event_id"]: row for row in older}


def problem_of(messages: Messages) -> str:
    """Return what a prompt asks: all that the user says in it."""
    return "\n".join(m["content"] for m in messages if m["role"] == "user")


def review_facts(texts: ReviewFormat, prompt: Prompt, attempt: Row, review: Row) -> Row:
    """Return how a review is read: columns of `reviews` that follow from texts alone."""
    said = texts.opening + review["completion"]
    parsed = parse_review(texts, said, review["finish_reason"], attempt["completion"])
    return {
        "format_sha256": texts.sha256,
        "status": parsed.status,
        "what_went_wrong": parsed.what_went_wrong,
        "what_to_do": parsed.what_to_do,
        "review": parsed.text,
        "leak": leak_stratum(parsed.text, prompt.answer, problem_of(prompt.messages)),
    }


def read_again(store: Store, run_id: str, iteration: int, format_name: str) -> list[Row]:
    """Return the iteration's reviews as they are read today: place and facts, from the log alone.

    Those asked for with other texts than today's format has are left out.
    """
    read = partial(store.read, run_id=run_id, iteration=iteration)
    texts = load_format(format_name)
    rollouts = {row["event_id"]: row for row in read("rollouts")}
    prompts = {row["prompt_id"]: stored_prompt(row) for row in store.read("prompts", run_id=run_id)}
    reviews = read("reviews")
    attempts = _attempts(store, rollouts, [row["attempt_id"] for row in reviews])
    return [
        {"rollout_id": row["rollout_id"]}
        | review_facts(
            texts,
            prompts[row["prompt_id"]],
            attempts[row["attempt_id"]],
            rollouts[row["rollout_id"]],
        )
        for row in reviews
        if row["format_sha256"] == texts.sha256
    ]


def _success_rates(
    store: Store,
    run_id: str,
    iteration: int,
    prompts: Collection[str],
    rollouts: Sequence[Row],
    scores: dict[str, Row],
) -> dict[str, float]:
    """Return the success rate of each of `prompts`, over its last attempts up to now."""
    tries: dict[str, list[tuple[int, int]]] = {p: [] for p in prompts}  # (ok, tried), newest first
    own: dict[str, list[bool]] = {}
    for rollout in rollouts:
        if rollout["role"] == "attempt" and rollout["event_id"] in scores:
            ok = is_success(scores[rollout["event_id"]]["value"])
            own.setdefault(rollout["prompt_id"], []).append(ok)
    for prompt_id, outcomes in own.items():
        tries[prompt_id] = [(sum(outcomes), len(outcomes))]
    [pin] = store.read("views_pinned", run_id=run_id, iteration=iteration)
    history = lineage_of(store, run_id).view(store, "prompt_history", pin["as_of"])
    for row in reversed(history):
        if row["prompt_id"] in tries:
            tries[row["prompt_id"]].append((row["num_ok"], row["num_scored"]))
    return {prompt_id: _rate(counts) for prompt_id, counts in tries.items()}


def _rate(counts: Sequence[tuple[int, int]]) -> float:
    """Return the smoothed rate over the newest iterations that hold `RECENT` attempts."""
    num_ok = num_tried = 0
    for ok, tried in counts:
        if num_tried >= RECENT:
            break
        num_ok, num_tried = num_ok + ok, num_tried + tried
    return float(success_rate(num_ok, num_tried))


def distillation_rows(config: RunConfig, groups: Sequence[ReviewedGroup]) -> list[Row]:
    """Return the `distillations` rows: the successful second attempts at prompts not yet solved."""
    if config.review.distill_coef == 0:
        return []
    return [
        {
            "iteration": tried.second["iteration"],
            "rollout_id": tried.second["event_id"],
            "attempt_id": group.attempt["event_id"],
            "review_id": tried.review["event_id"],
            "prompt_id": group.attempt["prompt_id"],
        }
        for group in groups
        for tried in group.tried
        if group.attempt["role"] == "attempt"  # not an imported one: no prompt of the policy's own
        and is_distilled(tried.score["value"], SUCCESS, group.p_hat)
    ]


def review_samples(
    config: RunConfig, iteration: int, groups: Sequence[ReviewedGroup]
) -> list[tuple[str, Row]]:
    """Return what is learned from reviews: (what decides which step it is in, `replays` facts)."""
    targets = {row["rollout_id"]: row for row in distillation_rows(config, groups)}
    samples = []
    for group in groups:
        key = f"review {group.attempt['prompt_id']}"
        for tried in group.tried:
            second_id = tried.second["event_id"]
            facts = _facts(iteration, tried)
            given = facts | {"rollout_id": tried.review["event_id"], "unit": "review"}
            samples.append((key, given | {"weight": config.review.review_coef}))
            given = facts | {"rollout_id": second_id, "unit": "second_attempt"}
            samples.append((key, given | {"weight": config.review.second_coef}))
            if second_id in targets:
                place = targets[second_id] | {"run_id": tried.second["run_id"]}
                target_id = storage.event_id("distillations", place)
                given = facts | {"rollout_id": target_id, "unit": "distill", "advantage": 1.0}
                samples.append((key, given | {"weight": config.review.distill_coef}))
    return samples


def _facts(iteration: int, tried: Tried) -> Row:
    """Return what a review, its second attempt and its target share."""
    return {
        "iteration": iteration,
        "group_id": tried.review["group_id"],
        "source_run_id": tried.review["run_id"],
        "score_id": tried.score["event_id"],
        "reward": tried.score["value"],
        "advantage": tried.advantage,
        "priority": None,
        "probability": None,
        "pick_kind": "fresh",
        "age": iteration - 1 - tried.review["policy_version"],
        "pick_id": None,
        "prefix_tokens": None,
        "prefix_advantage": None,
    }
