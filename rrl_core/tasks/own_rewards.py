"""A user's reward function in child processes: who hangs or breaks down costs one score.

The function is trusted, what it judges is not: a completion may make it compute for ever, or take
all memory. Each child loads the function once and is asked about one completion at a time, in JSON.
"""

import os
from collections.abc import Mapping
from typing import Any

from rrl_core.tasks.protocol import Prompt, Score
from rrl_core.tasks.sandbox.killable import Checker

REWARD_LIMIT_S = 10.0
SERVED = "rrl_core.tasks.scorers:serve_reward"


class OwnReward:
    """The function `module:function`, called in child processes.

    A completion for which it takes longer than `time_limit_s` seconds has status `timeout`; one
    that ends its process, `scorer_error`. The children have this process's environment and working
    folder, and 4 GiB of address space each. Nothing that the function remembers is sure to be there
    at the next call.
    """

    def __init__(
        self, spec: str, version: str, time_limit_s: float, num_children: int | None = None
    ) -> None:
        self.name, self.version = spec, version
        # Two at least: where one hangs, the others are judged meanwhile.
        self.num_parallel = num_children or max(2, len(os.sched_getaffinity(0)))
        self._checker = Checker(
            SERVED, time_limit_s, self.num_parallel, (spec, version), is_environment_given=True
        )

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion` by the function."""
        reply = self._checker.ask([prompt_facts(prompt), completion])
        if reply.status == "timeout":
            return Score(None, "timeout", feedback=reply.reason)
        if reply.status == "error":
            return Score(None, "scorer_error", feedback=f"no score: {reply.reason}"[:300])
        return Score(**reply.value)


def prompt_facts(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as what JSON can say."""
    return vars(prompt) | {
        "messages": [dict(message) for message in prompt.messages],
        "meta": dict(prompt.meta),
    }


def prompt_of(facts: Mapping[str, Any]) -> Prompt:
    """Return the prompt of `prompt_facts`."""
    return Prompt(**{**facts, "messages": tuple(facts["messages"])})
