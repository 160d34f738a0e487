"""Judging beside generation: the same scores as without, in order, and none lost."""

import threading

import pytest

from rrl_core.tasks.protocol import Prompt, Score
from rrl_core.tasks.scorers import FinalNumber, FunctionScorer
from rrl_core.tasks.scoring_pool import Asked, ScoringPool

WAIT_S = 60  # at most, where something is wrong


def asked(key: str, completion: str) -> Asked:
    return Asked(key, Prompt("p", "test", "train", (), "7"), completion)


class Waiting:
    """Judges by length; what is "slow" waits until it may go on, and what is "bad" raises."""

    name, version = "waiting", "1"

    def __init__(self, num_parallel: int = 2) -> None:
        self.num_parallel = num_parallel
        self.may_go_on, self.quick_done = threading.Event(), threading.Event()
        self.judged: list[str] = []

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        if completion == "slow":
            assert self.may_go_on.wait(WAIT_S)
        self.judged.append(completion)
        if completion == "bad":
            raise ValueError
        if completion == "quick":
            self.quick_done.set()
        return Score(float(len(completion)))


@pytest.fixture
def scorer():
    scorer = Waiting()
    yield scorer
    scorer.may_go_on.set()


def test_what_was_begun_is_judged_before_it_is_asked_for(scorer):
    pool = ScoringPool([scorer])
    pool.begin(asked("a", "slow"))
    pool.begin(asked("b", "quick"))
    assert scorer.quick_done.wait(WAIT_S)  # while "slow" is at work: none delays another
    assert scorer.judged == ["quick"]
    scorer.may_go_on.set()
    judged = pool.judge(scorer, [asked("a", "slow"), asked("b", "quick"), asked("c", "late")])
    assert [one.score.value for one in judged] == [4.0, 5.0, 4.0]
    assert sorted(scorer.judged) == ["late", "quick", "slow"]  # once each
    pool.close()


def test_one_that_fails_costs_itself(scorer):
    pool = ScoringPool([scorer])
    texts = ["one", "bad", "three"]
    for text in texts:
        pool.begin(asked(text, text))
    judged = pool.judge(scorer, [asked(text, text) for text in texts])
    assert [one.score.status for one in judged] == ["ok", "scorer_error", "ok"]
    pool.close()


def test_the_score_of_another_text_or_prompt_is_not_used(scorer):
    pool = ScoringPool([scorer])
    pool.begin(asked("a", "old"))
    pool.begin(asked("b", "same"))
    other = Asked("b", Prompt("other", "test", "train", (), "7"), "same")
    judged = pool.judge(scorer, [asked("a", "newer"), other])
    assert [one.score.value for one in judged] == [5.0, 4.0]
    assert scorer.judged.count("same") == 2
    pool.close()


def test_what_is_forgotten_is_judged_again_when_asked_for(scorer):
    pool = ScoringPool([scorer])
    pool.begin(asked("a", "quick"))
    assert scorer.quick_done.wait(WAIT_S)
    pool.forget()
    assert [one.score.value for one in pool.judge(scorer, [asked("a", "quick")])] == [5.0]
    assert scorer.judged == ["quick", "quick"]
    pool.close()


def test_closing_does_not_wait_for_what_is_at_work():
    scorer = Waiting(num_parallel=1)
    pool = ScoringPool([scorer])
    for key in "ab":
        pool.begin(asked(key, "slow"))
    pool.close()
    assert scorer.judged == []
    scorer.may_go_on.set()


def test_quick_scorers_are_asked_in_this_thread_when_their_scores_are_wanted():
    threads = []

    def reward(prompt: Prompt, completion: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    own = FunctionScorer("own", "1", reward)
    pool = ScoringPool([FinalNumber(), own])
    assert not pool.has_waiting_scorers
    pool.begin(asked("a", "#### 7"))
    assert not threads
    for scorer in (FinalNumber(), own):
        assert [one.score.value for one in pool.judge(scorer, [asked("a", "#### 7")])] == [1.0]
    assert threads == [threading.current_thread()]
