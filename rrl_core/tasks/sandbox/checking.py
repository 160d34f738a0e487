"""Answers questions by one function, line by line: the child of `rrl_core.tasks.sandbox.killable`.

    python checking.py SECONDS MODULE:FUNCTION [ARGUMENT ...]

With arguments the function is first called with them, and what it returns answers the questions.
A question that takes more than so many seconds ends the process: its parent does so before, unless
that is gone.

Lines sent, each a JSON list: ["ready", null] or ["failed", message], then for each question
["value", answer] or ["error", name of the exception].
"""

import importlib
import json
import os
import resource
import signal
import sys
import warnings

MEMORY_BYTES = 4 << 30  # address space, of which the libraries alone take a large part


def main() -> None:
    """Serve until there are no more questions."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not come between the lines
    limit_s, arguments = float(sys.argv[1]), sys.argv[3:]
    module, _, name = sys.argv[2].partition(":")
    try:
        warnings.simplefilter("ignore")
        function = getattr(importlib.import_module(module), name)
        if arguments:
            function = function(*arguments)
    except Exception as error:
        _send(output, ["failed", f"{type(error).__name__}: {error}"])
        return
    _send(output, ["ready", None])
    for question in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            line = ["value", function(json.loads(question))]
        except (Exception, SystemExit) as error:
            line = ["error", type(error).__name__]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(output, line)


def _send(output: int, line: list[object]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(output, data) :]


if __name__ == "__main__":
    main()
