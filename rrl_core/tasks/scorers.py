"""Judges of completions: the built-in ones, a user's own function, and the guard around them all.

Feedback and components tell only what does not depend on the reference answer beyond right or
wrong: a policy that reads them learns nothing of the answer.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from numbers import Real
from typing import Any, get_args

from rrl_core.tasks.answers import ends_with_answer_line, find_answer, read_reference
from rrl_core.tasks.loading import load_function
from rrl_core.tasks.own_rewards import REWARD_LIMIT_S, OwnReward, prompt_of
from rrl_core.tasks.protocol import (
    FactScorer,
    Judgement,
    ParallelScorer,
    Prompt,
    RolloutFacts,
    Score,
    Scorer,
    ScoreStatus,
    TaskError,
)

RewardFunction = Callable[[Prompt, str], float | Score]


class FinalNumber:
    """1.0 when the number that the completion gives as its answer equals the reference, else 0.0.

    How the answer is found is told in `rrl_core.tasks.answers`. A reference that is not one number
    gives status "unscorable".
    """

    name = "final_number"
    version = "1"

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by its final number."""
        return _judge(prompt, completion, is_format_required=False)


class StrictFormat:
    """1.0 when the completion ends with a line `#### <number>`, and the number is right, else 0.0.

    The line holds nothing else: no unit, no second space. A reference that is not one number gives
    status "unscorable".
    """

    name = "strict_format"
    version = "1"

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by its last line."""
        return _judge(prompt, completion, is_format_required=True)


def _judge(prompt: Prompt, completion: str, is_format_required: bool) -> Score:
    answer = find_answer(completion)
    reference = None if prompt.answer is None else read_reference(prompt.answer)
    is_formatted = answer is not None and ends_with_answer_line(completion)
    components = {"has_answer": float(answer is not None), "is_formatted": float(is_formatted)}
    if reference is None:
        return Score(None, "unscorable", components, "the reference answer is not one number")
    feedback = ""
    if answer is None:
        feedback = "no number found"
    elif is_format_required and not is_formatted:
        feedback = "the last line is not `#### <number>`"
    elif answer != reference:
        feedback = "wrong answer"
    return Score(float(not feedback), "ok", components, feedback)


class FunctionScorer:
    """A function `(prompt: Prompt, completion: str) -> float | Score` as a scorer.

    The version is a hash of the file that defines the function: an edited reward is a new judge.
    """

    def __init__(self, name: str, version: str, function: RewardFunction) -> None:
        self.name = name
        self.version = version
        self._function = function

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by the function.

        Raises:
            TypeError: the function returned neither a number nor a `Score`.
        """
        result = self._function(prompt, completion)
        if isinstance(result, Score):
            return result
        if not isinstance(result, Real):
            raise TypeError(f"`{self.name}` returned {type(result).__name__}, not a number")
        return Score(float(result))


BUILT_IN: Mapping[str, Scorer] = {scorer.name: scorer for scorer in (FinalNumber(), StrictFormat())}


def make_scorers(
    reward: str, reward_time_limit_s: float | None = REWARD_LIMIT_S
) -> tuple[Scorer, ...]:
    """Return the scorers of a task, the one named `reward` first.

    Args:
        reward: a built-in scorer's name, or `module:function`. The other built-in scorers follow a
            built-in one; a function stands alone.
        reward_time_limit_s: as `make_reward` takes it.

    Raises:
        TaskError: there is no such scorer, or the function cannot be loaded.
    """
    if reward in BUILT_IN:
        others = (scorer for name, scorer in BUILT_IN.items() if name != reward)
        return (BUILT_IN[reward], *others)
    return (make_reward(reward, reward_time_limit_s),)


def make_reward(spec: str, time_limit_s: float | None = REWARD_LIMIT_S) -> Scorer:
    """Return the reward function `module:function` as a scorer.

    Args:
        spec: the function, as `load_reward` takes it.
        time_limit_s: seconds it may take for a completion, in a child process that is ended then;
            None: no limit, it is called in this process, as those of this package always are.

    Raises:
        TaskError: the spec, the module or the function is not as expected.
    """
    loaded = load_reward(spec)
    if time_limit_s is None or spec.startswith("rrl_core."):
        return loaded
    return OwnReward(spec, loaded.version, time_limit_s)


def serve_reward(spec: str, version: str) -> Callable[[Any], dict[str, Any]]:
    """Return what answers the questions of `OwnReward`, in its child process.

    Raises:
        TaskError: the function cannot be loaded, or its file is no longer that of `version`.
    """
    loaded = load_reward(spec)
    if loaded.version != version:
        raise TaskError(
            f"reward `{spec}` was edited: expected version {version}, came {loaded.version}"
        )

    def answer(question: Any) -> dict[str, Any]:
        facts, completion = question
        return asdict(score_one(loaded, prompt_of(facts), completion))

    return answer


def load_reward(spec: str) -> FunctionScorer:
    """Load the reward function `module:function`, see `load_function`."""
    loaded = load_function("reward", spec, BUILT_IN)
    version = hashlib.sha256(loaded.source.read_bytes()).hexdigest()[:12]
    return FunctionScorer(spec, version, loaded.function)


def score_all(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    facts: Sequence[RolloutFacts] | None = None,
) -> list[Score]:
    """Return the score of each completion, as `judge_all` does."""
    return [judged.score for judged in judge_all(scorer, prompts, completions, facts)]


def judge_all(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    facts: Sequence[RolloutFacts] | None = None,
) -> list[Judgement]:
    """Judge each completion, several at a time where the scorer says so.

    Args:
        scorer: the judge.
        prompts: the prompt of each completion, in order.
        completions: as many texts as there are prompts.
        facts: what a `FactScorer` has to know of each; None: nothing is known.

    Raises:
        TaskError: there are not as many prompts as completions.
    """
    if len(prompts) != len(completions):
        raise TaskError(
            f"expected one prompt per completion; came {len(prompts)} prompts and "
            f"{len(completions)} completions"
        )
    if isinstance(scorer, FactScorer):
        outcomes = judge_all(scorer.outcome, prompts, completions)
        return judge_with_facts(scorer, outcomes, completions, facts)
    judge = partial(judge_one, scorer)
    if isinstance(scorer, ParallelScorer) and len(prompts) > 1:
        with ThreadPoolExecutor(scorer.num_parallel) as threads:
            return list(threads.map(judge, prompts, completions))
    return list(map(judge, prompts, completions))


def judge_with_facts(
    scorer: FactScorer,
    outcomes: Sequence[Judgement],
    completions: Sequence[str],
    facts: Sequence[RolloutFacts] | None,
) -> list[Judgement]:
    """Return the judgements of `scorer` where those of its outcome are known already."""
    known = [RolloutFacts()] * len(outcomes) if facts is None else facts
    return [
        replace(outcome, score=_checked(scorer.judge_outcome(outcome.score, completion, fact)))
        for outcome, completion, fact in zip(outcomes, completions, known, strict=True)
    ]


def judge_one(scorer: Scorer, prompt: Prompt, completion: str) -> Judgement:
    """Return the scorer's judgement, as `score_one` gives it, and the milliseconds it took."""
    started = time.perf_counter()
    score = score_one(scorer, prompt, completion)
    return Judgement(score, (time.perf_counter() - started) * 1e3)


def score_one(scorer: Scorer, prompt: Prompt, completion: str) -> Score:
    """Return the scorer's judgement; a scorer that raises costs one score, not the batch.

    Returns:
        The score, or one with status "scorer_error" where the scorer raised (the feedback names the
        exception's type) or where what it returned is no score: a value or component that is not
        finite, a value missing while "ok" or given while not.
    """
    try:
        return _checked(scorer(prompt, completion))
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything, or exit
        # The message is left out: it may quote the reference answer.
        return Score(None, "scorer_error", feedback=f"the scorer raised {type(error).__name__}")


def _checked(score: Score) -> Score:
    """Return `score` with its numbers as floats, or an error where it breaks what `Score` says."""
    components = {name: float(value) for name, value in score.components.items()}
    value = None if score.value is None else float(score.value)
    if not all(map(math.isfinite, [*components.values(), value or 0.0])):
        return Score(None, "scorer_error", feedback="the score is not finite")
    if score.status not in get_args(ScoreStatus) or (value is None) == (score.status == "ok"):
        return Score(None, "scorer_error", feedback="the score's status and value disagree")
    return Score(value, score.status, components, score.feedback)
