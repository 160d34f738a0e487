"""A reward made of parts: outcome, format, novelty, and a penalty for what grows too long.

    reward = outcome + format_weight * format + novelty_weight * novelty * outcome
             - overlong_weight * overlong

outcome   the value of the task's own scorer; or, with `components`, the weighted mean of those of
          its components that the score has, `outcome` standing for the value itself.
format    1 where the completion has the form of `FORMATS` exactly once, with something in it.
novelty   how far the nearest other attempt is (`rrl_core.exploration.novelty`), 0 for a copy.
overlong  0 to 1 as the length passes through the last `overlong_tokens` below the limit: soft
          overlong punishment of DAPO (arXiv 2503.14476, section 3.4).

Nothing but the outcome is the default. Every part is a component of the score, so another weighing
of them is another scorer version over the same history.

Our choices:
1. `format_weight` + `overlong_weight` < 1: with outcomes of 0 and 1 no right answer earns less than
   a wrong one. DAPO's penalty of 1 belongs to outcomes of -1 and 1; here its like is 0.5.
2. Format and novelty make no success of what is none: below an outcome of 1 a reward stays below 1.
3. Novelty pays in proportion to the outcome: what is merely different earns nothing.
4. Length and novelty come with the rollout, as `RolloutFacts`: a scorer sees one completion, and
   knows of the others only what the log says. A completion whose length is not known is
   `unscorable` under a penalty; one that is compared with nobody has no novelty.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rrl_core.tasks.answers import ends_with_answer_line
from rrl_core.tasks.protocol import (
    SUCCESS,
    Prompt,
    RolloutFacts,
    Score,
    Scorer,
    Task,
    TaskError,
)

VERSION = "1"  # of the formulas above
BELOW_SUCCESS = 0.99  # the most that bonuses make of an outcome that is none

_SECTION = r"<{0}>(?P<{0}>(?:(?!</?(?:think|answer)>).)*)</{0}>"
_ANSWER = re.compile(_SECTION.format("answer") + r"\s*\Z", re.DOTALL)
_THINK_ANSWER = re.compile(
    r"\s*" + _SECTION.format("think") + r"\s*" + _SECTION.format("answer") + r"\s*", re.DOTALL
)
_TAG = re.compile(r"</?(think|answer)\b", re.IGNORECASE)
_FENCES = ("```", "~~~")


@dataclass(frozen=True)
class Shaping:
    """How a reward is made; the default is the outcome alone.

    Weights are 0 or more; `format_weight` counts with a `format`, `overlong_weight` with
    `overlong_tokens`.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    format: str | None = None
    format_weight: float = 0.1
    overlong_tokens: int | None = None
    overlong_weight: float = 0.5
    novelty_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise TaskError(f"format: expected one of {', '.join(FORMATS)}; came `{self.format}`")
        most_gained = self.format_weight if self.format is not None else 0.0
        most_lost = self.overlong_weight if self.overlong_tokens is not None else 0.0
        if most_gained + most_lost >= 1:
            raise TaskError(
                f"expected format_weight + overlong_weight below 1, else a wrong answer may earn "
                f"more than a right one; came {most_gained} + {most_lost}; lower one"
            )

    @property
    def is_outcome_only(self) -> bool:
        """Whether it leaves every score as it is."""
        parts = (self.components, self.format, self.overlong_tokens, self.novelty_weight)
        return not any(parts)


class ShapedReward:
    """The scorer `outcome` with its value shaped; `name` is `shaped:` and that of the outcome's."""

    def __init__(self, outcome: Scorer, shaping: Shaping) -> None:
        self.outcome, self.shaping = outcome, shaping
        self.name = f"shaped:{outcome.name}"
        text = json.dumps([VERSION, outcome.version, asdict(shaping)], sort_keys=True)
        self.version = hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def needs_novelty(self) -> bool:
        """Whether novelty has a weight."""
        return self.shaping.novelty_weight > 0

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by what can be seen of it alone."""
        return self.judge_outcome(self.outcome(prompt, completion), completion, RolloutFacts())

    def judge_outcome(self, outcome: Score, completion: str, facts: RolloutFacts) -> Score:
        """Judge `completion` by the score of its outcome and what its rollout says."""
        return shape(self.shaping, outcome, completion, facts)


def shaped_task(task: Task, shaping: Shaping) -> Task:
    """Return `task` with its reward shaped; its own scorers stay behind it."""
    if shaping.is_outcome_only:
        return task
    return _ShapedTask(task, shaping)


class _ShapedTask:
    """A task with another reward; whatever else it has is as it was."""

    def __init__(self, task: Task, shaping: Shaping) -> None:
        self._task = task
        self.name = task.name
        self.scorers: Sequence[Scorer] = (ShapedReward(task.scorers[0], shaping), *task.scorers)
        self.prompts = task.prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def shape(shaping: Shaping, score: Score, completion: str, facts: RolloutFacts) -> Score:
    """Return `score` with its value shaped and the parts among its components.

    What has no value keeps its status.
    """
    if score.value is None:
        return score
    outcome = _outcome(shaping, score.value, score.components)
    if outcome is None:
        wanted = ", ".join(shaping.components)
        return _unscorable(score, f"the score has none of the components {wanted}")
    parts, bonus, penalty = {"outcome": outcome}, 0.0, 0.0
    if shaping.format is not None:
        parts["format"] = float(FORMATS[shaping.format](completion))
        bonus += shaping.format_weight * parts["format"]
    if shaping.novelty_weight > 0 and facts.novelty is not None:
        parts["novelty"] = facts.novelty
        bonus += shaping.novelty_weight * facts.novelty * max(0.0, outcome)
    if shaping.overlong_tokens is not None:
        if facts.num_tokens is None or not facts.max_tokens:
            return _unscorable(score, "its length in tokens, or their limit, is not known")
        buffer = min(shaping.overlong_tokens, facts.max_tokens)
        parts["overlong"] = -overlong_penalty(
            facts.num_tokens, max_tokens=facts.max_tokens, buffer_tokens=buffer
        )
        penalty = shaping.overlong_weight * parts["overlong"]
    value = outcome + bonus
    if bonus and outcome < SUCCESS:
        value = max(outcome, min(value, BELOW_SUCCESS))
    return Score(value - penalty, "ok", {**score.components, **parts}, score.feedback)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the reward term that makes a completion near the length limit less welcome.

        0                                             num_tokens <= max_tokens - buffer_tokens
        (max_tokens - buffer_tokens - num_tokens) / buffer_tokens           within the buffer
        -1                                            num_tokens > max_tokens

    Args:
        num_tokens: length of the completion.
        max_tokens: the limit.
        buffer_tokens: width of the zone below the limit in which the penalty grows, 1..max_tokens.

    Returns:
        A number in [-1, 0], to be added to the reward.

    Raises:
        ValueError: the buffer is empty or wider than the limit.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"expected 1 <= buffer_tokens <= max_tokens, got {buffer_tokens} and {max_tokens}"
        )
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def has_answer_line(completion: str) -> bool:
    """Return whether the last line with text is `#### <number>`, with the only marker there is."""
    is_once = completion.count("####") == 1
    return is_once and ends_with_answer_line(completion) and _is_text(completion)


def has_answer_tags(completion: str) -> bool:
    """Return whether the completion ends with its only `<answer>...</answer>`."""
    match = _ANSWER.search(completion)
    is_once = len(_TAG.findall(completion)) == 2
    return match is not None and is_once and _is_filled(match) and _is_text(completion)


def has_think_and_answer(completion: str) -> bool:
    """Return whether `<think>...</think><answer>...</answer>` are the whole completion."""
    match = _THINK_ANSWER.fullmatch(completion)
    is_once = len(_TAG.findall(completion)) == 4
    return match is not None and is_once and _is_filled(match) and _is_text(completion)


FORMATS: Mapping[str, Callable[[str], bool]] = {
    "answer_line": has_answer_line,
    "answer_tags": has_answer_tags,
    "think_answer": has_think_and_answer,
}


def _outcome(shaping: Shaping, value: float, components: Mapping[str, float]) -> float | None:
    if not shaping.components:
        return value
    values = {**components, "outcome": value}
    weights = {name: w for name, w in shaping.components.items() if name in values and w > 0}
    total = sum(weights.values())
    return sum(w * values[name] for name, w in weights.items()) / total if total else None


def _unscorable(score: Score, why: str) -> Score:
    return Score(None, "unscorable", score.components, why)


def _is_filled(match: re.Match[str]) -> bool:
    return all(map(_has_content, match.groupdict().values()))


def _has_content(text: str) -> bool:
    """Return whether a letter or figure stands in `text`."""
    return any(map(str.isalnum, text))


def _is_text(completion: str) -> bool:
    """Return whether no block of code is left open, so that the end of it is no code."""
    return all(completion.count(fence) % 2 == 0 for fence in _FENCES)
