"""Policies that call the calculator, and an environment that asks back: episodes in short runs."""

import json
from pathlib import Path

from flows.config import RunConfig, TaskSection, load_config
from rrl_core.sampling.protocol import SampleRequest
from tests.flows.conftest import replay_config, smoke_config

TOOLS = (
    "task.name=tools", "task.reward=final_number", "task.num_train=6", "task.num_eval=3",
    "sampler.engine=fake", "sampler.max_tokens=240", "sampler.context_tokens=1400",
    "sampler.prompts=3", "sampler.group_size=4", "sampler.batch_sequences=8",
)  # fmt: skip
THOUGHT = "Let me see.\nI call it.\n"
ANSWER = "The calculator knows it, and so do I now.\nHere is what it said to me:\n"


def tools_config(*overrides: str) -> RunConfig:
    """Three iterations of sums with the calculator."""
    return smoke_config(*TOOLS, *overrides)


def replaying_tools_config(*overrides: str) -> RunConfig:
    """Iterations that go back to states of earlier episodes."""
    replay = ('replay.units=["state"]', "run.iterations=4", "value.cuts=4", "evaluation.every=4")
    return replay_config(*TOOLS, *replay, *overrides)


def reviewing_tools_config(*overrides: str) -> RunConfig:
    """An iteration whose failed episodes are reviewed and tried again."""
    review = (
        "run.iterations=1", "evaluation.every=off", "review.max_tokens=80", "review.controls=false",
        "sampler.context_tokens=2000", "tracking.mlflow=false",
    )  # fmt: skip
    return load_config(Path("smoke-review"), [*TOOLS, *review, *overrides])


def caller(version: int, request: SampleRequest) -> str:
    """Call the calculator, then say its result; every third episode says another number.

    Where the turn was begun by given tokens, go on with it. A request for a review has no limit of
    its own.
    """
    if request.max_tokens is None:
        return " it said another number.\nDo instead: say what the calculator says."
    text = bytes(i for i in request.prompt_ids if i < 256).decode()
    said = text.rpartition("user: ")[2]
    turn = said.rpartition("assistant: ")[2]
    if "tool: " in said:
        result = said.rpartition("tool: ")[2].partition("\n")[0]
        whole = f"{ANSWER}#### {result if request.seed % 3 else 7}"
    else:
        expression = said.partition("What is ")[2].partition("?")[0]
        call = {"name": "calculator", "arguments": {"expression": expression}}
        whole = f"{THOUGHT}<tool_call>{json.dumps(call)}</tool_call>"
    return whole.removeprefix(turn) if whole.startswith(turn) else "#### 1"


def asking_config(folder: Path, iterations: int) -> RunConfig:
    """The smoke run of a real, tiny policy that is asked back in every episode."""
    lines = [json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(14)]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    config = smoke_config(
        "sampler.max_tokens=36", f"run.iterations={iterations}", "evaluation.every=off"
    )
    task = TaskSection(
        name="jsonl", path=str(folder / "problems.jsonl"), turn_tokens=12,
        environment="tests.flows.rewards:asks_back",
        reward="rrl_core.tasks.dense:share_of_digits",
    )  # fmt: skip
    return config.model_copy(update={"task": task})
