"""Chat messages of self-review, in the shape of `Prompt.messages`.

Source: SRRL (arXiv 2607.05541): review ~ pi(. | x, y1, r1, f1, memory), second attempt
y2 ~ pi(. | x, review). Our choices:

1. The review is asked for in the conversation itself: the prompt, the attempt as the assistant's
   turn, the request as the user's next.
2. Of r1 it shows only that the attempt failed: no reward, no partial credit. Nothing here reads the
   prompt's reference answer or meta.
3. The second attempt is asked with the prompt and the review alone; every control puts something
   else in the review's place and changes no other word.
4. What a model or scorer wrote is data: it is cut, it fills no placeholder of its own, and the
   beginning `<|` of the special tokens of many chat templates is written `< |`.
"""

from collections.abc import Mapping, Sequence
from string import Template

from rrl_core.review.formats import ReviewFormat
from rrl_core.tasks.protocol import Prompt

Messages = tuple[Mapping[str, str], ...]


def review_messages(
    fmt: ReviewFormat, prompt: Prompt, attempt_text: str, feedback: str, memory: Sequence[str]
) -> Messages:
    """Ask for a review of a failed attempt.

    Args:
        fmt: the texts.
        prompt: what was asked.
        attempt_text: the failed attempt, cut in its middle where it is too long.
        feedback: what the scorer said of it; "" shows none.
        memory: earlier verified reviews of other problems, the best first; none shows none.
    """
    reviews = "\n".join("- " + " ".join(_data(fmt, "review", text).split()) for text in memory)
    said = _data(fmt, "feedback", feedback)
    request = (
        (_fill(fmt, "memory", reviews=reviews) if memory else "")
        + _fill(fmt, "verdict")
        + (_fill(fmt, "feedback", feedback=said) if said else "")
    )
    return _after_attempt(fmt, prompt, attempt_text, request)


def reflect_messages(fmt: ReviewFormat, prompt: Prompt, attempt_text: str) -> Messages:
    """Ask for a review at test time, where neither verdict nor feedback is known."""
    return _after_attempt(fmt, prompt, attempt_text, _fill(fmt, "reflect"))


def second_messages(fmt: ReviewFormat, prompt: Prompt, review_text: str) -> Messages:
    """Ask for a second attempt with a review; attempt and feedback are not shown again."""
    return _with_review(fmt, prompt, _data(fmt, "review", review_text))


def retry_messages(prompt: Prompt) -> Messages:
    """Ask for another attempt with the prompt as it is."""
    return prompt.messages


def blank_messages(fmt: ReviewFormat, prompt: Prompt) -> Messages:
    """Ask for a second attempt with a review that says nothing."""
    return _with_review(fmt, prompt, _fill(fmt, "blank"))


def feedback_messages(fmt: ReviewFormat, prompt: Prompt, feedback: str) -> Messages:
    """Ask for a second attempt with the scorer's feedback in the review's place."""
    said = _data(fmt, "feedback", feedback) or _fill(fmt, "no_feedback")
    return _with_review(fmt, prompt, _fill(fmt, "raw_feedback", feedback=said))


def _after_attempt(fmt: ReviewFormat, prompt: Prompt, attempt_text: str, opening: str) -> Messages:
    text, limit = _defused(attempt_text), fmt.max_chars["attempt"]
    if len(text) > limit:
        half = limit // 2 - 1
        text = f"{text[:half]}…{text[-half:]}"
    request = f"{opening}\n{_fill(fmt, 'request')}"
    turns = ({"role": "assistant", "content": text}, {"role": "user", "content": request})
    return (*prompt.messages, *turns)


def _with_review(fmt: ReviewFormat, prompt: Prompt, review: str) -> Messages:
    *earlier, last = prompt.messages
    content = _fill(fmt, "second_attempt", problem=last["content"], review=review)
    return (*earlier, {**last, "content": content})


def _data(fmt: ReviewFormat, kind: str, text: str) -> str:
    return _defused(text)[: fmt.max_chars[kind]]


def _defused(text: str) -> str:
    return text.strip().replace("<|", "< |")


def _fill(fmt: ReviewFormat, name: str, **values: str) -> str:
    return Template(fmt.texts[name]).substitute(values)
