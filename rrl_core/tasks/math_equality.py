"""Whether two answers in LaTeX are the same, by `math-verify`: runs in a killable child only.

Loading this loads a computer algebra system. Its own time limits are off: they need the main
thread, and leave some computations running; whoever asks ends the process instead.
"""

import logging

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]


def compare(question: list[str]) -> str:
    """Return how `question`, a reference and an answer, compares.

    Returns:
        "right", "wrong", "no_reference" or "no_answer" where one cannot be read.
    """
    reference, answer = map(_read, question)
    if not reference:
        return "no_reference"
    if not answer:
        return "no_answer"
    try:  # the reference first: an equation or interval may be met by less, not the other way
        is_same = verify(reference, answer, timeout_seconds=None, raise_on_error=True)
    except Exception:  # what cannot be compared with the reference is not the same
        is_same = False
    return "right" if is_same else "wrong"


def _read(latex: str) -> list[object]:
    """Return the expressions that `latex` can be read as; none of plain text."""
    boxed = f"\\boxed{{{latex}}}"
    return list(parse(boxed, _LATEX, fallback_mode="no_fallback", parsing_timeout=None))
