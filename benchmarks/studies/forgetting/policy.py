"""The policy: a tabular softmax, its samples and its gradients.

    logits of token 1:  0.3 b[a] + U[x, a]      b is shared by all prompts: suppression spreads;
                                                it steps by the mean over the hard groups
    skill tokens:       T[c, j, .]              shared by a class and its drills
    finish token:       F[x, .]

All zero at first. Plain gradient ascent: Adam would rescale vanishing gradients.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.studies.forgetting.world import SAFE, Floats, Ints, Parts, Settings

SHARED = 0.3


class Policy:
    """Logits of S seeds."""

    def __init__(self, settings: Settings, num_seeds: int):
        s = settings
        self._hard_groups = s.hard_groups
        self._shared_SA = np.zeros((num_seeds, s.num_ideas + 1))
        self._own = Parts(
            np.zeros((num_seeds, s.num_prompts, s.num_ideas + 1)),
            np.zeros((num_seeds, s.num_classes, s.skill_tokens, s.symbols)),
            np.zeros((num_seeds, s.num_prompts, s.symbols)),
        )

    def chances(self, temperature: float = 1.0) -> Parts:
        """Return the probabilities of all tokens."""
        idea = SHARED * self._shared_SA[:, None] + self._own.idea
        return Parts(*(_softmax(part / temperature) for part in self._own._replace(idea=idea)))

    def ascend(self, gradient: Parts, rate: float) -> None:
        """Step along a gradient by the logits."""
        self._shared_SA += rate * SHARED * gradient.idea.sum(axis=1) / self._hard_groups
        for logits, part in zip(self._own, gradient, strict=True):
            logits += rate * part


@dataclass(frozen=True)
class Sequences:
    """The sequences of an iteration. Tokens after SAFE are drawn, and never used."""

    class_SQ: Ints
    prompt_SH: Ints
    tokens: Parts
    """[S, H], [S, Q, L] and [S, H]."""

    @property
    def contexts(self) -> Parts:
        """Indices of each token's distribution in the parts of a policy."""
        seed = np.arange(len(self.class_SQ))[:, None]
        position = np.arange(self.tokens.skill.shape[-1])
        at_prompt = (seed, self.prompt_SH)
        return Parts(at_prompt, (seed[..., None], self.class_SQ[..., None], position), at_prompt)

    @property
    def is_used(self) -> Parts:
        """True for tokens that are part of a sequence, shaped as `tokens`."""
        has_idea_SH = self.tokens.idea != SAFE
        num_drills = self.class_SQ.shape[1] - self.prompt_SH.shape[1]
        has_skill_SQ = np.pad(has_idea_SH, ((0, 0), (num_drills, 0)), constant_values=True)
        every_SQL = np.ones(self.tokens.skill.shape, dtype=bool)
        return Parts(np.ones_like(has_idea_SH), has_skill_SQ[..., None] & every_SQL, has_idea_SH)


def draw(chances: Parts, class_SQ: Ints, prompt_SH: Ints, uniform: Parts) -> Sequences:
    """Draw sequences with uniform numbers in [0, 1), one a token."""
    blank = Sequences(class_SQ, prompt_SH, uniform)
    columns = zip(chances, blank.contexts, uniform, strict=True)
    return Sequences(class_SQ, prompt_SH, Parts(*(_draw(p[at], u) for p, at, u in columns)))


def token_chances(chances: Parts, sequences: Sequences) -> Parts:
    """Return the probability of each token."""
    columns = zip(chances, sequences.contexts, sequences.tokens, strict=True)
    return Parts(*(part[(*at, token)] for part, at, token in columns))


def log_gradient(chances: Parts, sequences: Sequences, weights: Parts) -> Parts:
    """Return the gradient, by the logits, of the weighted sum of the tokens' log-probs."""
    columns = zip(chances, sequences.contexts, sequences.tokens, weights, strict=True)
    gradients = []
    for part, at, token, weight in columns:
        hits = _scatter(part.shape, (*at, token), weight)
        gradients.append(hits - part * hits.sum(-1, keepdims=True))
    return Parts(*gradients)


def entropy_gradient(chances: Parts, sequences: Sequences, weights: Parts) -> Parts:
    """Return the gradient, by the logits, of the weighted sum of the entropies at each token."""
    gradients = []
    for part, at, weight in zip(chances, sequences.contexts, weights, strict=True):
        visits = _scatter(part.shape[:-1], at, weight)[..., None]
        log_part = np.log(np.maximum(part, 1e-300))
        entropy = -(part * log_part).sum(-1, keepdims=True)
        gradients.append(-visits * part * (log_part + entropy))
    return Parts(*gradients)


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _draw(chances: Floats, uniform: Floats) -> Ints:
    """Return the token at which the running sum of chances [..., K] passes a uniform number."""
    passed = chances.cumsum(-1)[..., :-1] <= uniform[..., None]
    return passed.sum(-1)


def _scatter(shape: tuple[int, ...], at: tuple[Ints, ...], weights: Floats) -> Floats:
    places = np.ravel_multi_index(np.broadcast_arrays(*at), shape)
    sums = np.bincount(places.ravel(), weights.ravel(), minlength=int(np.prod(shape)))
    return sums.reshape(shape)
