"""Outcomes: an old answer compared with a new one, under one version of one scorer.

old     new     outcome
failed  solved  rescued
solved  solved  retained
solved  failed  regressed
failed  failed  still_failed
"""

from typing import Literal

SUCCESS = 0.999  # a reward of this much is a success, here as in the views

Outcome = Literal["rescued", "retained", "regressed", "still_failed"]


def is_success(reward: float) -> bool:
    """Return whether a reward counts as solved."""
    return reward >= SUCCESS


def compare(old_reward: float, new_reward: float) -> Outcome:
    """Return what became of an old answer. Both rewards are by the same scorer version."""
    if is_success(new_reward):
        return "retained" if is_success(old_reward) else "rescued"
    return "regressed" if is_success(old_reward) else "still_failed"
