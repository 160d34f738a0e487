"""A checker that does what it is asked, for tests of what becomes of it."""

import os
import signal
import sys
import time
from typing import Any


def answer(question: Any) -> Any:
    """Do one of a few things; anything else comes back as it is, with this process."""
    if question == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(600)
    if question == "raise":
        raise ZeroDivisionError("the reference is 7")
    if question == "exit":
        sys.exit(0)
    if question == "end":
        os._exit(0)
    if question == "eat":
        return len(bytearray(1 << 40))
    if question == "print":
        print("[1, 2]", flush=True)
    return [question, os.getpid()]
