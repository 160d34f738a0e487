"""The coded-transforms task: rules, rewards, feedback, streams and the corpus."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.coded.corpus import Corpus, CorpusSettings, beliefs
from benchmarks.studies.coded.world import (
    CLASSES,
    DIGITS,
    FAMILIES,
    NUM_COMMON,
    POSITIONS,
    RULES,
    Problems,
    answer_ids,
    attempt_prompts,
    blank_ids,
    decode,
    draw_problems,
    encode,
    feedback_ids,
    held_out_problems,
    is_review,
    make_world,
    random_feedback,
    raw_hints,
    review_ids,
    review_prompts,
    rewards,
    second_prompts,
    transform,
)

# Of 47291, each by hand.
BY_HAND = {
    "r": "19274",
    "l": "72914",
    "k": "14729",
    "f": "17294",
    "p": "74921",
    "h": "24791",
    "i": "58302",
    "j": "36180",
    "c": "52708",
    "a": "12479",
    "d": "97421",
    "u": "84482",
}
SHARE_TOLERANCE = 0.01  # of shares of 20,000 and more draws


def problems(*texts):
    class_B = np.array([CLASSES.index(text[0]) for text in texts])
    return Problems(class_B, np.stack([encode(text[1:]) for text in texts]))


def rows(*texts):
    return np.stack([encode(text) for text in texts])


@pytest.mark.parametrize("rule", RULES)
def test_rules_by_hand(rule):
    number = RULES.index(rule)
    done = transform(np.array([number]), problems("F47291").digits_B5)
    assert decode(done[0]) == BY_HAND[rule]
    stated = answer_ids(np.array([number]), problems("F47291").digits_B5)
    assert decode(stated[0]) == f"{rule}{BY_HAND[rule]}."


def test_rules_at_the_edge_of_the_digits():
    digits = problems("A90909").digits_B5
    got = [decode(transform(np.array([RULES.index(r)]), digits)[0]) for r in "ijcu"]
    # 9 + 1 = 0, 0 - 1 = 9, 9 - 9 = 0, 2 * 9 = 18 -> 8
    assert got == ["01010", "89898", "09090", "80808"]


@pytest.mark.parametrize("seed", range(20))
def test_every_rule_is_the_true_one_of_a_class_and_wrong_ones_are_wrong(seed):
    world = make_world(seed)
    assert set(world.true_rule_C) == set(range(12))
    assert (world.wrong_rule_C != world.true_rule_C).all()
    assert set(world.wrong_rule_C) <= set(range(12))


def test_worlds_differ_by_seed_and_only_by_seed():
    assert (make_world(1).true_rule_C == make_world(1).true_rule_C).all()
    assert (make_world(1).true_rule_C != make_world(2).true_rule_C).any()


def test_reward_is_for_right_digits_and_an_end_whatever_rule_is_stated():
    world = make_world(0)
    number = int(world.true_rule_C[5])
    right = BY_HAND[RULES[number]]
    wrong = right[:4] + str((int(right[4]) + 1) % 10)
    answers = [f"r{right}.", f"d{right}.", f"r{right};", f"r{wrong}.", f"{right}.."]
    got = rewards(world, problems(*["F47291"] * 5), rows(*answers))
    assert got.tolist() == [1, 1, 0, 0, 0]


def test_feedback_names_the_family_or_the_first_wrong_place():
    c = np.full(5, RULES.index("c"))  # of family V; 52708 is right
    answers = rows("r52718.", "c52718.", "c02708.", "c52708;", "i52708;")
    got = feedback_ids(c, problems(*["F47291"] * 5), answers)
    assert [decode(row) for row in got] == ["wV", "sT", "sQ", "sW", "wV"]


@settings(max_examples=50)
@given(st.integers(0, 11), st.lists(st.integers(0, 57), min_size=7, max_size=7))
def test_feedback_never_holds_a_digit_or_a_rule(rule, answer):
    got = feedback_ids(np.array([rule]), problems("F47291"), np.array([answer]))
    text = decode(got[0])
    assert text[0] in "ws"
    assert text[1] in (FAMILIES if text[0] == "w" else POSITIONS)
    assert not set(text) & set(DIGITS + RULES)


def test_feedback_on_a_wrong_rule_does_not_depend_on_the_answer_s_digits():
    answers = rows("r52708.", "r00000.", "u12345;")
    got = feedback_ids(np.full(3, RULES.index("c")), problems(*["F47291"] * 3), answers)
    assert len({decode(row) for row in got}) == 1


def test_feedback_that_says_nothing_looks_like_feedback():
    got = {decode(row) for row in random_feedback(np.random.default_rng(0), 200)}
    assert got == {f"w{family}" for family in FAMILIES}


def test_a_review_is_four_characters_of_one_form():
    made = review_ids(encode("ws"), np.array([5, 0]), np.array([0, 11]))
    assert [decode(row) for row in made] == ["wFr;", "sAu;"]
    assert is_review(made).all()
    others = rows("xFr;".replace("x", "="), "w4r;", "wFF;", "wFr.", "____", "wwr;", "w=u;", "wFa0")
    assert not is_review(others).any()


def test_streams_are_as_designed():
    one, answer, feedback = problems("F47291"), rows("c52708."), rows("wX")
    assert decode(attempt_prompts(one)[0]) == "F47291="
    memories = rows("____wFr;")
    assert decode(review_prompts(one, answer, feedback, memories)[0]) == (
        "#____wFr;F47291=c52708.!wX?"
    )
    assert decode(second_prompts(one, rows("wFr;"))[0]) == "F47291@wFr;="
    assert decode(second_prompts(one, blank_ids(1))[0]) == "F47291@____="
    assert decode(second_prompts(one, raw_hints(feedback))[0]) == "F47291@wX__="


def test_held_out_problems_are_never_trained_on():
    trained = draw_problems(np.random.default_rng(0), 20_000)
    held_out = held_out_problems(3, 240, 80)
    place = 10 ** np.arange(4, -1, -1)
    assert set(held_out.digits_B5 @ place % 7) == {3}
    assert set(trained.digits_B5 @ place % 7) == {0, 1, 2, 4, 5, 6}
    assert held_out.is_rare().tolist() == [True] * 240 + [False] * 80
    assert trained.is_rare().mean() == pytest.approx(0.7, abs=SHARE_TOLERANCE)


def test_beliefs_by_hand():
    world = make_world(0)
    belief = beliefs(CorpusSettings(), world, eps=0.3)
    assert belief.sum(axis=1) == pytest.approx(1)
    # common: 0.9 + 0.1 / 12; rare: wrong 0.7 + 0.3 / 12, right 0.3 / 12
    assert belief[0, world.true_rule_C[0]] == pytest.approx(0.9 + 0.1 / 12)
    assert belief[NUM_COMMON, world.wrong_rule_C[NUM_COMMON]] == pytest.approx(0.7 + 0.3 / 12)
    assert belief[NUM_COMMON, world.true_rule_C[NUM_COMMON]] == pytest.approx(0.3 / 12)


def texts(examples):
    pairs = zip(examples.prompts, examples.completions, strict=True)
    return [(decode(prompt), decode(completion)) for prompt, completion in pairs]


def large_corpus(**numbers):
    large = CorpusSettings(attempts=20_000, reviews=20_000, second_attempts=20_000, **numbers)
    return Corpus(large, np.random.default_rng(0), make_world(0), eps=0.0)


def test_attempts_of_the_corpus_state_the_wrong_rule_of_a_rare_class():
    world = make_world(0)
    for prompt, answer in texts(large_corpus(slip=0.0).attempts())[:500]:
        number = CLASSES.index(prompt[0])
        if number >= NUM_COMMON:
            assert answer[0] == RULES[world.wrong_rule_C[number]]


def test_reviews_of_the_corpus_are_as_good_as_designed():
    pairs = texts(large_corpus().reviews())
    assert is_review(rows(*[review for _, review in pairs])).all()
    alone = [(p, r) for p, r in pairs if p[1:9] == "_" * 8 and p[-3] == "w"]
    third = [RULES.index(r[2]) // 3 == FAMILIES.index(p[-2]) for p, r in alone]
    # 0.85 of the family by choice, and 0.15 / 4 by chance
    assert np.mean(third) == pytest.approx(0.85 + 0.15 / 4, abs=2 * SHARE_TOLERANCE)
    shown = [(p, r) for p, r in pairs if p[5] != "_"]
    assert all(p[5:7] + p[8] == f"w{p[9]};" for p, _ in shown)
    copied = [p[7] == r[2] for p, r in shown]
    # copied 0.85 * 0.6; else by chance: 0.4 * 0.85 / 12 + 0.15 / 12
    assert np.mean(copied) == pytest.approx(0.51 + 0.49 / 12, abs=2 * SHARE_TOLERANCE)


def test_second_attempts_of_the_corpus_follow_the_hint():
    pairs = texts(large_corpus().second_attempts())
    hints = np.array([p[7:11] for p, _ in pairs])
    raw = np.array([h.endswith("__") and h != "____" for h in hints])
    assert (hints == "____").mean() == pytest.approx(0.12, abs=SHARE_TOLERANCE)
    assert raw.mean() == pytest.approx(0.11, abs=SHARE_TOLERANCE)
    named = [p[9] == a[0] for (p, a), h, r in zip(pairs, hints, raw, strict=True) if "_" not in h]
    # 0.85 by following, and 0.15 / 12 because the rule named is drawn at random
    assert np.mean(named) == pytest.approx(0.85 + 0.15 / 12, abs=2 * SHARE_TOLERANCE)


def test_answers_of_the_corpus_slip_in_one_digit():
    examples = large_corpus().attempts()
    given = Problems(np.zeros(20_000, dtype=int), examples.prompts[:, 1:6])
    right = answer_ids(examples.completions[:, 0] - encode("r")[0], given.digits_B5)
    num_wrong = (right != examples.completions).sum(axis=1)
    assert set(num_wrong) == {0, 1}
    assert num_wrong.mean() == pytest.approx(0.05, abs=SHARE_TOLERANCE)
