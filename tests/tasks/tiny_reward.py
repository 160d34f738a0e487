"""Rewards that do what the completion says, for tests of what becomes of it."""

import ctypes
import math
import os
import signal
import sys
import time

from rrl_core.tasks.protocol import Prompt, Score


def obey(prompt: Prompt, completion: str) -> float | Score | None:
    """Do one of a few things; anything else is judged by its length."""
    if completion == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(600)
    if completion == "raise":
        raise ZeroDivisionError(prompt.answer)
    if completion == "exit":
        sys.exit(0)
    if completion == "end":
        os._exit(0)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "eat":
        return float(len(bytearray(1 << 40)))
    if completion == "nan":
        return math.nan
    if completion == "nothing":
        return None
    if completion == "score":
        return Score(0.5, components={"part": 0.25}, feedback=f"\u2028 {prompt.meta['hint']}")
    if completion == "variable":
        return float(os.environ["RRL_TEST_VARIABLE"])
    if completion == "process":
        return float(os.getpid())
    return float(len(completion))
