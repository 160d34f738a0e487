"""The task `tools`: calls are read tolerantly, errors are answers, hostile calls end in time."""

import json
import threading

import pytest

from rrl_core.tasks.protocol import Prompt, Reply, Score, environment_of
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.replies import reply_all
from rrl_core.tasks.sandbox.running import Limits
from rrl_core.tasks.scorers import BUILT_IN
from rrl_core.tasks.tool_calls import Call, Result, find_calls, instruction, make_call
from rrl_core.tasks.tool_environment import Calculator, PythonTool, ToolEnvironment
from rrl_core.tasks.transcript import LastTurn, last_turn, transcript

CALCULATE = '{"name": "calculator", "arguments": {"expression": "6 * 7"}}'
PROMPT = Prompt("p1", "tools", "train", ({"role": "user", "content": "What is 6 * 7?"},), "42")


@pytest.fixture(scope="module")
def python() -> PythonTool:
    return PythonTool(Limits(1.0, 128), allow_limits_only=True)


def called(text: str, *tools) -> Reply:
    environment = ToolEnvironment(tools or [Calculator()], max_turns=3, turn_tokens=None)
    [reply] = reply_all(environment, [PROMPT], [({"role": "assistant", "content": text},)])
    return reply


def answers(reply: Reply) -> list[str]:
    assert all(message["role"] == "tool" for message in reply.messages)
    return [message["content"] for message in reply.messages]


@pytest.mark.parametrize(
    "call",
    [
        f"<tool_call>{CALCULATE}</tool_call>",
        f"Let me see.\n<tool_call>\n{CALCULATE}\n</tool_call>\nI wait.",
        f"<tool_call>[{CALCULATE}]</tool_call>",
        f"<tool_call>```json\n{CALCULATE}\n```</tool_call>",
        f"<tool_call>{CALCULATE}",
        '<tool_call>{"name": "calculator", "parameters": {"expression": "6 * 7"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"6*7\\"}"}'
        "</tool_call>",
        '<tool_call>{"name": "calculator", "arguments": "6 * 7"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": 42}}</tool_call>',
    ],
)
def test_calls_are_read_tolerantly(call: str):
    reply = called(call)
    assert (reply.status, answers(reply)) == ("ok", ["42"])


def test_a_turn_without_a_call_ends_the_episode():
    assert called("It is 42.\n#### 42") == Reply()


def test_a_reminder_answers_a_turn_with_neither_call_nor_answer():
    environment = ToolEnvironment([Calculator()], 3, None, "Call a tool, or end with ####.")
    turns = ["Let me think.", "#### 42", f"<tool_call>{CALCULATE}</tool_call>"]
    said = [({"role": "assistant", "content": turn},) for turn in turns]
    reminded, ended, replied = reply_all(environment, [PROMPT] * 3, said)
    assert reminded.messages == ({"role": "user", "content": "Call a tool, or end with ####."},)
    assert reminded.status == "ok"
    assert ended == Reply()
    assert answers(replied) == ["42"]
    other = ToolEnvironment([Calculator()], 3, None, "Go on.")
    silent = ToolEnvironment([Calculator()], 3, None)
    assert len({environment.version, other.version, silent.version}) == 3


def test_several_calls_have_a_reply_each_up_to_a_limit():
    calls = f"<tool_call>{CALCULATE}</tool_call><tool_call>{CALCULATE}<tool_call>[{CALCULATE}]"
    assert answers(called(calls)) == ["42", "42", "42"]
    reply = called(f"<tool_call>[{','.join([CALCULATE] * 9)}]</tool_call>")
    assert reply.status == "tool_error"
    assert answers(reply) == [*["42"] * 4, "error: expected at most 4 calls"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("", "expected JSON such as"),
        ("calculator(6 * 7)", "expected JSON such as"),
        ("7", "expected an object such as"),
        ('{"arguments": {}}', "expected an object such as"),
        ('{"name": 7}', "expected an object such as"),
        ('{"name": "search", "arguments": {}}', "there is no tool `search`, expected one of calc"),
        ('{"name": "calculator"}', "expected the one argument `expression` of `calculator`"),
        ('{"name": "calculator", "arguments": {"e": "1"}}', "expected the one argument"),
        ('{"name": "calculator", "arguments": {"expression": [1]}}', "expected the one argument"),
        ('{"name": "calculator", "arguments": {"expression": "1 / 0"}}', "division by zero"),
        ('{"name": "calculator", "arguments": {"expression": "9^9^9^9"}}', "whole exponents"),
        ("[" * 7_000, "expected JSON such as"),
        ('{"name": ' * 800, "expected JSON such as"),
        ('{"a":' * 1_200 + "1" + "}" * 1_200, "expected"),
        (f'{{"name": "calculator", "arguments": {{"expression": {"9" * 5_000}}}}}', "expected"),
        ("x" * 100_000, "expected a call of at most 8000 characters"),
    ],
)
def test_wrong_calls_are_answered_with_what_was_expected(call: str, error: str):
    reply = called(f"<tool_call>{call}</tool_call>")
    assert reply.status == "tool_error"
    [answer] = answers(reply)
    assert answer.startswith("error: ")
    assert error in answer
    assert len(answer) < 300


def test_the_instruction_shows_a_call_that_works():
    tools = [Calculator()]
    [call] = find_calls(instruction(tools))
    assert call == Call("calculator", {"expression": "(17 + 4) * 12"})
    assert make_call({"calculator": tools[0]}, call) == Result("252")


@pytest.mark.parametrize(
    ("code", "status", "answer"),
    [
        ("print(6 * 7)", "ok", "42"),
        ("x = 6\nx * 7", "ok", "42"),
        ("print('a'); 'b'", "ok", "a\n'b'"),
        ("x = 1", "ok", "(no output)"),
        ("print(1)\n1 / 0", "tool_error", "error: 1\nZeroDivisionError: division by zero"),
        ("def", "tool_error", "error: SyntaxError: invalid syntax (<unknown>, line 1)"),
        ("import os; os._exit(0)", "tool_error", "error: the program ended early"),
        ("raise SystemExit(0)", "tool_error", "error: SystemExit: 0"),
        ("while True: pass", "timeout", "error: the program took more than 1 seconds"),
        ("x = 'a' * (1 << 40)", "tool_error", "error: MemoryError:"),
        ("def f(): f()\nf()", "tool_error", "error: RecursionError"),
        ("()" * 5_000, "tool_error", "error: expected a program of at most 4000 characters"),
        ("(" * 3_000, "tool_error", "error: "),
        ("open('/etc/passwd').read()", "tool_error", "error: FileNotFoundError"),
    ],
)
def test_programs_are_run_within_limits(python: PythonTool, code: str, status: str, answer: str):
    if python._isolation == "limits_only" and "passwd" in code:
        pytest.skip("needs namespaces")
    result = python(code)
    assert result.status == status
    assert result.text.startswith(answer)


def test_long_and_forged_output_is_cut_and_text(python: PythonTool):
    call = json.dumps({"name": "python", "arguments": {"code": "print('7' * 10**6)"}})
    [answer] = answers(called(f"<tool_call>{call}</tool_call>", python))
    assert len(answer) < 1_100
    forged = (
        "import sys, builtins\nsys.modules['candidate'].run.__globals__['x'] = 1\nprint('\\ud800')"
    )
    call = json.dumps({"name": "python", "arguments": {"code": forged}})
    [answer] = answers(called(f"<tool_call>{call}</tool_call>", python))
    assert answer == "?"


def test_the_same_conversation_has_the_same_reply(python: PythonTool):
    code = "import random\nprint({'b', 'a', 'c'}, hash('x'), id(None) > 0)"
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    first, second = (answers(called(f"<tool_call>{call}</tool_call>", python)) for _ in range(2))
    assert first == second


class Broken:
    name, version, max_turns, turn_tokens = "broken", "1", 3, None

    def __init__(self, answer) -> None:
        self.answer = answer

    def reply(self, prompt, conversation):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        KeyError("x"), SystemExit(1), None, "text", Reply(("text",)), Reply(({"role": "tool"},)),
        Reply(({"role": "assistant", "content": "#### 42"},)), Reply((), "fine"),
    ],
)  # fmt: skip
def test_an_environment_that_fails_costs_its_episode_alone(answer):
    assert reply_all(Broken(answer), [PROMPT], [()]) == [Reply((), "environment_error")]


def test_replies_come_in_order_though_made_side_by_side():
    barrier = threading.Barrier(2, timeout=30)

    class Slow(Broken):
        def reply(self, prompt, conversation):
            if int(prompt.answer) < 2:
                barrier.wait()  # neither goes on without the other
            return Reply(({"role": "user", "content": prompt.answer},))

    prompts = [Prompt(f"p{i}", "t", "train", (), str(i)) for i in range(2)]
    replies = reply_all(Slow(None), prompts, [()] * 2)
    assert [reply.messages[0]["content"] for reply in replies] == ["0", "1"]


def test_the_task_has_an_environment_and_others_have_none():
    task = build_task("tools", {"num_train": 3, "num_eval": 2, "max_turns": 2, "turn_tokens": 40})
    environment = environment_of(task)
    assert environment is not None
    assert (environment.max_turns, environment.turn_tokens) == (2, 40)
    prompt = task.prompts("train")[0]
    assert "<tool_call>" in prompt.messages[0]["content"]
    assert environment_of(build_task("arithmetic", {"num_train": 3, "num_eval": 2})) is None


def test_a_problem_is_solved_by_calling_the_calculator():
    task = build_task("tools", {"num_train": 3, "num_eval": 2})
    [environment, scorer] = [environment_of(task), task.scorers[0]]
    for prompt in task.prompts("train"):
        expression = prompt.messages[1]["content"].removeprefix("What is ").partition("?")[0]
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        turns = [{"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}]
        turns += environment.reply(prompt, tuple(turns)).messages
        turns += [{"role": "assistant", "content": f"#### {turns[-1]['content']}"}]
        assert scorer(prompt, transcript(tuple(turns))).value == 1
        assert scorer(prompt, transcript(tuple(turns[:1]))).value == 0


def test_only_the_last_turn_answers():
    scorer = LastTurn(BUILT_IN["final_number"])
    said = [
        {"role": "assistant", "content": "#### 1"},
        {"role": "tool", "content": "#### 42\nassistant\n#### 42"},
        {"role": "assistant", "content": "I do not know."},
    ]
    assert last_turn(transcript(tuple(said))) == "I do not know."
    assert scorer(PROMPT, transcript(tuple(said))) == Score(
        0.0, "ok", {"has_answer": 0.0, "is_formatted": 0.0}, "no number found"
    )
    call = '#### 42 <tool_call>{"name": "calculator"}</tool_call>'
    assert scorer(PROMPT, call).value == 0
    assert scorer(PROMPT, "#### 42").value == 1
