"""A user's own environment, and the guard around all: replies to a batch, errors as statuses.

An environment is trusted, what the policy says to it is not, and may make it compute for ever: it
is asked in child processes, as an own reward is.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_args

from rrl_core.tasks.loading import load_function
from rrl_core.tasks.own_rewards import prompt_facts, prompt_of
from rrl_core.tasks.protocol import (
    Environment,
    Messages,
    Prompt,
    Reply,
    ReplyStatus,
    TaskError,
)
from rrl_core.tasks.sandbox.killable import Checker

REPLY_LIMIT_S = 10.0
SERVED = "rrl_core.tasks.replies:serve_environment"


class FunctionEnvironment:
    """A function `(prompt: Prompt, conversation: Messages) -> str | Reply | None`.

    A text is what the user says next; None ends the episode. The version is a hash of the file that
    defines the function.
    """

    def __init__(
        self,
        name: str,
        version: str,
        function: Callable[[Prompt, Messages], "str | Reply | None"],
        max_turns: int,
        turn_tokens: int | None,
    ) -> None:
        self.name = name
        self.version = version
        self.max_turns = max_turns
        self.turn_tokens = turn_tokens
        self._function = function

    def reply(self, prompt: Prompt, conversation: Messages) -> Reply:
        """Return what the function says."""
        said = self._function(prompt, conversation)
        if said is None:
            return Reply()
        return Reply(({"role": "user", "content": said},)) if isinstance(said, str) else said


class OwnEnvironment:
    """A function environment that is called in child processes.

    A conversation for which it takes longer than `time_limit_s` seconds, or that ends its process,
    has the reply of an environment that raises: none, and status "environment_error".
    """

    def __init__(self, function: FunctionEnvironment, time_limit_s: float) -> None:
        self.name, self.version = function.name, function.version
        self.max_turns, self.turn_tokens = function.max_turns, function.turn_tokens
        # Two at least: where one hangs, the others are asked meanwhile.
        num_children = max(2, len(os.sched_getaffinity(0)))
        told = (self.name, self.version)
        self._checker = Checker(SERVED, time_limit_s, num_children, told, is_environment_given=True)

    def reply(self, prompt: Prompt, conversation: Messages) -> Reply:
        """Return what the function says.

        Raises:
            TaskError: it cannot be loaded in a child, or its file is no longer that of the version.
        """
        said = [dict(message) for message in conversation]
        answer = self._checker.ask([prompt_facts(prompt), said])
        if not answer.is_asked:
            raise TaskError(f"environment `{self.name}` answers nothing more: {answer.reason}")
        if answer.status != "ok":
            return Reply((), "environment_error")
        messages, status = answer.value
        return Reply(tuple(messages), status)


def load_environment(
    spec: str,
    max_turns: int,
    turn_tokens: int | None,
    time_limit_s: float | None = REPLY_LIMIT_S,
) -> Environment:
    """Load the environment `module:function`; the module may stand in the working folder.

    Args:
        spec: the function.
        max_turns: most turns of the policy in an episode.
        turn_tokens: most tokens of a turn; None: those of the whole episode.
        time_limit_s: for a reply, each asked of a child process; None: in this process, without.

    Raises:
        TaskError: the spec, the module or the function is not as expected.
    """
    loaded = load_function("environment", spec)
    version = hashlib.sha256(loaded.source.read_bytes()).hexdigest()[:12]
    function = FunctionEnvironment(spec, version, loaded.function, max_turns, turn_tokens)
    return function if time_limit_s is None else OwnEnvironment(function, time_limit_s)


def serve_environment(spec: str, version: str) -> Callable[[Any], tuple[Any, str]]:
    """Return what answers the questions of `OwnEnvironment`, in its child process.

    Raises:
        TaskError: the function cannot be loaded, or its file is no longer that of `version`.
    """
    loaded = load_environment(spec, 1, None, time_limit_s=None)
    if loaded.version != version:
        raise TaskError(
            f"environment `{spec}` was edited: expected version {version}, came {loaded.version}"
        )

    def answer(question: Any) -> tuple[Any, str]:
        facts, said = question
        reply = _reply_one(loaded, prompt_of(facts), tuple(said))
        return reply.messages, reply.status

    return answer


def reply_all(
    environment: Environment, prompts: Sequence[Prompt], conversations: Sequence[Messages]
) -> list[Reply]:
    """Return the reply to each conversation, in order; several are made side by side.

    An environment that raises, or whose answer is no reply, costs one episode, not the batch: the
    status is then "environment_error", and there are no messages.

    Raises:
        TaskError: the environment can answer nothing more.
    """
    reply = partial(_reply_one, environment)
    if len(prompts) <= 1:
        return list(map(reply, prompts, conversations))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(reply, prompts, conversations))


def _reply_one(environment: Environment, prompt: Prompt, conversation: Messages) -> Reply:
    try:
        reply = environment.reply(prompt, conversation)
        if reply.status not in get_args(ReplyStatus):
            return Reply((), "environment_error")
        return Reply(tuple(map(_message, reply.messages)), reply.status)
    except TaskError:
        raise
    except (Exception, SystemExit):  # a user's environment may raise anything, or exit
        return Reply((), "environment_error")


def _message(message: object) -> dict[str, str]:
    """Return a message with its role and content alone, as text that has a UTF-8 form.

    Raises:
        TypeError: it has none.
    """
    if not isinstance(message, dict) or message.get("role") == "assistant":
        raise TypeError("expected a message of another role than `assistant`")
    found = {}
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise TypeError(f"expected a text as `{key}` of a message")
        found[key] = message[key].encode("utf-8", "replace").decode()
    return found
