"""The task: problems, the rules that answer them, rewards, feedback, and what the policy reads.

Everything is arrays of token ids, B sequences a call. A stage's streams are of one length:

    attempt         F47291=                          c52708.
    review          #<m1><m2>F47291=c52708.!wX?      wFr;
    second attempt  F47291@wFr;=                     r19274.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rrl_core.seeds import derive_seed

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

DIGITS = "0123456789"
CLASSES = "ABCDEFGHIJKLMNOP"
NUM_COMMON = 6
RULES = "rlkfphijcadu"
FAMILIES = "XYVZ"
POSITIONS = "QRSTUW"
VOCABULARY = DIGITS + CLASSES + RULES + FAMILIES + POSITIONS + "ws.=#@!?;_"
TOKEN = {character: token for token, character in enumerate(VOCABULARY)}
NUM_DIGITS = 5
ANSWER_TOKENS, REVIEW_TOKENS, FEEDBACK_TOKENS = 7, 4, 2
MEMORIES = 2
RARE_SHARE = 0.7
HELD_OUT, MODULUS = 3, 7

_CLASS0, _RULE0 = TOKEN[CLASSES[0]], TOKEN[RULES[0]]
_FAMILY0, _POSITION0 = TOKEN[FAMILIES[0]], TOKEN[POSITIONS[0]]

# In the order of RULES, three a family, on digits [B, 5].
_TRANSFORMS: tuple[Callable[[Ints], Ints], ...] = (
    lambda d: d[:, ::-1],
    lambda d: np.roll(d, -1, axis=1),
    lambda d: np.roll(d, 1, axis=1),
    lambda d: d[:, [4, 1, 2, 3, 0]],
    lambda d: d[:, [1, 0, 3, 2, 4]],
    lambda d: d[:, [2, 0, 1, 3, 4]],
    lambda d: (d + 1) % 10,
    lambda d: (d - 1) % 10,
    lambda d: 9 - d,
    lambda d: np.sort(d, axis=1),
    lambda d: -np.sort(-d, axis=1),
    lambda d: 2 * d % 10,
)


def encode(text: str) -> Ints:
    """Return the token ids of a text, [L]."""
    return np.array([TOKEN[character] for character in text])


def decode(ids_L: Ints) -> str:
    """Return the text of token ids."""
    return "".join(VOCABULARY[token] for token in ids_L)


def transform(rules_B: Ints, digits_B5: Ints) -> Ints:
    """Apply to each row of digits the rule of this number, 0..11."""
    answers_B5 = np.empty_like(digits_B5)
    for rule in np.unique(rules_B):
        rows = rules_B == rule
        answers_B5[rows] = _TRANSFORMS[rule](digits_B5[rows])
    return answers_B5


def family(rules: Ints) -> Ints:
    """Return the number of each rule's family, 0..3."""
    return rules // 3


@dataclass(frozen=True)
class World:
    """What holds in one seed, by class [16]."""

    true_rule_C: Ints
    wrong_rule_C: Ints
    """Of rare classes: the rule that the policy is sure of at the start."""


def make_world(seed: int) -> World:
    """Draw a world; every rule is the true one of a class."""
    draws = np.random.default_rng(derive_seed(seed, "world"))
    num_classes, num_rules = len(CLASSES), len(RULES)
    extra = draws.integers(num_rules, size=num_classes - num_rules)
    true_rule_C = draws.permutation(np.concatenate([np.arange(num_rules), extra]))
    others_C = draws.integers(1, num_rules, size=num_classes)
    return World(true_rule_C, (true_rule_C + others_C) % num_rules)


@dataclass(frozen=True)
class Problems:
    """B problems."""

    class_B: Ints
    digits_B5: Ints

    def __len__(self) -> int:
        return len(self.class_B)

    def take(self, rows: Ints | slice) -> "Problems":
        """Return the problems that an index selects."""
        return Problems(self.class_B[rows], self.digits_B5[rows])

    def join(self, others: "Problems") -> "Problems":
        """Return these and then the others."""
        return Problems(
            np.concatenate([self.class_B, others.class_B]),
            np.concatenate([self.digits_B5, others.digits_B5]),
        )

    def ids(self) -> Ints:
        """Return their six tokens each, [B, 6]."""
        return np.concatenate([_CLASS0 + self.class_B[:, None], self.digits_B5], axis=1)

    def is_rare(self) -> Flags:
        return self.class_B >= NUM_COMMON


def draw_problems(draws: np.random.Generator, num: int) -> Problems:
    """Draw problems to train on, 70 % of rare classes."""
    num_rare = len(CLASSES) - NUM_COMMON
    rare_B = NUM_COMMON + draws.integers(num_rare, size=num)
    class_B = np.where(draws.random(num) < RARE_SHARE, rare_B, draws.integers(NUM_COMMON, size=num))
    rest_B = (HELD_OUT + draws.integers(1, MODULUS, size=num)) % MODULUS
    return Problems(class_B, _digits(draws, rest_B))


def held_out_problems(seed: int, num_rare: int, num_common: int) -> Problems:
    """Draw the problems of an evaluation, the same for every arm of a seed; rare ones first."""
    draws = np.random.default_rng(derive_seed(seed, "held out"))
    rare_B = NUM_COMMON + draws.integers(len(CLASSES) - NUM_COMMON, size=num_rare)
    class_B = np.concatenate([rare_B, draws.integers(NUM_COMMON, size=num_common)])
    return Problems(class_B, _digits(draws, np.full(len(class_B), HELD_OUT)))


def _digits(draws: np.random.Generator, rest_B: Ints) -> Ints:
    number_B = MODULUS * draws.integers(10**NUM_DIGITS // MODULUS, size=len(rest_B)) + rest_B
    return number_B[:, None] // 10 ** np.arange(NUM_DIGITS - 1, -1, -1) % 10


def answer_ids(rules_B: Ints, digits_B5: Ints) -> Ints:
    """Return what states a rule and carries it out, [B, 7]."""
    return _joined(_RULE0 + rules_B[:, None], transform(rules_B, digits_B5), ".")


def review_ids(marks_B: Ints, class_B: Ints, rules_B: Ints) -> Ints:
    """Return reviews that name a rule, [B, 4]; marks are tokens of `w` or `s`."""
    return _joined(marks_B[:, None], _CLASS0 + class_B[:, None], _RULE0 + rules_B[:, None], ";")


def rewards(world: World, problems: Problems, answers_B7: Ints) -> Floats:
    """Return 1 where the digits are those of the true rule and the end is there, else 0."""
    place_B = first_wrong(world.true_rule_C[problems.class_B], problems, answers_B7)
    return np.where(place_B == 6, 1.0, 0.0)


def first_wrong(rules_B: Ints, problems: Problems, answers_B7: Ints) -> Ints:
    """Return the place of the first wrong character after the stated rule, 6 where there is none.

    0..4 are digits, 5 is the end.
    """
    right_B6 = answer_ids(rules_B, problems.digits_B5)[:, 1:]
    is_wrong_B6 = answers_B7[:, 1:] != right_B6
    return np.where(is_wrong_B6.any(axis=1), is_wrong_B6.argmax(axis=1), 6)


def feedback_ids(rules_B: Ints, problems: Problems, answers_B7: Ints) -> Ints:
    """Return the feedback on wrong answers, [B, 2], where these are the true rules.

    `w` and the true rule's family if another rule is stated, else `s` and the first wrong place.
    """
    is_stated_B = answers_B7[:, 0] == _RULE0 + rules_B
    place_B = np.minimum(first_wrong(rules_B, problems, answers_B7), len(POSITIONS) - 1)
    mark_B = np.where(is_stated_B, TOKEN["s"], TOKEN["w"])
    told_B = np.where(is_stated_B, _POSITION0 + place_B, _FAMILY0 + family(rules_B))
    return np.stack([mark_B, told_B], axis=1)


def random_feedback(draws: np.random.Generator, num: int) -> Ints:
    """Return feedback that says nothing, [B, 2]: a family drawn at random."""
    told_B = _FAMILY0 + draws.integers(len(FAMILIES), size=num)
    return np.stack([np.full(num, TOKEN["w"]), told_B], axis=1)


def is_review(reviews_B4: Ints) -> Flags:
    """Tell which reviews have the form: mark, class, rule, semicolon."""
    mark_B, class_B, rule_B, end_B = reviews_B4.T - np.array([[0], [_CLASS0], [_RULE0], [0]])
    is_review_B: Flags = (
        np.isin(mark_B, [TOKEN["w"], TOKEN["s"]])
        & (class_B >= 0)
        & (class_B < len(CLASSES))
        & (rule_B >= 0)
        & (rule_B < len(RULES))
        & (end_B == TOKEN[";"])
    )
    return is_review_B


def attempt_prompts(problems: Problems) -> Ints:
    """Return `F47291=`, [B, 7]."""
    return _joined(problems.ids(), "=")


def review_prompts(
    problems: Problems, answers_B7: Ints, feedback_B2: Ints, memories_B8: Ints
) -> Ints:
    """Return `#<m1><m2>F47291=c52708.!wX?`, [B, 27]."""
    return _joined("#", memories_B8, problems.ids(), "=", answers_B7, "!", feedback_B2, "?")


def second_prompts(problems: Problems, hints_B4: Ints) -> Ints:
    """Return `F47291@wFr;=`, [B, 12]; the hint is a review, `____`, or feedback and `__`."""
    return _joined(problems.ids(), "@", hints_B4, "=")


def blank_ids(num: int, length: int = REVIEW_TOKENS) -> Ints:
    """Return rows of `_`, [B, length]."""
    return np.full((num, length), TOKEN["_"])


def raw_hints(feedback_B2: Ints) -> Ints:
    """Return `wX__`, [B, 4]."""
    return np.concatenate([feedback_B2, blank_ids(len(feedback_B2), 2)], axis=1)


def _joined(*parts: Ints | str) -> Ints:
    num = next(len(part) for part in parts if not isinstance(part, str))
    columns = [np.tile(encode(p), (num, 1)) if isinstance(p, str) else p for p in parts]
    return np.concatenate(columns, axis=1)
