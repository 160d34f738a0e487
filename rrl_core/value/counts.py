"""Outcomes that were counted, and what is believed after them.

Source: the design of this project ("Value model"); both are means of Beta posteriors.

    success rate    p(x) = (n_ok + 0.5) / (n_try + 2)       prior Beta(0.5, 1.5), mean 0.25
    counted value   V(s) = (n_ok + 2 v) / (n_try + 2)       v = the value model's own judgement

Our choice:
1. Both priors weigh two tries, so a judgement outlives a lucky success and not eight failures.
2. A prompt that was never tried counts as rarely solved (0.25): unknown is worth a try.
"""

_PRIOR_TRIES = 2.0
_PRIOR_VALUE = 0.25


def success_rate(num_ok: float, num_tries: float) -> float:
    """Return (num_ok + 0.5) / (num_tries + 2), in (0, 1): 0.25 where nothing was tried.

    Raises:
        ValueError: not 0 <= num_ok <= num_tries.
    """
    return posterior_value(num_ok, num_tries, _PRIOR_VALUE)


def posterior_value(num_ok: float, num_tries: float, value: float) -> float:
    """Return (num_ok + 2 value) / (num_tries + 2): a judgement moved by its own outcomes.

    Args:
        num_ok: successes; a count, or a sum of weights.
        num_tries: tries, of the same kind.
        value: [0, 1], success probability by a model that did not see these outcomes.

    Raises:
        ValueError: not 0 <= num_ok <= num_tries, or `value` is no probability.
    """
    if not 0 <= num_ok <= num_tries:
        raise ValueError(
            f"expected successes between 0 and the number of tries, got {num_ok} of {num_tries}"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"expected a value in [0, 1], got {value}")
    return (num_ok + _PRIOR_TRIES * value) / (num_tries + _PRIOR_TRIES)
