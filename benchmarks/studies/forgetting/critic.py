"""The small value model: an additive logistic regression on what a state is made of.

    V(x)          = sigma(w[x])
    V(x, a, d_<j) = sigma(u[x, a] + k[c, j] + sum_{i<j} e[c, i, d_i])      drills have no u

Learned by summed logistic-gradient steps, from every sequence including replayed ones, except V(x):
that is about the prompt's own attempts. Starts at -1 for w and k.
"""

import numpy as np

from benchmarks.studies.forgetting.policy import Sequences
from benchmarks.studies.forgetting.world import Flags, Floats, Settings

PROMPT_RATE, IDEA_RATE, SKILL_RATE = 0.1, 0.5, 0.03
START = -1.0


class Critic:
    """Values of S seeds."""

    def __init__(self, settings: Settings, num_seeds: int, has_skill_term: bool = True):
        s = settings
        self._class_N = np.arange(s.num_prompts) % s.num_classes
        self._prompt_SN = np.full((num_seeds, s.num_prompts), START)
        self._idea_SNA = np.zeros((num_seeds, s.num_prompts, s.num_ideas + 1))
        self._position_SCJ = np.full((num_seeds, s.num_classes, s.skill_tokens + 1), START)
        self._token_SCLK = np.zeros((num_seeds, s.num_classes, s.skill_tokens, s.symbols))
        self._skill_rate = SKILL_RATE if has_skill_term else 0.0

    def prompt_values(self) -> Floats:
        """Return V(x), [S, N]."""
        return _sigmoid(self._prompt_SN)

    def idea_values(self) -> Floats:
        """Return V(x, a), [S, N, A]: right after the idea."""
        first_SN = self._position_SCJ[:, self._class_N, 0]
        return _sigmoid(self._idea_SNA + first_SN[..., None])

    def state_values(self, sequences: Sequences) -> Floats:
        """Return the value before each skill token and before the finish token, [S, Q, L + 1]."""
        seed, classes, position = sequences.contexts.skill
        token_SQL = self._token_SCLK[seed, classes, position, sequences.tokens.skill]
        logits_SQJ = self._position_SCJ[seed[..., 0], classes[..., 0]].copy()
        logits_SQJ[..., 1:] += token_SQL.cumsum(-1)
        num_hard = sequences.prompt_SH.shape[1]
        logits_SQJ[:, -num_hard:] += self._idea_SNA[
            (*sequences.contexts.idea, sequences.tokens.idea)
        ][..., None]
        return _sigmoid(logits_SQJ)

    def learn(
        self, sequences: Sequences, rewards_SQ: Floats, is_own_SH: Flags, is_learned_SQ: Flags
    ) -> None:
        """Step once.

        Args:
            sequences: what was sampled.
            rewards_SQ: rewards, in [0, 1].
            is_own_SH: True for the prompt's own attempts, from which V(x) learns.
            is_learned_SQ: True for sequences that the values of states learn from.
        """
        num_hard = sequences.prompt_SH.shape[1]
        seed, prompt_SH = sequences.contexts.idea
        own_error_SH = rewards_SQ[:, -num_hard:] - self.prompt_values()[seed, prompt_SH]
        is_state_SQ = sequences.is_used.skill[..., 0] & is_learned_SQ
        error_SQJ = (rewards_SQ[..., None] - self.state_values(sequences)) * is_state_SQ[..., None]
        np.add.at(self._prompt_SN, (seed, prompt_SH), PROMPT_RATE * own_error_SH * is_own_SH)
        np.add.at(
            self._idea_SNA,
            (seed, prompt_SH, sequences.tokens.idea),
            IDEA_RATE * error_SQJ[:, -num_hard:, 0],
        )
        seed, classes, position = sequences.contexts.skill
        np.add.at(self._position_SCJ, (seed[..., 0], classes[..., 0]), self._skill_rate * error_SQJ)
        later_SQL = error_SQJ[..., :0:-1].cumsum(-1)[..., ::-1]  # of position j: errors after it
        at = (seed, classes, position, sequences.tokens.skill)
        np.add.at(self._token_SCLK, at, self._skill_rate * later_SQL)


def _sigmoid(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))
