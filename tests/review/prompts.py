"""A prompt to review attempts at."""

from rrl_core.tasks.protocol import Prompt

PROBLEM = "What is 3 + 4? End with a line: #### <number>"


def make_prompt(answer: str | None = "7", **meta: str) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEM})
    return Prompt("p-1", "test", "train", messages, answer, "", meta)
