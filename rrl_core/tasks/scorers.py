"""Judges of completions: the built-in ones, a user's own function, and the guard around them all.

Feedback and components tell only what does not depend on the reference answer beyond right or
wrong: a policy that reads them learns nothing of the answer.
"""

import contextlib
import hashlib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from rrl_core.tasks.answers import ends_with_answer_line, find_answer, read_reference
from rrl_core.tasks.protocol import BatchScorer, Prompt, Score, Scorer, ScoreStatus, TaskError

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


def make_scorers(reward: str) -> tuple[Scorer, ...]:
    """Return the scorers of a task, the one named `reward` first.

    Args:
        reward: a built-in scorer's name, or `module:function`. The other built-in scorers follow a
            built-in one; a function stands alone.

    Raises:
        TaskError: there is no such scorer, or the function cannot be loaded.
    """
    if reward in BUILT_IN:
        others = (scorer for name, scorer in BUILT_IN.items() if name != reward)
        return (BUILT_IN[reward], *others)
    return (load_reward(reward),)


def load_reward(spec: str) -> FunctionScorer:
    """Load the reward function `module:function`, see `load_function`."""
    function, version = load_function("reward", spec, f" or one of {', '.join(BUILT_IN)}")
    return FunctionScorer(spec, version, function)


def load_function(what: str, spec: str, others: str = "") -> tuple[Callable[..., Any], str]:
    """Load `module:function` and the hash of its file; the module may stand in the working folder.

    The working folder joins the end of `sys.path`, so that it can hide no installed package.

    Args:
        what: the parameter that names it, for messages.
        spec: the function.
        others: what else the parameter may be, for messages.

    Raises:
        TaskError: the spec, the module or the function is not as expected.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise TaskError(f"{what}: expected `module:function`{others}; came `{spec}`")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise TaskError(
            f"{what} `{spec}`: importing `{module_name}` raised {type(error).__name__}: {error}; "
            f"put `{module_name}.py` into {os.getcwd()} or install it"
        ) from error
    source = inspect.getsourcefile(module)
    function = getattr(module, function_name, None)
    if source is None or not callable(function):
        raise TaskError(
            f"{what} `{spec}`: expected a function `{function_name}` in a Python file; "
            f"`{module_name}` ({getattr(module, '__file__', 'built in')}) has none"
        )
    return function, hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]


def score_all(scorer: Scorer, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Score]:
    """Return the score of each completion, by `judge_many` where there is one, else `score_one`.

    Args:
        scorer: the judge.
        prompts: the prompt of each completion, in order.
        completions: as many texts as there are prompts.

    Raises:
        TaskError: there are not as many prompts as completions.
    """
    if len(prompts) != len(completions):
        raise TaskError(
            f"expected one prompt per completion; came {len(prompts)} prompts and "
            f"{len(completions)} completions"
        )
    if isinstance(scorer, BatchScorer):
        with contextlib.suppress(Exception):  # then each by itself: who raises costs one score
            scores = scorer.judge_many(prompts, completions)
            return [_checked(score) for _, score in zip(prompts, scores, strict=True)]
    return [score_one(scorer, *pair) for pair in zip(prompts, completions, strict=True)]


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
