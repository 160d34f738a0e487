"""Rewards for runs of the fake sampler."""

from rrl_core.tasks.protocol import Prompt


def early_seven(prompt: Prompt, completion: str) -> float:
    """Return 1.0 when a 7 is among the first three characters: seldom, and for no reason."""
    del prompt
    return float("7" in completion[:3])
