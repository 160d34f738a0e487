"""A user's own environment, and the guard around all: replies to a batch, errors as statuses."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

from rrl_core.tasks.loading import load_function
from rrl_core.tasks.protocol import Environment, Messages, Prompt, Reply, ReplyStatus


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


def load_environment(spec: str, max_turns: int, turn_tokens: int | None) -> FunctionEnvironment:
    """Load the environment `module:function`; the module may stand in the working folder.

    Raises:
        TaskError: the spec, the module or the function is not as expected.
    """
    loaded = load_function("environment", spec)
    version = hashlib.sha256(loaded.source.read_bytes()).hexdigest()[:12]
    return FunctionEnvironment(spec, version, loaded.function, max_turns, turn_tokens)


def reply_all(
    environment: Environment, prompts: Sequence[Prompt], conversations: Sequence[Messages]
) -> list[Reply]:
    """Return the reply to each conversation, in order; several are made side by side.

    An environment that raises, or whose answer is no reply, costs one episode, not the batch: the
    status is then "environment_error", and there are no messages.
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
