"""Dense rewards that even a random model earns a little of: for smoke runs and tests."""

from rrl_core.tasks.protocol import Prompt


def share_of_digits(prompt: Prompt, completion: str) -> float:
    """Return the share of the completion's characters that are ASCII digits, in [0, 1]."""
    del prompt  # any problem will do
    digits = sum("0" <= character <= "9" for character in completion)
    return digits / max(1, len(completion))


def contains_digit(prompt: Prompt, completion: str) -> float:
    """Return 1.0 when an ASCII digit stands in the completion, else 0.0."""
    del prompt
    return float(any("0" <= character <= "9" for character in completion))
