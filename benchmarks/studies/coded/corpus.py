"""What the policy is warm-started on: attempts, reviews and second attempts, written by rule.

It makes execution a skill that is there, reviewing one that is imperfect and free of the mapping
from classes to rules, and the wrong rule of a rare class something the policy is sure of.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.studies.coded.world import (
    CLASSES,
    MEMORIES,
    NUM_COMMON,
    NUM_DIGITS,
    RULES,
    TOKEN,
    Flags,
    Floats,
    Ints,
    Problems,
    World,
    answer_ids,
    attempt_prompts,
    blank_ids,
    draw_problems,
    family,
    feedback_ids,
    raw_hints,
    review_ids,
    review_prompts,
    second_prompts,
)


@dataclass(frozen=True)
class CorpusSettings:
    """The numbers of the corpus; shares are probabilities."""

    attempts: int = 96
    reviews: int = 48
    second_attempts: int = 64
    review_weight: float = 0.6
    """Weight of reviews in the loss; the others weigh 1."""
    slip: float = 0.05
    """An answer has one digit that is wrong."""
    common_right: float = 0.9
    memory_copied: float = 0.6
    review_random: float = 0.15
    hint_followed: float = 0.85
    hint_blank: float = 0.12
    hint_raw: float = 0.11


@dataclass(frozen=True)
class Examples:
    """Streams of one stage: prompts [B, T] and completions [B, L]."""

    prompts: Ints
    completions: Ints


class Corpus:
    """Draws examples of one world at one difficulty, or of none: then rules are uniform."""

    def __init__(
        self,
        settings: CorpusSettings,
        draws: np.random.Generator,
        world: World | None = None,
        eps: float = 1.0,
    ) -> None:
        self._settings, self._draws = settings, draws
        self._belief_CR = beliefs(settings, world, eps)

    def attempts(self) -> Examples:
        """Return problems with answers by the rule that is believed in."""
        problems = draw_problems(self._draws, self._settings.attempts)
        return Examples(
            attempt_prompts(problems), self._answers(self._believed(problems), problems)
        )

    def reviews(self) -> Examples:
        """Return failed attempts with reviews: class, digits and both rules are unrelated."""
        s, draws, num = self._settings, self._draws, self._settings.reviews
        problems = draw_problems(draws, num)
        true_B, stated_B, memory_B = (draws.integers(len(RULES), size=num) for _ in range(3))
        failed_B7 = self._failed(true_B, stated_B, problems)
        feedback_B2 = feedback_ids(true_B, problems, failed_B7)
        is_slip_B = feedback_B2[:, 0] == TOKEN["s"]
        of_family_B = np.where(
            is_slip_B, stated_B, 3 * family(true_B) + draws.integers(3, size=num)
        )
        num_memories_B = draws.integers(MEMORIES + 1, size=num)
        is_copied_B = (num_memories_B > 0) & (draws.random(num) < s.memory_copied)
        named_B = np.where(is_copied_B, memory_B, of_family_B)
        is_random_B = draws.random(num) < s.review_random
        named_B = np.where(is_random_B, draws.integers(len(RULES), size=num), named_B)
        memories_B8 = self._memories(problems, memory_B, num_memories_B)
        return Examples(
            review_prompts(problems, failed_B7, feedback_B2, memories_B8),
            review_ids(feedback_B2[:, 0], problems.class_B, named_B),
        )

    def second_attempts(self) -> Examples:
        """Return answers after a review, after raw feedback and after blanks."""
        s, draws, num = self._settings, self._draws, self._settings.second_attempts
        problems = draw_problems(draws, num)
        named_B = draws.integers(len(RULES), size=num)
        mark_B = np.where(draws.random(num) < 1 / len(RULES), TOKEN["s"], TOKEN["w"])
        hints_B4 = review_ids(mark_B, problems.class_B, named_B)
        kind_B = draws.random(num)
        is_blank_B, is_raw_B = kind_B < s.hint_blank, kind_B >= 1 - s.hint_raw
        hints_B4[is_blank_B] = blank_ids(int(is_blank_B.sum()))
        raw_B2 = self._raw_feedback(problems, named_B)
        hints_B4[is_raw_B] = raw_hints(raw_B2)[is_raw_B]
        meant_B = np.where(is_raw_B, 3 * family(named_B) + draws.integers(3, size=num), named_B)
        believed_B = self._believed(problems)
        is_slip_B = is_raw_B & (raw_B2[:, 0] == TOKEN["s"])
        is_followed_B = ~is_blank_B & ~is_slip_B & (draws.random(num) < s.hint_followed)
        rules_B = np.where(is_followed_B, meant_B, believed_B)
        return Examples(second_prompts(problems, hints_B4), self._answers(rules_B, problems))

    def _believed(self, problems: Problems) -> Ints:
        ends_BR = self._belief_CR[problems.class_B].cumsum(axis=1)
        drawn_B1 = self._draws.random((len(problems), 1))
        rules_B: Ints = np.minimum((ends_BR < drawn_B1).sum(axis=1), len(RULES) - 1)
        return rules_B

    def _answers(self, rules_B: Ints, problems: Problems) -> Ints:
        is_slip_B = self._draws.random(len(problems)) < self._settings.slip
        return self._slipped(answer_ids(rules_B, problems.digits_B5), is_slip_B)

    def _failed(self, true_B: Ints, stated_B: Ints, problems: Problems) -> Ints:
        """Return answers by the stated rule, with a wrong digit where it is the true one."""
        is_slip_B = self._draws.random(len(problems)) < self._settings.slip
        answers_B7 = answer_ids(stated_B, problems.digits_B5)
        return self._slipped(answers_B7, is_slip_B | (true_B == stated_B))

    def _slipped(self, answers_B7: Ints, is_slip_B: Flags) -> Ints:
        """Return the answers with another digit at one place of these rows."""
        rows = np.flatnonzero(is_slip_B)
        place = 1 + self._draws.integers(NUM_DIGITS, size=len(rows))
        other = self._draws.integers(1, 10, size=len(rows))
        answers_B7[rows, place] = (answers_B7[rows, place] + other) % 10
        return answers_B7

    def _raw_feedback(self, problems: Problems, true_B: Ints) -> Ints:
        """Return feedback on failed attempts by rules that are unrelated to the true ones."""
        stated_B = self._draws.integers(len(RULES), size=len(problems))
        return feedback_ids(true_B, problems, self._failed(true_B, stated_B, problems))

    def _memories(self, problems: Problems, last_B: Ints, num_memories_B: Ints) -> Ints:
        """Return the memory slots [B, 8]: the last memory stands last, empty slots first."""
        num = len(problems)
        first_B = self._draws.integers(len(RULES), size=num)
        wrong_B = np.full(num, TOKEN["w"])
        slots_B24 = np.stack(
            [review_ids(wrong_B, problems.class_B, rules_B) for rules_B in (first_B, last_B)],
            axis=1,
        )
        slots_B24[num_memories_B < 2, 0] = TOKEN["_"]
        slots_B24[num_memories_B < 1, 1] = TOKEN["_"]
        return slots_B24.reshape(num, -1)


def beliefs(settings: CorpusSettings, world: World | None, eps: float) -> Floats:
    """Return how often the corpus states each rule, by class [16, 12].

    Common classes: the true rule with 0.9; rare ones: a fixed wrong rule with 1 - eps; else any.
    """
    num_classes, num_rules = len(CLASSES), len(RULES)
    belief_CR = np.full((num_classes, num_rules), 1 / num_rules)
    if world is None:
        return belief_CR
    is_rare_C = np.arange(num_classes) >= NUM_COMMON
    sure_C = np.where(is_rare_C, world.wrong_rule_C, world.true_rule_C)
    share_C = np.where(is_rare_C, 1 - eps, settings.common_right)
    belief_CR *= 1 - share_C[:, None]
    belief_CR[np.arange(num_classes), sure_C] += share_C
    return belief_CR
