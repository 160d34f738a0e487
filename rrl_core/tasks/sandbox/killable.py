"""Checkers that may hang or break down, in child processes that are ended when they do.

A checker is a function `(question) -> answer`, both of what JSON can say. It is trusted: what it
is asked about is not, and may make it compute for ever. One child serves many questions, one at a
time; a question that takes too long costs its child, and nobody else's answer.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rrl_core.tasks.sandbox.lines import LineReader

CHECKING = Path(__file__).with_name("checking.py")
START_LIMIT_S = 120.0  # importing a computer algebra system on a busy machine
END_LIMIT_S = 5.0  # after which a child without a parent ends itself
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """What the checker returned; without "ok" nothing but the reason why there is none.

    `is_asked` is False where no child could be started that answers questions.
    """

    status: Literal["ok", "timeout", "error"]
    value: Any = None
    reason: str = ""
    is_asked: bool = True


class Checker:
    """The function `module:name`, asked in up to `num_children` children at a time.

    With `arguments` the checker is what the function returns for them, once in each child. With
    `is_environment_given` the children have the variables of this process, else none of them.

    It may be asked from any thread; a process that was forked from this one has its own children.
    """

    def __init__(
        self,
        function: str,
        limit_s: float,
        num_children: int,
        arguments: tuple[str, ...] = (),
        *,
        is_environment_given: bool = False,
    ) -> None:
        self.limit_s = limit_s
        self._command = (f"{limit_s + END_LIMIT_S:g}", function, *arguments)
        self._is_environment_given = is_environment_given
        self._num_children = num_children
        self._forget_children()

    def ask(self, question: Any) -> Answer:
        """Return the checker's answer, or why there is none after `limit_s` seconds."""
        if self._pid != os.getpid():
            self._forget_children()
        with self._free:
            child = self._idle_child() or self._new_child()
            answer = child.ask(question, self.limit_s)
            if child.is_alive():
                self._idle.append(child)
            return answer

    def ask_all(self, questions: Sequence[Any]) -> list[Answer]:
        """Return the answer to each question, in order."""
        if len(questions) <= 1:
            return [self.ask(question) for question in questions]
        with ThreadPoolExecutor(self._num_children) as threads:
            return list(threads.map(self.ask, questions))

    def end(self) -> None:
        """End the children; a later question starts new ones."""
        while self._idle:
            self._idle.pop().end()

    def _idle_child(self) -> "_Child | None":
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_alive():
                    return child
        return None

    def _new_child(self) -> "_Child":
        return _Child(self._command, os.environ if self._is_environment_given else {})

    def _forget_children(self) -> None:
        self._pid = os.getpid()
        self._idle: list[_Child] = []  # appending and popping are atomic
        self._free = threading.Semaphore(self._num_children)


class _Child:
    """One process that runs `checking.py`, from its start to its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(CHECKING), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONHASHSEED": "0",  # the order of a set is the same in every child
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
        )  # fmt: skip
        self.end = weakref.finalize(self, _end, self._process, os.getpid())
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._failure = ""
        lines = LineReader(self._output, MAX_ANSWER_BYTES)
        if lines.read(1, START_LIMIT_S) != "complete" or lines.found[0][0] != "ready":
            self._failure = str(lines.found[0][1]) if lines.found else "it did not start"
            self.end()

    def is_alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def ask(self, question: Any, limit_s: float) -> Answer:
        if self._failure:
            return Answer("error", reason=self._failure, is_asked=False)
        assert self._process.stdin is not None
        lines = LineReader(self._output, MAX_ANSWER_BYTES)
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            ending = lines.read(1, limit_s)
        except BaseException as error:
            self.end()  # in the middle of a question: its answer must not meet the next one
            if not isinstance(error, BrokenPipeError):
                raise
            ending = "ended"
        if ending != "complete":
            self.end()
            if ending == "timeout":
                return Answer("timeout", reason=f"no answer within {limit_s:g} s")
            return Answer("error", reason="the checker's process ended")
        kind, content = lines.found[0]
        return Answer("ok", content) if kind == "value" else Answer("error", reason=content)


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner != os.getpid():
        return  # forked meanwhile: the child belongs to the process that started it
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(OSError):
            pipe.close()
