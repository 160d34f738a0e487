"""Answers questions by one function, line by line: the child of `rrl_core.tasks.sandbox.killable`.

    python checking.py MODULE:FUNCTION

Lines sent, each a JSON list: ["ready", null] or ["failed", message], then for each question
["value", answer] or ["error", name of the exception].
"""

import importlib
import json
import os
import resource
import sys
import warnings

MEMORY_BYTES = 4 << 30  # address space, of which the libraries alone take a large part


def main() -> None:
    """Serve until there are no more questions."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not come between the lines
    module, _, name = sys.argv[1].partition(":")
    try:
        warnings.simplefilter("ignore")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        _send(output, ["failed", f"{type(error).__name__}: {error}"])
        return
    _send(output, ["ready", None])
    for question in sys.stdin.buffer:
        try:
            line = ["value", function(json.loads(question))]
        except (Exception, SystemExit) as error:
            line = ["error", type(error).__name__]
        _send(output, line)


def _send(output: int, line: list[object]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(output, data) :]


if __name__ == "__main__":
    main()
