"""One sampler phase: requests with seeds by place, cut into batches; a batch is one commit.

A batch is the unit of resumption: it is in the log whole, or it is generated again whole.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import storage
from flows import conversing
from flows.translate import Row, failure_row, prompt_row, rollout_place, rollout_rows, turn_rows
from flows.wiring import Session
from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
    Turn,
)
from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import Messages, Prompt
from rrl_core.tasks.scoring_pool import Asked


@dataclass(frozen=True)
class Group:
    """Completions that will be compared: how many of a prompt, or of a state, in which role.

    Of a state `parent_id` is its event id, `prefix_ids` are its given tokens, `prefix_sha256` their
    hash, and `turns` what they hold where the task has an environment. `messages` are asked in the
    prompt's place where something else is, and answered behind `opening`; `first_index` is the
    sample index of the first, `arm` names what a control is compared with. `is_judged` tells
    whether the task's scorers judge them.
    """

    role: str
    prompt: Prompt
    size: int
    parent_id: str = ""
    prefix_ids: tuple[int, ...] = ()
    prefix_sha256: str = ""
    messages: Messages | None = None
    opening: str = ""
    first_index: int = 0
    arm: str | None = None
    turns: tuple[Turn, ...] = ()
    is_judged: bool = True

    @property
    def num_given_tokens(self) -> int:
        """How many of its given tokens were sampled: they count for what a rollout may sample."""
        if not self.turns:
            return len(self.prefix_ids)
        return sum(turn.num_tokens for turn in self.turns if turn.speaker == "assistant")


@dataclass(frozen=True)
class Phase:
    """What a phase samples, in one way; `has_turns` where the task's environment may answer."""

    iteration: int
    name: str
    groups: Sequence[Group]
    params: SamplingParams
    has_turns: bool = True


@dataclass(frozen=True)
class PlannedRollout:
    """One rollout asked for: its place, its prompt, and the request to the sampler."""

    place: Row
    group: Group
    request: SampleRequest


def training_phase(session: Session, iteration: int, groups: Sequence[Group]) -> Phase:
    """Return the phase that samples what an iteration learns from, replayed states included."""
    s = session.config.sampler
    params = SamplingParams(s.temperature, s.top_p, s.top_k, s.max_tokens)
    return Phase(iteration, "attempt", groups, params)


def review_phase(session: Session, iteration: int, groups: Sequence[Group]) -> Phase:
    """Return the phase that samples reviews of failed attempts."""
    s = session.config.sampler
    params = SamplingParams(s.temperature, s.top_p, s.top_k, session.config.review.max_tokens)
    return Phase(iteration, "review", groups, params, has_turns=False)


def second_phase(session: Session, iteration: int, groups: Sequence[Group]) -> Phase:
    """Return the phase that samples second attempts, and the answers they are compared with."""
    return replace(training_phase(session, iteration, groups), name="second_attempt")


def evaluation_phase(session: Session, iteration: int) -> Phase:
    """Return the phase that samples one completion of every held-out prompt."""
    e = session.config.evaluation
    params = SamplingParams(
        e.temperature, max_tokens=e.max_tokens or session.config.sampler.max_tokens
    )
    groups = [Group("evaluation", prompt, 1) for prompt in session.prompts("eval")[: e.prompts]]
    return Phase(iteration, "evaluation", groups, params)


def plan_batches(session: Session, phase: Phase) -> Iterator[tuple[str, list[PlannedRollout]]]:
    """Yield (batch key, rollouts) of the phase, cut by index before anything is generated."""
    planned = [rollout for group in phase.groups for rollout in _planned(session, phase, group)]
    size = session.config.sampler.batch_sequences
    for number, first in enumerate(range(0, len(planned), size)):
        yield f"i{phase.iteration:06d}-{phase.name}-{number:04d}", planned[first : first + size]


def _planned(session: Session, phase: Phase, group: Group) -> Iterator[PlannedRollout]:
    """Yield a group's rollouts; seeds follow from places, and from nothing that names the run."""
    prompt_id = group.prompt.prompt_id
    asked = group.prompt.messages if group.messages is None else group.messages
    given_ids = tuple(session.policy.encode(asked, group.opening)) + group.prefix_ids
    left = max(1, phase.params.max_tokens - group.num_given_tokens)
    max_tokens = left if group.prefix_ids else None
    for index in range(group.first_index, group.first_index + group.size):
        place = rollout_place(session.run_id, phase.iteration, group.role, prompt_id, index)
        place |= {"parent_id": group.parent_id}
        parts = (group.role, phase.iteration, prompt_id, index, place["attempt"])
        state = (group.prefix_sha256,) if group.prefix_ids else ()
        seed = derive_seed(session.config.run.seed, *parts, *state)
        yield PlannedRollout(place, group, SampleRequest(given_ids, seed, max_tokens))


def generate_phase(session: Session, phase: Phase) -> int:
    """Generate and commit the batches of `phase` that are not in the log; return the new sequences.

    Stops early, between batches, when the run was asked to stop.

    Raises:
        SamplerError: the engine failed twice on the same batch.
    """
    committed = {
        row["event_id"]
        for row in session.store.read("rollouts", run_id=session.run_id, iteration=phase.iteration)
    }
    num_generated = 0
    total = sum(group.size for group in phase.groups)
    with session.progress.phase(f"{phase.name}s of iteration {phase.iteration}", total) as advance:
        for batch_key, batch in plan_batches(session, phase):
            if session.should_stop:
                break
            if storage.event_id("rollouts", batch[0].place) not in committed:
                _generate_batch(session, phase, batch_key, batch)
                num_generated += len(batch)
            advance(len(batch))
    return num_generated


def _generate_batch(
    session: Session, phase: Phase, batch_key: str, batch: Sequence[PlannedRollout]
) -> None:
    started = time.monotonic()
    completions = _sample(session, phase, batch_key, batch)
    version = session.sampler.policy_version
    policies_of = session.policy_run_id or session.run_id
    [policy] = session.store.read("policies", run_id=policies_of, iteration=version)
    facts = {
        "policy_version": version,
        "policy_digest": policy["policy_digest"],
        "engine": session.sampler.engine,
        "sync": session.sampler.sync,
        "batch_key": batch_key,
        "generate_s": time.monotonic() - started,
    }
    pairs = [
        rollout_rows(p.place, p.request, phase.params, _whole(session, p, completion), facts)
        for p, completion in zip(batch, completions, strict=True)
    ]
    for p, (rollout, _) in zip(batch, pairs, strict=True):
        rollout["prefix_tokens"] = len(p.group.prefix_ids)
        rollout["arm"] = p.group.arm
    prompts = {p.group.prompt.prompt_id: p.group.prompt for p in batch}
    session.writer.append(
        {
            "prompts": [prompt_row(prompt) for prompt in prompts.values()],
            "rollouts": [rollout for rollout, _ in pairs],
            "rollout_tokens": [tokens for _, tokens in pairs],
            "turns": [
                row
                for p, completion in zip(batch, completions, strict=True)
                for row in turn_rows(p.place, completion)
            ],
            "failures": _failed_prompts(phase, batch, completions),
        },
        batch_key=batch_key,
    )


def _whole(session: Session, planned: PlannedRollout, completion: Completion) -> Completion:
    """Return the completion with the text of the whole response, its given tokens included."""
    given = planned.group.prefix_ids
    if not given or completion.error is not None or completion.ending is not None:
        return completion  # an episode has its text already
    return replace(completion, text=session.policy.decode(given + completion.completion_ids))


def _sample(
    session: Session, phase: Phase, batch_key: str, batch: Sequence[PlannedRollout]
) -> list[Completion]:
    """Sample a batch; on an engine failure record it, restart the engine, and try once more.

    What is finished is judged while the rest is generated.
    """
    begin = _begin_judging(session, batch)
    try:
        return conversing.sample(session, phase, batch, begin)
    except SamplerError as error:
        session.scoring.forget()
        record_failure(session, phase.iteration, "generate", batch_key, error)
        session.restart_sampler()
    try:
        return conversing.sample(session, phase, batch, begin)
    except SamplerError as error:
        session.scoring.forget()
        record_failure(session, phase.iteration, "generate", batch_key, error)
        raise


def _begin_judging(session: Session, batch: Sequence[PlannedRollout]) -> OnFinished | None:
    """Return what is told of finished completions, and has them judged meanwhile.

    None where the scorers are so quick that there is nothing to gain.
    """
    if not session.scoring.has_waiting_scorers:
        return None

    def begin(place: int, completion: Completion) -> None:
        planned = batch[place]
        if planned.group.is_judged and completion.error is None:
            rollout_id = storage.event_id("rollouts", planned.place)
            text = _whole(session, planned, completion).text
            session.scoring.begin(Asked(rollout_id, planned.group.prompt, text))

    return begin


def record_failure(
    session: Session, iteration: int, phase: str, subject: str, error: BaseException
) -> None:
    """Append a `failures` row; its attempt counts the earlier failures of the same subject."""
    earlier = [
        row
        for row in session.store.read("failures", run_id=session.run_id, iteration=iteration)
        if (row["phase"], row["subject"]) == (phase, subject)
    ]
    row = failure_row(iteration, phase, subject, type(error).__name__, str(error))
    row["attempt"] = len(earlier)
    session.writer.append({"failures": [row]}, batch_key=f"i{iteration:06d}-failure")


def _failed_prompts(
    phase: Phase, batch: Sequence[PlannedRollout], completions: Sequence[Completion]
) -> list[Row]:
    """Return one `failures` row per prompt that the sampler, or its environment, did not serve."""
    failed = {
        p.group.prompt.prompt_id: (completion.ending or "prompt_refused", completion.error)
        for p, completion in zip(batch, completions, strict=True)
        if completion.error is not None
    }
    return [
        failure_row(phase.iteration, "generate", prompt_id, kind, message)
        for prompt_id, (kind, message) in failed.items()
    ]
