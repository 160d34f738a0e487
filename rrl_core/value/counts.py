"""Outcomes that were counted, and what is believed after them.

Source: the design of this project ("Value model"); both are means of Beta posteriors.

    success rate    p(x) = (n_ok + 0.5) / (n_try + 2)       prior Beta(0.5, 1.5), mean 0.25
    counted value   V(s) = (n_ok + 2 v) / (n_try + 2)       v = the value model's own judgement

Our choice:
1. Both priors weigh two tries, so a judgement outlives a lucky success and not eight failures.
2. A prompt that was never tried counts as rarely solved (0.25): unknown is worth a try.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PRIOR_TRIES = 2.0
_PRIOR_VALUE = 0.25


def success_rate(num_ok: ArrayLike, num_tries: ArrayLike) -> NDArray[np.float64]:
    """Return (num_ok + 0.5) / (num_tries + 2), in (0, 1): 0.25 where nothing was tried.

    Raises:
        ValueError: not 0 <= num_ok <= num_tries.
    """
    return posterior_value(num_ok, num_tries, _PRIOR_VALUE)


def posterior_value(
    num_ok: ArrayLike, num_tries: ArrayLike, value: ArrayLike
) -> NDArray[np.float64]:
    """Return (num_ok + 2 value) / (num_tries + 2): a judgement moved by its own outcomes.

    Args:
        num_ok: successes; counts, or sums of weights, of any shape.
        num_tries: tries, of the same kind and shape.
        value: [0, 1], success probability by a model that did not see these outcomes.

    Raises:
        ValueError: not 0 <= num_ok <= num_tries, or `value` is no probability.
    """
    ok, tries, own = (np.asarray(n, dtype=np.float64) for n in (num_ok, num_tries, value))
    if not np.all((ok >= 0) & (ok <= tries)):
        raise ValueError(
            f"expected successes between 0 and the number of tries, got {ok} of {tries}"
        )
    if not np.all((own >= 0) & (own <= 1)):
        raise ValueError(f"expected a value in [0, 1], got {own}")
    posterior: Any = (ok + _PRIOR_TRIES * own) / (tries + _PRIOR_TRIES)
    return np.asarray(posterior)
