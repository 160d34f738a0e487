"""What must hold across the sections of a configuration; every message names both settings."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from rrl_core.review.formats import format_names

if TYPE_CHECKING:
    from flows.config import RunConfig


def check_across_sections(config: "RunConfig") -> None:
    """Raise ValueError with the first rule that does not hold."""
    rules = (_lengths, _correction, _steps, _mode, _imports, _substitutes, _review, _reward)
    for problem in chain.from_iterable(rule(config) for rule in rules):
        raise ValueError(problem)


def _lengths(config: "RunConfig") -> Iterator[str]:
    s, e = config.sampler, config.evaluation
    for name, max_tokens in (
        ("sampler.max_tokens", s.max_tokens),
        ("evaluation.max_tokens", e.max_tokens),
    ):
        if max_tokens is not None and max_tokens >= s.context_tokens:
            yield (
                f"`{name}` = {max_tokens} leaves no room for a prompt in "
                f"`sampler.context_tokens` = {s.context_tokens}: "
                "raise the second or lower the first"
            )
    if 0 < e.temperature < 0.01:
        yield f"`evaluation.temperature` = {e.temperature}: expected 0 (greedy) or 0.01 at least"


def _correction(config: "RunConfig") -> Iterator[str]:
    s, correction = config.sampler, config.learner.correction
    if correction != "none" and (s.top_p < 1 or s.top_k > 0):
        yield (
            f"`learner.correction` = {correction!r} needs log-probs of the full distribution, "
            f"but `sampler.top_p` = {s.top_p}, `sampler.top_k` = {s.top_k} cut it: "
            'set top_p = 1 and top_k = 0, or correction = "none"'
        )


def _steps(config: "RunConfig") -> Iterator[str]:
    is_offline, steps = config.run.mode == "offline", config.learner.steps
    name = "offline.samples" if is_offline else "sampler.prompts"
    number = config.offline.samples if is_offline else config.sampler.prompts
    if steps > number:
        what = "samples" if is_offline else "groups"
        yield (
            f"`learner.steps` = {steps} cannot split `{name}` = {number} {what}: "
            f"every step needs at least one"
        )


def _mode(config: "RunConfig") -> Iterator[str]:
    mode, units = config.run.mode, list(config.replay.units)
    if mode == "online" and units:
        yield (
            f"`run.mode` = 'online' learns from fresh rollouts alone, but `replay.units` = {units}:"
            ' set run.mode = "hybrid", or replay.units = []'
        )
    if mode != "offline":
        if config.offline.query is not None:
            yield (
                f"`run.mode` = {mode!r} asks no history, but `offline.query` = "
                f'{config.offline.query!r}: set run.mode = "offline", or leave the query out'
            )
        return
    if units:
        yield (
            "`run.mode` = 'offline' learns from what `offline.query` names, but `replay.units` = "
            f"{units}: leave the units out"
        )
    if config.evaluation.every is not None:
        yield (
            "`run.mode` = 'offline' starts no sampler, but `evaluation.every` = "
            f'{config.evaluation.every} needs one: set evaluation.every = "off", and evaluate the '
            "policies later with `rrl evaluate`"
        )
    if config.value.every is not None:
        yield (
            "`run.mode` = 'offline' samples nothing that a value model could judge, but "
            f'`value.every` = {config.value.every}: set value.every = "off"'
        )


def _imports(config: "RunConfig") -> Iterator[str]:
    replay = config.replay
    if not replay.imports:
        return
    if not {"state", "trajectory"} & set(replay.units):
        yield (
            f"`replay.imports` = {list(replay.imports)} come back as states or trajectories, "
            f"but `replay.units` = {list(replay.units)}: add one of them, or leave the imports out"
        )
    if "state" in replay.units and replay.credit == "corrected":
        yield (
            f"`replay.imports` = {list(replay.imports)} may hold states whose log-probs no "
            "correction holds for, but `replay.credit` = 'corrected' weighs prefixes by them: set "
            'replay.credit = "direct", or "none"'
        )


def _review(config: "RunConfig") -> Iterator[str]:
    review, algorithm = config.review, config.learner.algorithm
    if review.gate is None:
        if review.imports:
            yield (
                f"`review.imports` = {list(review.imports)} are reviewed beside the run's own "
                'failures, but `review.gate` = "off" reviews nothing: set review.gate = "sample"'
            )
        return
    if config.run.mode == "offline":
        yield (
            f"`review.gate` = {review.gate!r} samples reviews, but `run.mode` = 'offline' starts "
            'no sampler: set review.gate = "off", or run.mode = "hybrid"'
        )
    if algorithm in ("ppo", "sft", "raft"):
        yield (
            f"`review.gate` = {review.gate!r} compares reviews of one attempt with each other, but "
            f"`learner.algorithm` = {algorithm!r} has no advantage within a group: choose grpo, "
            "dr_grpo, dapo or gspo"
        )
    if review.format not in format_names():
        names = format_names()
        yield f"`review.format`: expected a review format of {names}; came {review.format!r}"
    if review.embedding_model is not None and review.memory != "embedding":
        yield (
            f"`review.embedding_model` = {review.embedding_model!r} ranks nothing where "
            f'`review.memory` = {review.memory!r}: set review.memory = "embedding", or '
            'review.embedding_model = "off"'
        )
    if review.reviews < 2:
        yield (
            f"`review.reviews` = {review.reviews}: a review is judged by what the others led to; "
            "expected 2 at least"
        )
    if review.max_tokens >= config.sampler.context_tokens:
        yield (
            f"`review.max_tokens` = {review.max_tokens} leaves no room for what is reviewed in "
            f"`sampler.context_tokens` = {config.sampler.context_tokens}"
        )


def _reward(config: "RunConfig") -> Iterator[str]:
    reward, max_tokens = config.reward, config.sampler.max_tokens
    gain = 0.0 if reward.format is None else reward.format_weight
    loss = 0.0 if reward.overlong_tokens is None else reward.overlong_weight
    if gain + loss >= 1:
        yield (
            f"`reward.format_weight` = {gain} and `reward.overlong_weight` = {loss} add up to 1 or "
            "more: a wrong answer could earn more than a right one; lower one"
        )
    if reward.overlong_tokens is not None and reward.overlong_tokens > max_tokens:
        yield (
            f"`reward.overlong_tokens` = {reward.overlong_tokens} are more than "
            f"`sampler.max_tokens` = {max_tokens}: lower the first or raise the second"
        )


def _substitutes(config: "RunConfig") -> Iterator[str]:
    units, algorithm = list(config.replay.units), config.learner.algorithm
    if not config.replay.replace_zero_variance:
        return
    if "trajectory" not in units:
        yield (
            "`replay.replace_zero_variance` = true puts trajectories into fresh groups, but "
            f'`replay.units` = {units}: add "trajectory", or leave the first out'
        )
    if algorithm in ("ppo", "sft"):
        yield (
            "`replay.replace_zero_variance` = true is for advantages within a group, but "
            f"`learner.algorithm` = {algorithm!r} has none: leave the first out"
        )
