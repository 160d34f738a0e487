"""Problems of `reasoning-gym`: over a hundred kinds, generated offline, each with its own scorer.

`kind` names the generator and the table `parameters` sets it. Problems are distinct by their
question; the first `num_eval` of the stream are the eval split and the next `num_train` the train
split, so a longer training leaves the evaluation as it is.

The library runs in killable child processes, generators and scorers alike: some take long, some
raise, some depend on the order of sets or on the common random source, which are fixed there. To
score, a child draws the problem again; another version of the library that draws another problem
gives `scorer_error`. A generator whose scorer pays for nonsense is refused.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import Field

from rrl_core.seeds import derive_seed
from rrl_core.tasks.prompts import PromptTask, ScorerSettings, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Score, Split, TaskError
from rrl_core.tasks.sandbox.killable import Answer, Checker
from rrl_core.tasks.scorers import make_scorers

INSTRUCTION = "Think briefly if you need to. End with the answer between <answer> and </answer>."
FUNCTION = "rrl_core.tasks.reasoning_scoring:answer"
DRAWN_AT_ONCE = 25
DRAW_LIMIT_S = 120.0  # for so many
MAX_ANSWER_CHARS = 20_000
SUCCESS = 0.999


class ReasoningScorerSettings(ScorerSettings):
    """How the generators' own scorers judge."""

    time_limit_s: float = Field(10.0, gt=0, le=600, description="Seconds that a score may take.")
    num_children: int | None = Field(
        None, ge=1, le=64, description="Processes that score; None: one for each CPU."
    )


class ReasoningSettings(ReasoningScorerSettings, TaskSettings):
    """Parameters of the task `reasoning_gym`."""

    kind: str = Field(description="The generator, such as `countdown` or `letter_counting`.")
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="The generator's own parameters."
    )
    num_train: int = Field(1000, ge=1, description="Number of train problems.")
    num_eval: int = Field(200, ge=0, description="Number of eval problems.")
    seed: int = Field(0, description="Other seeds give other problems.")
    instruction: str = Field(
        INSTRUCTION, description="Put after each problem, a space between; empty adds nothing."
    )
    reward: str = Field(
        "generator",
        description="`generator`, its own scorer, `final_number`, `strict_format`, or your "
        "`module:function`.",
    )


def build_reasoning(settings: ReasoningSettings) -> PromptTask:
    """Draw the problems; equal settings give equal prompts.

    Raises:
        TaskError: there is no such generator, it refuses its parameters, it has too few distinct
            problems, or its scorer pays for nonsense.
    """
    if taken := {"seed", "size"} & settings.parameters.keys():
        raise TaskError(
            f"reasoning_gym: `parameters` may not set {', '.join(sorted(taken))}; use the task's "
            f"`seed`, `num_train` and `num_eval`"
        )
    scorers = (
        (make_generator_scorer(settings),)
        if settings.reward == "generator"
        else make_scorers(settings.reward, settings.reward_time_limit_s)
    )
    num_asked = settings.num_eval + settings.num_train
    problems = list(islice(_distinct_problems(settings, num_asked), num_asked))
    if len(problems) < num_asked:
        raise TaskError(
            f"reasoning_gym: expected {num_asked} distinct problems (num_eval "
            f"{settings.num_eval} + num_train {settings.num_train}); `{settings.kind}` gave "
            f"{len(problems)}; ask for fewer, or widen its parameters"
        )

    def prompt(split: Split, problem: _Problem) -> Prompt:
        question, answer, difficulty, meta = problem
        return make_prompt(
            "reasoning_gym",
            split,
            ask(question),
            answer,
            instruction=settings.instruction,
            difficulty=difficulty,
            meta=meta,
        )

    return PromptTask(
        "reasoning_gym",
        scorers,
        train_prompts=[prompt("train", problem) for problem in problems[settings.num_eval :]],
        eval_prompts=[prompt("eval", problem) for problem in problems[: settings.num_eval]],
    )


def make_generator_scorer(settings: ReasoningScorerSettings) -> "GeneratorScorer":
    """Return the scorer `reasoning_gym`."""
    return GeneratorScorer(settings.time_limit_s, settings.num_children)


_Problem = tuple[str, str | None, str, dict[str, str]]  # question, answer, difficulty, meta


def _distinct_problems(settings: ReasoningSettings, num_asked: int) -> Iterator[_Problem]:
    """Yield problems with different questions, in the order of the stream."""
    num_draws = 2 * num_asked + 100
    # The generators seed their n-th draw with seed + n: derived seeds keep two streams apart.
    seed = derive_seed(settings.seed, "reasoning_gym", settings.kind) % 2**31
    parameters = {**settings.parameters, "seed": seed, "size": num_draws}
    checker = Checker(FUNCTION, DRAW_LIMIT_S, num_children=1)
    seen = set()
    try:
        _check_kind(settings.kind, checker.ask(["kinds"]))
        for first in range(0, num_draws, DRAWN_AT_ONCE):
            number = min(DRAWN_AT_ONCE, num_draws - first)
            answer = checker.ask(["draw", settings.kind, parameters, first, number])
            for draw, drawn in enumerate(_drawn(settings.kind, answer), start=first):
                if drawn is None or drawn[0] in seen:
                    continue
                seen.add(drawn[0])
                yield _problem(settings.kind, parameters, draw, drawn)
    finally:
        checker.end()


def _check_kind(kind: str, answer: Answer) -> None:
    if answer.status != "ok":
        raise TaskError(f"reasoning_gym: the library could not be loaded: {answer.reason}")
    if kind not in answer.value:
        raise TaskError(
            f"reasoning_gym: expected `kind` among {', '.join(answer.value)}; came `{kind}`"
        )


def _drawn(kind: str, answer: Answer) -> list[Any]:
    if answer.status != "ok" or isinstance(answer.value, str):
        raise TaskError(
            f"reasoning_gym: expected parameters that `{kind}` draws problems with; came "
            f"{answer.value or answer.reason}; correct `parameters`"
        )
    problems: list[Any] = answer.value
    if any(problem is not None and problem[3] >= SUCCESS for problem in problems):
        raise TaskError(
            f"reasoning_gym: expected a scorer that knows wrong answers; that of `{kind}` gives "
            f"full marks for `?`; use another `kind`"
        )
    return problems


def _problem(kind: str, parameters: Mapping[str, Any], draw: int, drawn: Sequence[Any]) -> _Problem:
    question, answer, difficulty, _ = drawn
    meta = {
        "kind": kind,
        "parameters": json.dumps(parameters, sort_keys=True),
        "draw": str(draw),
        "question_sha256": hashlib.sha256(question.encode()).hexdigest(),
    }
    return question, answer, _difficulty(difficulty), meta


def _difficulty(difficulty: Any) -> str:
    """Return the generator's difficulty as text, "" where it states none."""
    if not isinstance(difficulty, dict):
        return "" if difficulty is None else str(difficulty)
    stated = {name: value for name, value in sorted(difficulty.items()) if value is not None}
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in stated.items())


class GeneratorScorer:
    """The generator's own scorer, mostly from 0.0 to 1.0, on what stands in the last answer tags.

    0.0 without an answer between `<answer>` and `</answer>`. Where the scorer raises, the status is
    `scorer_error`; where it takes longer than `limit_s` seconds, `timeout`.
    """

    name = "reasoning_gym"

    def __init__(self, limit_s: float = 10.0, num_children: int | None = None) -> None:
        library = importlib.metadata.version("reasoning-gym")
        self.version = f"1-{library}-{limit_s:g}s"
        self.num_parallel = num_children or len(os.sched_getaffinity(0))
        self._checker = Checker(FUNCTION, limit_s, self.num_parallel)

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge the answer in `completion`."""
        answer = find_tagged(completion)
        components = {"has_answer": float(answer is not None)}
        if answer is None:
            return Score(0.0, "ok", components, "no answer between <answer> and </answer>")
        if len(answer) > MAX_ANSWER_CHARS:
            return Score(0.0, "ok", components, f"the answer is over {MAX_ANSWER_CHARS} characters")
        try:
            meta = prompt.meta
            problem = [meta["kind"], json.loads(meta["parameters"]), int(meta["draw"])]
            question = ["score", *problem, meta["question_sha256"], answer]
        except (KeyError, ValueError):
            return Score(None, "unscorable", components, "no problem of reasoning-gym")
        reply = self._checker.ask(question)
        if reply.status == "timeout":
            return Score(None, "timeout", components, reply.reason)
        if reply.status == "error":
            return Score(None, "scorer_error", components, f"its scorer: {reply.reason}"[:300])
        if reply.value is None:
            return Score(None, "scorer_error", components, "the library draws another problem now")
        feedback = "" if reply.value >= SUCCESS else "wrong answer"
        return Score(float(reply.value), "ok", components, feedback)


def find_tagged(completion: str) -> str | None:
    """Return what stands in the last closed pair of answer tags; None without one."""
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None
