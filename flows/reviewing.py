"""Self-review: which failed attempts are reviewed, with what memory, and what is tried again.

SRRL (arXiv 2607.05541). One failed attempt of a gated prompt is reviewed several times, and each
review leads to a second attempt that sees the review and no longer the attempt. For some of the
gated prompts an answer of a control arm is sampled too; it is compared with, never learned from.

Everything here is a function of committed events, of the memory at the pin and of the seed, so a
resumed run asks for the same rollouts.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow.compute as pc

from flows.config import ReviewSection, RunConfig
from flows.embedding import embedder_of
from flows.generation import Group
from flows.lineage import lineage_of
from flows.mining import imported_failures
from flows.reviewed import problem_of, review_facts
from flows.translate import Row, stored_messages
from flows.wiring import Session
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.review.arms import ARMS, choose_arm
from rrl_core.review.formats import ReviewFormat, load_format
from rrl_core.review.gate import gated_attempts
from rrl_core.review.memory import MemoryEntry, MemoryRule, Query, Retrieved, retrieve
from rrl_core.review.messages import (
    blank_messages,
    feedback_messages,
    retry_messages,
    review_messages,
    second_messages,
)
from rrl_core.review.similarity import Embedder
from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import Messages, Prompt
from storage import Store

VIEW = "memory"
UNREVIEWED_ARM = "no_memory_review"  # the review of a no_memory control: no answer
ANSWER_ROLES = ("second_attempt", "control")


@dataclass(frozen=True)
class Gated:
    """A prompt whose attempt failed: that attempt, its feedback, its control arm.

    The attempt is one of the iteration, or an imported response.
    `shown` are the earlier reviews that its own are shown, each with the similarity of its problem.
    """

    prompt: Prompt
    attempt: Row
    feedback: str
    shown: list[tuple[MemoryEntry, float]]
    arm: str | None

    @property
    def lessons(self) -> list[str]:
        """Return the texts of what memory is shown."""
        return [entry.text for entry, _ in self.shown]


@dataclass(frozen=True)
class Source:
    """Where it is told what failed: a run in the log, the scorer that judges, the prompts."""

    store: Store
    run_id: str
    config: RunConfig
    judge: tuple[str, str]
    prompts: Mapping[str, Prompt]


def gated_of(session: Session, iteration: int) -> list[Gated]:
    """Return the prompts of an iteration whose failed attempt is reviewed, in the order sampled."""
    if iteration not in session.gated:
        scorer = session.reward_scorer
        prompts = {prompt.prompt_id: prompt for prompt in session.prompts("train")}
        source = Source(
            session.store, session.run_id, session.config, (scorer.name, scorer.version), prompts
        )
        session.gated = {iteration: gated(source, iteration)}
    return session.gated[iteration]


def gated(source: Source, iteration: int) -> list[Gated]:
    """Return what an iteration reviews: a function of the log, and of the seed."""
    config, store, run_id = source.config.review, source.store, source.run_id
    assert config.gate is not None
    read = partial(store.read, run_id=run_id, iteration=iteration)
    attempts = [r for r in read("rollouts") if r["role"] == "attempt" and r["status"] == "ok"]
    scores = {
        row["target_id"]: row
        for row in read("scores")
        if (row["scorer"], row["scorer_version"]) == source.judge
    }
    values = [scores[a["event_id"]]["value"] if a["event_id"] in scores else None for a in attempts]
    chosen = gated_attempts(
        values,
        [a["group_id"] for a in attempts],
        [a["sample_index"] for a in attempts],
        config.gate,
        SUCCESS,
    )
    failed = [(attempts[i], scores[attempts[i]["event_id"]]["feedback"]) for i in chosen]
    attempted = {r["prompt_id"] for r in read("rollouts") if r["role"] == "attempt"}
    failed += imported_failures(source, iteration, attempted)
    asked = [source.prompts[attempt["prompt_id"]] for attempt, _ in failed]
    [pin] = read("views_pinned")
    memory = read_memory(store, run_id, config, pin["as_of"])
    shown = _retrieved(config, memory, asked)
    arms = _arms(source, iteration, pin["as_of"], asked, shown)
    return [
        Gated(prompt, attempt, feedback, [(memory[f.entry], f.similarity) for f in found], arm)
        for prompt, (attempt, feedback), found, arm in zip(asked, failed, shown, arms, strict=True)
    ]


def read_memory(store: Store, run_id: str, config: ReviewSection, as_of: int) -> list[MemoryEntry]:
    """Return the verified reviews at a pin, oldest first: of the run, or of the whole store."""
    if config.memory is None:
        return []
    run = run_id if config.memory_runs == "run" else None
    rows = store.view(VIEW, arguments={"run": run}, as_of=as_of)
    vectors = _vectors(store, as_of, embedder_of(config)) if config.memory == "embedding" else {}
    return [
        MemoryEntry(
            row["review_id"],
            row["prompt_id"],
            problem_of(stored_messages(row["messages_json"])),
            row["review"],
            row["num_tokens"],
            row["num_helpful"],
            row["num_harmful"],
            vectors.get(row["prompt_id"]),
        )
        for row in rows
    ]


def _vectors(store: Store, as_of: int, embedder: Embedder) -> dict[str, Any]:
    """Return the stored vectors by prompt id, as arrays: lists of them would take seconds."""
    vectors: dict[str, Any] = {}
    for batch in store.batches("embeddings", as_of=as_of):
        made = batch.filter(pc.equal(batch["model"], embedder.name))
        if len(made):
            vectors_ND = made["vector"].flatten().to_numpy().reshape(len(made), -1)
            vectors.update(zip(made["target_id"].to_pylist(), vectors_ND, strict=True))
    return vectors


def _retrieved(
    config: ReviewSection, memory: Sequence[MemoryEntry], asked: Sequence[Prompt]
) -> list[list[Retrieved]]:
    if config.memory is None:
        return [[] for _ in asked]
    rule = MemoryRule(
        config.memory, config.memory_entries, config.memory_tokens, config.memory_floor
    )
    queries = [Query(p.prompt_id, problem_of(p.messages), p.answer) for p in asked]
    return retrieve(memory, queries, rule, embedder_of(config))


def _arms(
    source: Source,
    iteration: int,
    as_of: int,
    asked: Sequence[Prompt],
    shown: Sequence[Sequence[Retrieved]],
) -> list[str | None]:
    """Return the control arm of each gated prompt: None for most."""
    if not source.config.review.controls:
        return [None] * len(asked)
    counts: Counter[str] = Counter()
    for stretch in lineage_of(source.store, source.run_id).stretches:  # a fork goes on counting
        until = stretch.until(as_of)
        for row in source.store.view("sampled_budget", run_id=stretch.run_id, as_of=until):
            if row["role"] == "control" and row["arm"] != UNREVIEWED_ARM:
                counts[row["arm"]] += row["num_rollouts"]
    arms = []
    for prompt, found in zip(asked, shown, strict=True):
        seed = derive_seed(source.config.run.seed, "arm", iteration, prompt.prompt_id)
        missing = {"no_memory": not found, "random_review": len(asked) < 2}
        arm = choose_arm(counts, seed, [name for name in ARMS if not missing.get(name)])
        if arm is not None:
            counts[arm] += 1
        arms.append(arm)
    return arms


def review_groups(session: Session, chosen: Sequence[Gated]) -> list[Group]:
    """Return the reviews to sample: several of each failed attempt, one more without memory."""
    config = session.config.review
    texts = load_format(config.format)
    groups = []
    for one in chosen:
        request = partial(
            review_messages, texts, one.prompt, one.attempt["completion"], one.feedback
        )
        parent = one.attempt["event_id"]
        asked = Group(
            "review", one.prompt, config.reviews, parent, opening=texts.opening, is_judged=False
        )
        groups.append(replace(asked, messages=request(one.lessons)))
        if one.arm == "no_memory":
            control = replace(asked, role="control", size=1, arm=UNREVIEWED_ARM)
            groups.append(replace(control, messages=request([])))
    return groups


def review_rows(session: Session, iteration: int, chosen: Sequence[Gated]) -> dict[str, list[Row]]:
    """Return the `reviews` rows of an iteration's reviews as they are read, and the vectors."""
    texts = load_format(session.config.review.format)
    of_attempt = {one.attempt["event_id"]: one for one in chosen}
    rollouts = session.store.read("rollouts", run_id=session.run_id, iteration=iteration)
    rows = [
        _review_row(session, texts, of_attempt[rollout["parent_id"]], rollout)
        for rollout in rollouts
        if rollout["status"] == "ok" and _is_review(rollout)
    ]
    embedded, embedder = {}, embedder_of(session.config.review)
    if session.config.review.memory == "embedding":
        asked = {one.prompt.prompt_id: problem_of(one.prompt.messages) for one in chosen}
        vectors = embedder.embed(list(asked.values())).tolist() if asked else []
        embedded = dict(zip(asked, vectors, strict=True))
    return {
        "reviews": rows,
        "embeddings": [
            {"target_id": prompt_id, "model": embedder.name, "vector": vector}
            for prompt_id, vector in embedded.items()
        ],
    }


def _is_review(rollout: Row) -> bool:
    return bool(rollout["role"] == "review" or rollout["arm"] == UNREVIEWED_ARM)


def _review_row(session: Session, texts: ReviewFormat, one: Gated, rollout: Row) -> Row:
    place = {"iteration": rollout["iteration"], "rollout_id": rollout["event_id"]}
    asked = asked_facts(one, rollout["role"] == "review")
    return place | asked | review_facts(texts, one.prompt, one.attempt, rollout)


def asked_facts(one: Gated, has_memory: bool = True) -> Row:
    """Return what a review was asked with: columns of `reviews`."""
    shown = one.shown if has_memory else []
    return {
        "attempt_id": one.attempt["event_id"],
        "prompt_id": one.prompt.prompt_id,
        "feedback": one.feedback,
        "memory_json": json.dumps(
            [{"review_id": e.review_id, "similarity": round(s, 6)} for e, s in shown]
        ),
        "memory_tokens": sum(entry.num_tokens for entry, _ in shown),
    }


def second_groups(session: Session, iteration: int) -> list[Group]:
    """Return what is tried again: one answer after every review, and those of the control arms."""
    chosen = gated_of(session, iteration)
    read = partial(session.store.read, run_id=session.run_id, iteration=iteration)
    texts = load_format(session.config.review.format)
    reviews = {row["rollout_id"]: row for row in read("reviews")}
    rollouts = [r for r in read("rollouts") if r["event_id"] in reviews]
    prompts = {one.prompt.prompt_id: one.prompt for one in chosen}
    groups = [
        Group(
            "second_attempt" if is_treated else "control",
            prompts[rollout["prompt_id"]],
            1,
            rollout["event_id"],
            messages=second_messages(
                texts, prompts[rollout["prompt_id"]], reviews[rollout["event_id"]]["review"]
            ),
            first_index=rollout["sample_index"] if is_treated else 1,
            arm=None if is_treated else "no_memory",
        )
        for rollout in rollouts
        for is_treated in [rollout["role"] == "review"]
    ]
    given = [reviews[r["event_id"]] for r in rollouts if r["role"] == "review"]
    return groups + [
        group
        for one in chosen
        if (group := _control_group(session, texts, iteration, one, given)) is not None
    ]


def _control_group(
    session: Session, texts: ReviewFormat, iteration: int, one: Gated, reviews: Sequence[Row]
) -> Group | None:
    """Return the control answer of a gated prompt that follows no review of its own attempt."""
    messages: Messages
    if one.arm == "retry":
        messages = retry_messages(one.prompt)
    elif one.arm == "blank":
        messages = blank_messages(texts, one.prompt)
    elif one.arm == "raw_feedback":
        messages = feedback_messages(texts, one.prompt, one.feedback)
    elif one.arm == "random_review":
        others = [row["review"] for row in reviews if row["prompt_id"] != one.prompt.prompt_id]
        if not others:
            return None
        seed = derive_seed(session.config.run.seed, "random", iteration, one.prompt.prompt_id)
        messages = second_messages(texts, one.prompt, others[seed % len(others)])
    else:
        return None
    return Group("control", one.prompt, 1, one.attempt["event_id"], messages=messages, arm=one.arm)
