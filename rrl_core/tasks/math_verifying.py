r"""The scorer `math_verify`: compares answers in LaTeX as mathematics.

The answer of a completion is what `rrl_core.tasks.answers` finds: after the last `####`, else in
the last balanced `\boxed{}`, else the last number.
"""

import importlib.metadata
import os

from rrl_core.tasks.answers import find_answer, marked_answer
from rrl_core.tasks.protocol import Prompt, Score, TaskError
from rrl_core.tasks.sandbox.killable import Checker

MAX_ANSWER_CHARS = 1000  # of an answer; none of a known problem is half as long


class MathVerify:
    """1.0 when the answer is the reference by `math-verify`, else 0.0.

    A reference that cannot be read is `unscorable`; a comparison that takes longer than `limit_s`
    seconds is ended, and has status `timeout`. May be called from any thread or process.
    """

    name = "math_verify"

    def __init__(self, limit_s: float = 5.0, num_children: int | None = None) -> None:
        """Look for the library; its processes start with the first question.

        Raises:
            TaskError: `math-verify` is not installed.
        """
        try:
            library = importlib.metadata.version("math-verify")
        except importlib.metadata.PackageNotFoundError as error:
            raise TaskError(
                "reward `math_verify`: expected the package `math-verify`; it is not installed; "
                "`pip install 'math-verify>=0.9,<0.10'`, or set `reward = \"final_number\"`"
            ) from error
        self.version = f"1-{library}-{limit_s:g}s"
        self.num_parallel = num_children or len(os.sched_getaffinity(0))
        function = "rrl_core.tasks.math_equality:compare"
        self._checker = Checker(function, limit_s, self.num_parallel)

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge the answer in `completion`."""
        answer = _answer_text(completion)
        components = {"has_answer": float(answer is not None)}
        if not prompt.answer:
            return Score(None, "unscorable", components, "there is no reference answer")
        if answer is None:
            return Score(0.0, "ok", components, "no answer found")
        if len(answer) > MAX_ANSWER_CHARS:
            return Score(0.0, "ok", components, f"the answer is over {MAX_ANSWER_CHARS} characters")
        reply = self._checker.ask([prompt.answer, answer])
        if reply.status == "timeout":
            return Score(None, "timeout", components, reply.reason)
        if reply.status == "error":
            return Score(None, "scorer_error", components, f"math-verify: {reply.reason}"[:300])
        if reply.value == "no_reference":
            return Score(None, "unscorable", components, "the reference answer cannot be read")
        feedback = {"right": "", "wrong": "wrong answer"}.get(reply.value, "no answer found")
        return Score(float(reply.value == "right"), "ok", components, feedback)


def _answer_text(completion: str) -> str | None:
    marked, _ = marked_answer(completion.replace("\u2212", "-"))
    if marked is not None:
        return marked.strip().strip("$").strip() or None
    number = find_answer(completion)
    return None if number is None else str(number)
