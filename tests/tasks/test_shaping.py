"""A shaped reward: each part by hand, none to be had for nothing, the same in any order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.tasks.protocol import FactScorer, Prompt, RolloutFacts, Score, TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import FinalNumber, FunctionScorer, score_all, score_one
from rrl_core.tasks.shaping import (
    FORMATS,
    ShapedReward,
    Shaping,
    overlong_penalty,
    shape,
    shaped_task,
)

EXACT = 1e-12
PROMPT = Prompt("p-1", "sums", "train", ({"role": "user", "content": "3 + 4?"},), "7")
LIMITS = {"num_tokens": 90, "max_tokens": 100}


def shaped(shaping: Shaping, completion: str, **facts) -> Score:
    reward = ShapedReward(FinalNumber(), shaping)
    return score_all(reward, [PROMPT], [completion], [RolloutFacts(**facts)])[0]


def test_the_default_is_the_outcome_alone():
    task = build_task("arithmetic", {"num_train": 2, "num_eval": 0})
    assert shaped_task(task, Shaping()) is task
    assert Shaping().is_outcome_only
    assert shape(Shaping(), Score(0.25), "7", RolloutFacts()) == Score(
        0.25, components={"outcome": 0.25}
    )


def test_a_shaped_task_is_the_task_with_another_reward_before_its_scorers():
    task = build_task("arithmetic", {"num_train": 2, "num_eval": 1})
    other = shaped_task(task, Shaping(format="answer_line"))
    assert [s.name for s in other.scorers] == [
        "shaped:final_number", "final_number", "strict_format",
    ]  # fmt: skip
    assert other.prompts("eval") == task.prompts("eval")
    assert isinstance(other.scorers[0], FactScorer)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [
        (0, 0.0),
        (80, 0.0),  # the buffer of 20 begins above 100 - 20
        (81, -0.05),  # 1 of 20 into it
        (90, -0.5),
        (100, -1.0),
        (101, -1.0),
        (500, -1.0),
    ],
)
def test_the_overlong_penalty_grows_through_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20) == pytest.approx(penalty)


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer_tokens):
    with pytest.raises(ValueError, match=f"got {buffer_tokens} and 100"):
        overlong_penalty(5, max_tokens=100, buffer_tokens=buffer_tokens)


def test_each_part_by_hand():
    shaping = Shaping(
        format="answer_line", format_weight=0.2, overlong_tokens=20, overlong_weight=0.5,
        novelty_weight=0.1,
    )  # fmt: skip
    # Right, in form, half new, 10 of 20 tokens into the buffer: 1 + 0.2 + 0.1/2 - 0.5/2.
    score = shaped(shaping, "It is\n#### 7", novelty=0.5, **LIMITS)
    assert score.value == pytest.approx(1.0, abs=EXACT)
    assert score.components == {
        "has_answer": 1.0, "is_formatted": 1.0, "outcome": 1.0, "format": 1.0, "novelty": 0.5,
        "overlong": 0.5,
    }  # fmt: skip
    # Wrong, in form, all new: novelty pays in proportion to an outcome of 0.
    assert shaped(shaping, "#### 8", novelty=1.0, num_tokens=5, max_tokens=100).value == 0.2
    assert shaped(shaping, "8", novelty=1.0, num_tokens=100, max_tokens=100).value == -0.5


def test_components_are_weighed_and_those_a_score_lacks_are_left_out():
    score = Score(1.0, components={"a": 0.5, "b": 0.0})
    shaping = Shaping(components={"a": 3.0, "b": 1.0, "elsewhere": 4.0})
    assert shape(shaping, score, "", RolloutFacts()).value == 1.5 / 4
    assert shape(
        Shaping(components={"outcome": 1.0, "a": 1.0}), score, "", RolloutFacts()
    ).value == (0.75)
    lacking = shape(Shaping(components={"elsewhere": 1.0}), score, "", RolloutFacts())
    assert (lacking.value, lacking.status) == (None, "unscorable")
    assert "none of the components elsewhere" in lacking.feedback


def test_what_has_no_value_keeps_its_status():
    late = Score(None, "timeout", {"tests": 0.5}, "too slow")
    assert shape(Shaping(format="answer_line"), late, "#### 7", RolloutFacts()) == late


def test_a_penalty_needs_a_length_and_novelty_others_to_compare_with():
    assert shaped(Shaping(overlong_tokens=20), "#### 7").status == "unscorable"
    alone = shaped(Shaping(novelty_weight=0.3), "#### 7")
    assert (alone.value, "novelty" in alone.components) == (1.0, False)
    short = shaped(Shaping(overlong_tokens=200), "#### 7", **LIMITS)  # a limit below the buffer
    assert short.value == pytest.approx(1 - 0.5 * 0.9, abs=EXACT)


def test_another_weighing_is_another_version_and_another_outcome_too():
    rewards = [
        ShapedReward(outcome, shaping)
        for outcome in (FinalNumber(), FunctionScorer("final_number", "2", lambda p, c: 1.0))
        for shaping in (
            Shaping(format="answer_line"),
            Shaping(format="answer_line", format_weight=0),
        )
    ]
    assert len({reward.version for reward in rewards}) == 4
    assert rewards[0].version == ShapedReward(FinalNumber(), Shaping(format="answer_line")).version


@pytest.mark.parametrize(
    "shaping",
    [{"format": "poem"}, {"format": "answer_line", "format_weight": 0.5, "overlong_tokens": 9}],
    ids=str,
)
def test_a_shaping_that_could_outweigh_the_outcome_is_refused(shaping):
    with pytest.raises(TaskError, match="expected"):
        Shaping(**shaping)


IN_FORM = {
    "answer_line": ["#### 7", "Three and four.\n#### 7\n", "```\n3 + 4\n```\n#### 1,200"],
    "answer_tags": ["<answer>7</answer>", "Think.\n<answer>\n7\n</answer>\n"],
    "think_answer": [
        "<think>3 and 4</think><answer>7</answer>",
        " <think>\n3 + 4 < 9\n</think>\n\n<answer>```\nx\n```</answer>\n",
    ],
}
NOT_IN_FORM = {
    "answer_line": [
        "", "7", "####", "#### ", "#### seven", "#### 7 apples", "#### 7\n#### 7", "#### 7 #### 7",
        "#### 1\n#### 2\n#### 3", "so #### 7", "#### 7\nOr 8.", "```\n#### 7", "```\n#### 7\n```",
        "~~~\nx\n~~~\n```\n#### 7", "`#### 7`", "\u200b#### 7",
    ],
    "answer_tags": [
        "", "<answer></answer>", "<answer> \n\u200b</answer>", "<answer>?!</answer>", "<answer>7",
        "7</answer>", "</answer>7<answer>", "<answer>7</answer> or 8",
        "<answer>7</answer><answer>7</answer>", "<answer>" * 9 + "7" + "</answer>" * 9,
        "<answer><answer>7</answer></answer>", "<Answer>6</Answer><answer>7</answer>",
        "```\n<answer>7</answer>", "```\n<answer>7</answer>\n```", "`<answer>7</answer>`",
        "<answer>7</answer", "<answer >7</answer>",
    ],
    "think_answer": [
        "", "<answer>7</answer>", "<think>so</think>", "<think></think><answer></answer>",
        "<think> </think><answer>7</answer>", "<think>so</think><answer>\u200b</answer>",
        "<answer>7</answer><think>so</think>", "<think>so<answer>7</answer></think>",
        "<think>so</think> well <answer>7</answer>", "Sure! <think>so</think><answer>7</answer>",
        "<think>so</think><answer>7</answer>\nDone.",
        "<think>so</think><think>so</think><answer>7</answer>",
        "<think>so</think><answer>7</answer>" * 2,
        "<think>```<answer>6</answer>```</think><answer>7</answer>",
        "```\n<think>so</think><answer>7</answer>\n```",
        "<think>so</think>\n```\n<answer>7</answer>", "<think>so <think></think><answer>7</answer>",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_counts_exactly_once_filled_and_outside_code(name):
    for completion in IN_FORM[name]:
        assert FORMATS[name](completion), completion
    for completion in NOT_IN_FORM[name]:
        assert not FORMATS[name](completion), completion


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "```", "~~~", "\n", "#### 7",
     "####", "7", "so", " ", "\u200b", "`", "\ud800", "\x00", "</answer", "<", "#### 8",
     "\n#### 7\n"]
)  # fmt: skip
COMPLETIONS = st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=30)
SHAPINGS = [
    Shaping(format=name, format_weight=0.4, overlong_tokens=10, novelty_weight=0.9)
    for name in FORMATS
] + [Shaping(components={"has_answer": 1.0, "outcome": 2.0}, format="answer_line")]
FACTS = st.builds(RolloutFacts, st.integers(0, 60), st.integers(1, 50), st.none() | st.floats(0, 1))


@given(st.lists(st.tuples(COMPLETIONS, FACTS), max_size=5))
@settings(max_examples=60)
def test_every_reward_is_total_the_same_again_and_blind_to_order(rollouts):
    completions, facts = [c for c, _ in rollouts], [f for _, f in rollouts]
    prompts = [PROMPT] * len(rollouts)
    for shaping in SHAPINGS:
        reward = ShapedReward(FinalNumber(), shaping)
        scores = score_all(reward, prompts, completions, facts)
        assert all(score.status == "ok" for score in scores)
        assert [score_all(reward, [PROMPT], [c], [f])[0] for c, f in rollouts] == scores
        order = random.Random(0).sample(range(len(rollouts)), len(rollouts))
        assert score_all(
            reward, prompts, [completions[i] for i in order], [facts[i] for i in order]
        ) == [scores[i] for i in order]  # fmt: skip
        # Without facts a score says so, and nothing raises.
        assert all(score_one(reward, PROMPT, c).status != "scorer_error" for c in completions)


@given(COMPLETIONS, COMPLETIONS, FACTS, FACTS)
def test_no_shaping_puts_a_wrong_answer_above_a_right_one(first, second, facts, others):
    for shaping in SHAPINGS[:-1]:
        one, other = shaped(shaping, first, **vars(facts)), shaped(shaping, second, **vars(others))
        if one.components["outcome"] > other.components["outcome"]:
            assert one.value > other.value


@given(st.floats(0, 0.998), COMPLETIONS, FACTS)
def test_bonuses_make_no_success_of_what_is_none(outcome, completion, facts):
    for shaping in SHAPINGS[:-1]:
        assert shape(shaping, Score(outcome), completion, facts).value < 0.999
