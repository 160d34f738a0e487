"""Laws of every scorer: total, the same again, and blind to order and to the others of a batch."""

import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rrl_core.tasks.code_tests import CodeTests, Test, Tests
from rrl_core.tasks.math_verifying import MathVerify
from rrl_core.tasks.protocol import ParallelScorer, Prompt, Score
from rrl_core.tasks.reasoning import GeneratorScorer
from rrl_core.tasks.sandbox.running import Limits
from rrl_core.tasks.scorers import BUILT_IN, FunctionScorer, make_reward, score_all, score_one

CODE = "def f(x):\n    return x + 1"
PIECES = st.sampled_from(
    ["#### 7", "7", "\\boxed{7}", "\\boxed{\\frac{14}{2}}", "\\boxed{", "<answer>7</answer>", CODE,
     "```python\n" + CODE + "\n```", "def f(x): return 7", "import os; os._exit(0)", "", "\x00",
     "\ud800", "\u2212", "1e999", "nan", "####", "{", "#### 7 or 8"]
)  # fmt: skip
COMPLETIONS = st.one_of(
    st.lists(PIECES, max_size=3).map("\n".join),
    st.text(alphabet=st.characters(exclude_categories=[]), max_size=30),
)


def prompt_of(name: str) -> Prompt:
    answer = Tests("f", (Test((6,), 7),)).to_answer() if name == "code_tests" else "7"
    return Prompt("p-1", "test", "train", ({"role": "user", "content": "?"},), answer)


def is_lawful(scorer, completions: list[str]) -> None:
    prompt = prompt_of(scorer.name)
    prompts = [prompt] * len(completions)
    alone = [score_one(scorer, prompt, completion) for completion in completions]
    for score in alone:
        assert (score.status == "ok") == (score.value is not None)
        assert score.value is None or 0.0 <= score.value <= 1.0
        assert score.status in ("ok", "unscorable")
    assert score_all(scorer, prompts, completions) == alone
    order = list(range(len(completions)))
    random.Random(0).shuffle(order)
    shuffled = score_all(scorer, prompts, [completions[place] for place in order])
    assert shuffled == [alone[place] for place in order]
    assert score_all(scorer, prompts[:1], completions[:1]) == alone[:1]


OWN = FunctionScorer("own", "1", lambda prompt, completion: float(len(completion) % 2))


@given(st.lists(COMPLETIONS, max_size=5))
@settings(max_examples=40)
def test_text_scorers_are_lawful(completions):
    for scorer in (*BUILT_IN.values(), OWN):
        is_lawful(scorer, completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: CodeTests(Limits(), allow_limits_only=True),
        lambda: MathVerify(num_children=1),
        lambda: GeneratorScorer(num_children=1),
        lambda: make_reward("tests.flows.rewards:contains_digit"),
    ],
    ids=["code", "math", "reasoning", "own"],
)
def test_scorers_with_processes_are_lawful(make):
    scorer = make()
    assert isinstance(scorer, ParallelScorer)

    @given(st.lists(COMPLETIONS, min_size=1, max_size=4))
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(completions):
        is_lawful(scorer, completions)

    holds()


class Together:
    """A scorer that judges nothing before it was asked about two completions at a time."""

    name, version, num_parallel = "together", "1", 2

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        self.both.wait(timeout=60)
        return Score(None) if completion == "b" else Score(float(completion == "c"))


def test_several_are_judged_at_a_time_in_order_and_one_that_fails_costs_itself():
    prompts = [prompt_of("together")] * 4
    scores = score_all(Together(), prompts, ["a", "b", "c", "d"])
    assert [score.value for score in scores] == [0.0, None, 1.0, 0.0]
    assert scores[1].status == "scorer_error"
