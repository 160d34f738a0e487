"""What an environment says, as the tokens that follow a turn of the policy's.

The tokens of a conversation are never made from text again: a turn stays as it was sampled, and
what comes next is the part of the chat template behind it. That part is found by rendering the
conversation with a marker in the place of every turn of the policy's: what stands behind the last
marker are the end of that turn, the messages, and the opening of the next turn. So it does not
matter what a template does to earlier turns, such as dropping what was thought.

Our choices:
1. The end of a turn that was sampled is not given again.
2. A template that has no role `tool` gets its messages as one message of the user's, each between
   `<tool_response>` and `</tool_response>`.
3. A special token that an environment writes is text: a space is put into it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_MARKER = "THE-TURN-OF-THE-POLICY"


def reply_text(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Mapping[str, str]],
    replies: Sequence[Mapping[str, str]],
    end_token_ids: Collection[int],
) -> str:
    """Return the text between a turn that ended and the next one.

    Args:
        tokenizer: with the chat template; without one, messages are parted by empty lines.
        conversation: prompt and turns so far; the last is the policy's.
        replies: what is said before its next turn.
        end_token_ids: of which one ended the turn.
    """
    said = [{**m, "content": _plain(tokenizer, m["content"])} for m in replies]
    if tokenizer.chat_template is None:
        return "".join(f"\n\n{message['content']}" for message in said) + "\n\n"
    marked = [
        {**m, "content": _MARKER} if m["role"] == "assistant" else dict(m) for m in conversation
    ]
    text = _rendered(tokenizer, marked, said)
    for end in tokenizer.convert_ids_to_tokens(sorted(end_token_ids)):
        if text.startswith(end):
            return text.removeprefix(end)
    return text


def _rendered(
    tokenizer: PreTrainedTokenizerBase, marked: list[dict[str, str]], said: list[dict[str, str]]
) -> str:
    """Return what the template writes behind the last marker."""
    if any(message["role"] == "tool" for message in said):
        try:
            text = _behind_marker(tokenizer, [*marked, *said])
            if all(message["content"].strip() in text for message in said):
                return text
        except TemplateError:
            pass  # it knows no such role
        content = "\n".join(
            f"<tool_response>\n{m['content']}\n</tool_response>" if m["role"] == "tool"
            else m["content"]
            for m in said
        )  # fmt: skip
        earlier = [{**m, "role": "user"} if m["role"] == "tool" else m for m in marked]
        return _behind_marker(tokenizer, [*earlier, {"role": "user", "content": content}])
    return _behind_marker(tokenizer, [*marked, *said])


def _behind_marker(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).rpartition(_MARKER)[2]


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text without special tokens: a space stands in each, and without the marker."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, f"{token.content[:1]} {token.content[1:]}")
    return text.replace(_MARKER, _MARKER.lower())
