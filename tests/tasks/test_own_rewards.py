"""A user's reward in child processes: who hangs or breaks down costs one score, and no other."""

import os
import sys
from collections.abc import Iterator

import pytest

from rrl_core.tasks.own_rewards import OwnReward
from rrl_core.tasks.protocol import Prompt, Score, TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import (
    FunctionScorer,
    load_reward,
    make_reward,
    score_all,
    score_one,
    serve_reward,
)

SPEC = "tests.tasks.tiny_reward:obey"
LIMIT_S = 0.7
MESSAGES = ({"role": "system", "content": "\ud800"}, {"role": "user", "content": "?"})
PROMPT = Prompt("p-1", "test", "train", MESSAGES, "7", "hard", {"hint": "think"})


@pytest.fixture(scope="module")
def scorer() -> Iterator[OwnReward]:
    version = load_reward(SPEC).version
    scorer = OwnReward(SPEC, version, LIMIT_S, num_children=2)
    yield scorer
    scorer._checker.end()


# completion, status and feedback of its score
BAD = [
    ("hang", "timeout", "no answer within 0.7 s"),
    ("end", "scorer_error", "no score: the checker's process ended"),
    ("crash", "scorer_error", "no score: the checker's process ended"),
    ("eat", "scorer_error", "the scorer raised MemoryError"),
    ("raise", "scorer_error", "the scorer raised ZeroDivisionError"),
    ("exit", "scorer_error", "the scorer raised SystemExit"),
    ("nan", "scorer_error", "the score is not finite"),
    ("nothing", "scorer_error", "the scorer raised TypeError"),
]


def test_who_hangs_or_breaks_down_costs_one_score_and_no_other(scorer: OwnReward) -> None:
    completions = ["a"]
    for number, (bad, _, _) in enumerate(BAD, start=2):
        completions += [bad, "a" * number]
    scores = score_all(scorer, [PROMPT] * len(completions), completions)
    assert [score.value for score in scores[::2]] == [1.0, *range(2, len(BAD) + 2)]
    expected = [Score(None, status, feedback=feedback) for _, status, feedback in BAD]
    assert scores[1::2] == expected


@pytest.mark.parametrize("completion", ["score", "raise", "nan", "nothing", "abc", "\ud800", ""])
def test_a_child_judges_as_this_process_does(scorer: OwnReward, completion: str) -> None:
    here = score_one(load_reward(SPEC), PROMPT, completion)
    assert score_one(scorer, PROMPT, completion) == here
    if completion == "score":
        assert here == Score(0.5, "ok", {"part": 0.25}, "\u2028 think")


def test_the_child_has_the_variables_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RRL_TEST_VARIABLE", "0.125")
    assert score_one(make_reward(SPEC), PROMPT, "variable").value == 0.125


def test_without_a_limit_the_function_is_called_in_this_process() -> None:
    scorer = make_reward(SPEC, None)
    assert isinstance(scorer, FunctionScorer)
    assert score_one(scorer, PROMPT, "process").value == os.getpid()
    assert score_one(make_reward(SPEC), PROMPT, "process").value != os.getpid()


def test_the_limit_is_a_parameter_of_every_task_and_no_part_of_the_version() -> None:
    versions = set()
    for limit_s in (None, 0.2):
        params = {"reward": SPEC, "reward_time_limit_s": limit_s, "num_train": 2, "num_eval": 1}
        [scorer] = build_task("arithmetic", params).scorers
        versions.add(scorer.version)
        if limit_s is not None:
            judged = score_one(scorer, PROMPT, "hang")
            assert judged == Score(None, "timeout", feedback="no answer within 0.2 s")
    assert len(versions) == 1


def test_a_reward_edited_meanwhile_gives_no_score_under_its_old_version(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "reward_edited_later.py"
    path.write_text("def f(prompt, completion):\n    return 0.25\n")
    scorer = make_reward("reward_edited_later:f")
    path.write_text("def f(prompt, completion):\n    return 0.75\n")
    judged = score_one(scorer, PROMPT, "a")
    assert (judged.value, judged.status) == (None, "scorer_error")
    assert "was edited: expected version" in judged.feedback
    del sys.modules["reward_edited_later"]
    with pytest.raises(TaskError, match="was edited"):
        serve_reward("reward_edited_later:f", scorer.version)
