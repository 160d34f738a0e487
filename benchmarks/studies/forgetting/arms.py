"""The arms that are compared: what each one changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.studies.forgetting.world import Settings


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    algorithm: Literal["grpo", "ppo"] = "grpo"
    rate: float = 1.0
    temperature: float = 1.0
    """Of sampling and training; everything is evaluated at 1."""
    entropy: float = 0.0
    """Weight of the entropy of every token."""
    kl: float = 0.0
    """Weight of the KL to the start policy, on the first token alone."""
    is_annealed: bool = False
    """True: entropy and KL fall linearly to 0 over the last fifth of the iterations."""
    unit: Literal["state", "trajectory", "prompt"] | None = None
    """What is replayed; None: nothing."""
    credit: Literal["none", "corrected", "direct"] = "direct"
    """What a given idea gets when its continuations do better than the prompt."""
    uniform_share: float = 0.1
    is_stale: bool = False
    """True: an idea is judged once, when it is first seen."""
    age_decay: float = 0.0
    """What a state's log-priority loses with each iteration since it was first seen."""
    learns_from_replays: bool = True
    """False: the value model is trained on fresh rollouts only."""
    has_skill_term: bool = True
    """False: the value model knows nothing that ideas share."""
    is_counted: bool = False
    """True: outcomes of a state's own continuations enter its value by counting."""
    has_gates: bool = False
    """True: only prompts not solved by p_hat are gone back to, only rarely solved ones credited."""
    start: int = 2
    """First iteration that replays."""
    settings: Settings = field(default_factory=Settings)


_DIRECT = Arm("rrl-state direct", unit="state")
_NO_FORGETTING = Settings(safe_reward=0.0)

ARMS: tuple[Arm, ...] = (
    Arm("grpo"),
    Arm("ppo", algorithm="ppo", rate=0.3),
    Arm("grpo + temperature", temperature=1.3),
    Arm("grpo + entropy", entropy=0.01),
    Arm("grpo + KL of token 1", kl=0.25, rate=2.0),
    Arm("grpo + KL of token 1, annealed", kl=0.3, rate=2.0, is_annealed=True),
    Arm("rrl-prompt", unit="prompt"),
    Arm("rrl-trajectory", unit="trajectory"),
    replace(_DIRECT, name="rrl-state none", credit="none"),
    replace(_DIRECT, name="rrl-state corrected", credit="corrected"),
    _DIRECT,
    replace(_DIRECT, name="direct, uniform picks", uniform_share=1.0),
    replace(_DIRECT, name="direct, stale scores", is_stale=True),
    *(replace(_DIRECT, name=f"direct, age decay {d}", age_decay=d) for d in (0.01, 0.05, 0.2)),
    replace(_DIRECT, name="direct, values from fresh only", learns_from_replays=False),
    replace(_DIRECT, name="direct, values without skill", has_skill_term=False),
    replace(_DIRECT, name="direct, counted values", is_counted=True),
    replace(_DIRECT, name="direct, gates on p_hat", has_gates=True),
    replace(_DIRECT, name="direct, counted and gates", is_counted=True, has_gates=True),
    replace(_DIRECT, name="direct, from iteration 200", start=200),
    Arm("s = 0: grpo", settings=_NO_FORGETTING),
    replace(_DIRECT, name="s = 0: rrl-state direct", settings=_NO_FORGETTING),
)

# What the rivals' numbers above were chosen from, by final J on `TUNING_SEEDS`. Replay was not
# tuned: it trains at the rate of GRPO, with the product's numbers.
TUNING_SEEDS = range(1000, 1006)
TUNING: tuple[Arm, ...] = (
    *(Arm(f"grpo, rate {r}", rate=r) for r in (0.5, 1.0, 2.0)),
    *(Arm(f"ppo, rate {r}", algorithm="ppo", rate=r) for r in (0.1, 0.3, 1.0)),
    *(Arm(f"temperature {t}", temperature=t) for t in (1.1, 1.3, 1.6, 2.0)),
    *(Arm(f"entropy {e}", entropy=e) for e in (0.003, 0.01, 0.03, 0.1, 0.2)),
    *(
        Arm(f"KL {kl}, rate {rate}" + ", annealed" * ends, kl=kl, rate=rate, is_annealed=ends)
        for ends in (False, True)
        for rate in (1.0, 2.0, 4.0)
        for kl in (0.2, 0.25, 0.3, 0.5)
    ),
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
