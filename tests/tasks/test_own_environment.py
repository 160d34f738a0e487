"""An own environment in child processes: who hangs or breaks down costs one episode."""

from collections.abc import Iterator

import pytest

from rrl_core.tasks.protocol import Environment, Messages, Prompt, Reply, TaskError
from rrl_core.tasks.replies import (
    FunctionEnvironment,
    OwnEnvironment,
    load_environment,
    reply_all,
    serve_environment,
)

SPEC = "tests.tasks.tiny_environment:obey"
PROMPT = Prompt(
    "p", "t", "train", ({"role": "user", "content": "Say."},), "1", meta={"hint": "\u2028 hm"}
)
NONE = Reply((), "environment_error")


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    made = load_environment(SPEC, 3, None, time_limit_s=0.7)
    yield made
    made._checker.end()  # type: ignore[attr-defined]


def conversation(said: str) -> Messages:
    return ({"role": "assistant", "content": said},)


def test_who_hangs_or_breaks_down_costs_one_reply_and_no_other(environment: Environment) -> None:
    said = ["a", "hang", "b", "exit", "c", "raise", "d", "wrong", "e"]
    replies = reply_all(environment, [PROMPT] * len(said), list(map(conversation, said)))
    assert replies[1::2] == [NONE] * 4
    assert [reply.messages[0]["content"] for reply in replies[::2]] == [
        f"1: {word}" for word in said[::2]
    ]


@pytest.mark.parametrize("said", ["end", "two", "wrong", "raise", "\ud800", ""])
def test_a_child_says_what_this_process_says(environment: Environment, said: str) -> None:
    here = load_environment(SPEC, 3, None, time_limit_s=None)
    assert here.version == environment.version
    [expected] = reply_all(here, [PROMPT], [conversation(said)])
    assert reply_all(environment, [PROMPT], [conversation(said)]) == [expected]
    if said == "two":
        assert expected.status == "tool_error"
        assert [m["content"] for m in expected.messages] == ["\u2028 hm", "Go on."]


def test_an_edited_file_is_not_served() -> None:
    with pytest.raises(TaskError, match="was edited: expected version 0"):
        serve_environment(SPEC, "0")


def test_an_environment_that_no_child_can_serve_is_an_error_and_no_reply() -> None:
    edited = FunctionEnvironment(SPEC, "0", lambda prompt, said: None, 3, None)
    with pytest.raises(TaskError, match=r"answers nothing more: .*was edited"):
        reply_all(OwnEnvironment(edited, 5.0), [PROMPT] * 2, [conversation("a")] * 2)
