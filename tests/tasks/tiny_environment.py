"""An environment that does what the policy says, for tests of what becomes of it."""

import os
import time

from rrl_core.tasks.protocol import Messages, Prompt, Reply


def obey(prompt: Prompt, conversation: Messages) -> str | Reply | None:
    """Do one of a few things; anything else is said back."""
    said = conversation[-1]["content"]
    if said == "hang":
        time.sleep(600)
    if said == "exit":
        os._exit(0)
    if said == "raise":
        raise KeyError(prompt.prompt_id)
    if said == "end":
        return None
    if said == "two":
        note = {"role": "tool", "content": f"{prompt.meta['hint']}"}
        return Reply((note, {"role": "user", "content": "Go on."}), "tool_error")
    if said == "wrong":
        return Reply(({"role": "assistant", "content": "I am the policy."},))
    return f"{len(conversation)}: {said}"
