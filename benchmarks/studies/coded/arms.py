"""The arms that are compared: what each one changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Second = Literal["review", "retry", "blank", "raw_feedback", "random_review"]
Unit = Literal["state", "trajectory", "prompt"]


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    algorithm: str = "grpo"
    """A key of `rrl_core.algorithms.objectives.ALGORITHMS`."""
    prompts: int = 4
    """P, problems an iteration."""
    rate: float = 3e-4
    temperature: float = 1.0
    """Of sampling and training; everything is evaluated at 1."""
    entropy: float = 0.0
    """Weight of the entropy of every token."""
    second: Second | None = None
    """What a failed problem's second attempts are given; None: there are none."""
    reviews: int | None = 2
    """R, second attempts of a problem with a failure; None: as many as it has failures."""
    has_memory: bool = True
    """False: reviews see no earlier ones."""
    has_feedback: bool = True
    """False: the family in the feedback is drawn at random."""
    distill: float = 1.0
    """Weight lambda of successful second attempts in the loss of their problem alone."""
    unit: Unit | None = None
    """What is replayed; None: nothing. A trajectory joins a fresh group of its problem."""
    uniform_share: float = 0.1
    """Share of the picks that are drawn uniformly."""
    is_stale: bool = False
    """True: an entry is judged once, when it is made."""
    credit: str = "direct"
    """A key of `rrl_core.algorithms.prefix_credit.PREFIX_CREDITS`, for the tokens of states."""


_SRRL = Arm("srrl", second="review")
_STATE, _TRAJECTORY = Arm("rrl-state", unit="state"), Arm("rrl-trajectory", unit="trajectory")

ARMS: tuple[Arm, ...] = (
    Arm("grpo"),
    _SRRL,
    replace(_SRRL, name="retry", second="retry"),
    replace(_SRRL, name="blank", second="blank"),
    replace(_SRRL, name="raw-feedback", second="raw_feedback"),
    replace(_SRRL, name="random-review", second="random_review"),
    replace(_SRRL, name="srrl-no-memory", has_memory=False),
    replace(_SRRL, name="srrl-no-distil", distill=0.0),
    replace(_SRRL, name="srrl-no-feedback", has_feedback=False),
    Arm("raft", algorithm="raft"),
    Arm("ppo", algorithm="ppo"),
    Arm("grpo-temperature", temperature=1.3),
    Arm("grpo-entropy", entropy=0.01),
    _STATE,
    replace(_STATE, name="rrl-state-uniform", uniform_share=1.0),
    replace(_STATE, name="rrl-state-stale", is_stale=True),
    _TRAJECTORY,
    replace(_TRAJECTORY, name="uniform", uniform_share=1.0),
    replace(_TRAJECTORY, name="stale", is_stale=True),
    Arm("rrl-prompt", unit="prompt"),
    replace(_SRRL, name="rrl+srrl", unit="trajectory"),
)

# Tuned on seeds that no arm is compared on.
TUNING_SEEDS = range(1000, 1003)
TUNING: tuple[Arm, ...] = (
    *(
        Arm(f"grpo-p{prompts}-rate{rate}", prompts=prompts, rate=rate)
        for prompts in (4, 8)
        for rate in (1.5e-4, 3e-4, 6e-4)
    ),
    *(replace(_SRRL, name=f"srrl-r{num}", reviews=num) for num in (2, 4, 8, None)),
)


def named(names: Sequence[str], arms: Sequence[Arm] = ARMS) -> list[Arm]:
    """Return the arms of these names, all if there are none.

    Raises:
        ValueError: an arm is unknown.
    """
    by_name = {arm.name: arm for arm in arms}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"expected arms of {list(by_name)}; came {unknown}")
    return [by_name[name] for name in names] or list(arms)
