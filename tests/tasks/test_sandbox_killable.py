"""Checkers in processes that can be ended: who hangs or breaks costs one answer, from anywhere."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rrl_core.tasks.sandbox.killable import Answer, Checker

LIMIT_S = 0.7
FUNCTION = "tests.tasks.tiny_checker:answer"


@pytest.fixture(scope="module")
def checker():
    checker = Checker(FUNCTION, LIMIT_S, num_children=2)
    yield checker
    checker.end()


def test_one_process_answers_many_questions(checker):
    answers = [checker.ask(number) for number in range(5)]
    assert [answer.value[0] for answer in answers] == list(range(5))
    assert len({answer.value[1] for answer in answers}) == 1


def test_a_hanging_question_costs_its_answer_in_time_and_no_other(checker):
    started = time.monotonic()
    answers = checker.ask_all(["a", "hang", "b", "hang", "c", "d"])
    assert time.monotonic() - started < 2 * LIMIT_S + 4.0
    assert [answer.status for answer in answers] == ["ok", "timeout", "ok", "timeout", "ok", "ok"]
    assert [answer.value[0] for answer in answers if answer.status == "ok"] == ["a", "b", "c", "d"]
    assert answers[1] == Answer("timeout", None, "no answer within 0.7 s")


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("raise", "ZeroDivisionError"),  # without the message, which may quote the reference
        ("exit", "SystemExit"),
        ("eat", "MemoryError"),
        ("end", "the checker's process ended"),
    ],
)
def test_a_checker_that_breaks_down_costs_one_answer(checker, question, reason):
    assert checker.ask(question) == Answer("error", None, reason)
    assert checker.ask("next").value[0] == "next"


def test_a_child_that_ended_while_idle_costs_no_answer(checker):
    os.kill(checker.ask("x").value[1], signal.SIGKILL)
    time.sleep(0.05)
    assert checker.ask("y").value[0] == "y"


def test_what_a_checker_prints_is_no_answer(checker):
    assert checker.ask("print").value[0] == "print"


def test_long_questions_and_odd_characters_come_through(checker):
    for question in ("x" * 300_000, "\ud800\u2028\n", {"a": [1.5, None]}):
        assert checker.ask(question).value[0] == question


def test_a_checker_that_cannot_be_loaded_says_why():
    answer = Checker("no_such_module:f", LIMIT_S, 1).ask(1)
    assert answer.status == "error"
    assert "ModuleNotFoundError" in answer.reason


def _asks_in_a_forked_process(checker, results):
    results.put((os.getpid(), checker.ask("x").value[1]))


def test_threads_and_forked_processes_may_ask(checker):
    [_, ours] = checker.ask("x").value
    with ThreadPoolExecutor(3) as pool:
        assert [a.value[0] for a in pool.map(checker.ask, range(9))] == list(range(9))
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    process = fork.Process(target=_asks_in_a_forked_process, args=(checker, results))
    process.start()
    process_id, theirs = results.get(timeout=30)
    process.join()
    assert process_id != os.getpid()
    assert theirs != ours
    assert checker.ask("x").value[0] == "x"  # the forked process has ended nothing of ours


def test_ended_children_are_gone():
    checker = Checker(FUNCTION, LIMIT_S, 1)
    [_, pid] = checker.ask("x").value
    checker.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert checker.ask("y").value[0] == "y"
    checker.end()
