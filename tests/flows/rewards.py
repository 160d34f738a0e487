"""Rewards and an environment for runs; quick to load, since child processes do."""

import os
import time

from rrl_core.tasks import dense
from rrl_core.tasks.protocol import Messages, Prompt, Score

contains_digit = dense.contains_digit  # a reward of ours runs in no child process, a test's does


def early_seven(prompt: Prompt, completion: str) -> float:
    """Return 1.0 when a 7 is among the first three characters: seldom, and for no reason."""
    del prompt
    return float("7" in completion[:3])


def known_words(prompt: Prompt, completion: str) -> float:
    """Return 1.0 for words that a policy does not find by chance."""
    del prompt
    return float("seven it is" in completion)


def seldom_scored(prompt: Prompt, completion: str) -> Score:
    """Judge prompts whose id ends in a letter by an early seven; the others cannot be judged."""
    if prompt.prompt_id[-1].isdigit():
        return Score(None, "unscorable")
    return Score(early_seven(prompt, completion))


def uneven(prompt: Prompt, completion: str) -> float:
    """Solve prompts whose id ends in a letter whatever is said; the others take a 7 in time."""
    return 1.0 if not prompt.prompt_id[-1].isdigit() else float("7" in completion[:4])


def never(prompt: Prompt, completion: str) -> Score:
    """Judge nothing."""
    return Score(None, "unscorable")


def fragile(prompt: Prompt, completion: str) -> Score:
    """Raise for prompt 1, be late for prompt 2, and find no answer to prompt 3."""
    del completion
    number = int(prompt.prompt_id[1:])
    if number == 1:
        raise KeyError("seven")
    if number == 2:
        return Score(None, "timeout", feedback="out of time")
    return Score(None, "unscorable") if number == 3 else Score(1.0)


def unhurried(prompt: Prompt, completion: str) -> float:
    """Return a tenth of the completion's last digit, after a moment."""
    del prompt
    time.sleep(0.0002)  # so that a kill meets a process at work
    return int(completion[-1]) / 10


def stubborn(prompt: Prompt, completion: str) -> float:
    """Never end for prompt 1, end the process for prompt 2."""
    del completion
    number = int(prompt.prompt_id[1:])
    if number == 1:
        time.sleep(600)
    if number == 2:
        os._exit(0)
    return 1.0


def asks_back(prompt: Prompt, conversation: Messages) -> str | None:
    """Ask twice, then be content."""
    del prompt
    return None if len(conversation) > 3 else f"Sure? {len(conversation)}"
