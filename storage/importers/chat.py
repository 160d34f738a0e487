"""Chat messages in the shapes other frameworks write them, as role and content.

Our choices: tool calls stand behind the text of their message as JSON; a reasoning text stands
before it between `<think>` and `</think>`; parts that are no text are named in brackets. A response
of several messages is the text of the first, then for each further one a line with its role and its
text: what a chat template leaves when its special tokens are skipped.
"""

import json
from collections.abc import Sequence
from typing import Any

from storage.importers.samples import Message, RecordError


def messages_of(value: Any, where: str) -> list[Message]:
    """Return chat messages; a text is one message by the user.

    Raises:
        RecordError: neither text nor messages.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RecordError(
            "unexpected", f"expected `{where}` as text or messages, came {_of(value)}"
        )
    return [_message(message, where) for message in value]


def response_text(value: Any, where: str) -> str:
    """Return a response, text or messages, as text.

    Raises:
        RecordError: neither, or no message at all: nothing was sampled.
    """
    if isinstance(value, str):
        return value
    if value is None or value == []:
        raise RecordError("placeholder", f"expected a response in `{where}`, came none at all")
    return joined(messages_of(value, where))


def joined(messages: Sequence[Message]) -> str:
    """Return several messages as one text."""
    if not messages:
        return ""
    first, *rest = messages
    return first["content"] + "".join(f"\n{m['role']}\n{m['content']}" for m in rest)


def prompt_text(messages: Sequence[Message]) -> str:
    """Return a prompt as text: what the user says when nobody else does, else with roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "".join(f"{m['role']}\n{m['content']}\n" for m in messages)


def content_text(content: Any) -> str:
    """Return the content of a message: text, None, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RecordError(
            "unexpected", f"expected a message's content as text, came {_of(content)}"
        )
    return "".join(map(_part_text, content))


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RecordError(
            "unexpected", f"expected messages with a role in `{where}`, came {_of(message)}"
        )
    text = content_text(message.get("content"))
    if isinstance(reasoning := message.get("reasoning_content"), str) and reasoning:
        text = f"<think>{reasoning}</think>{text}"
    if calls := message.get("tool_calls"):
        text += f"\n{json.dumps(calls, ensure_ascii=False)}"
    return {"role": message["role"], "content": text}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        if isinstance(text, str):
            return text
        return f"[{part.get('type', 'part')}]"
    raise RecordError("unexpected", f"expected a part of a message as an object, came {_of(part)}")


def _of(value: Any) -> str:
    return type(value).__name__
