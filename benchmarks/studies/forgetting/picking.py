"""What an iteration goes back to: candidates from a memory, picked by `rrl_core.replay`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.studies.forgetting.arms import Arm
from benchmarks.studies.forgetting.critic import Critic
from benchmarks.studies.forgetting.memory import KEPT, Memory, counts
from benchmarks.studies.forgetting.world import Ints
from rrl_core.replay.credit import RARELY_SOLVED
from rrl_core.replay.factors import Candidates, PriorityRule, default_horizon, make_candidates
from rrl_core.replay.picks import PickRule, pick_entries, signature_cap
from rrl_core.value.counts import posterior_value, success_rate

BETA = 10.0
SOLVED = 0.75

Columns = Mapping[str, Any]  # of all seeds: [S, N, entries of a prompt], or what broadcasts to it


class Picker:
    """Picks the replayed groups of an arm, seed by seed."""

    def __init__(self, arm: Arm, seeds: Sequence[int]):
        s = arm.settings
        self._arm, self._seeds = arm, seeds
        priority = PriorityRule(default_horizon(s.iterations), beta=BETA)
        num_samples = (s.drill_groups + s.hard_groups) * s.group_size
        self._rule = PickRule(priority, signature_cap(num_samples), arm.uniform_share)
        if arm.unit is not None:
            num_entries = {"state": s.num_ideas + 1, "trajectory": KEPT, "prompt": 1}[arm.unit]
            self._shape = (len(seeds), s.num_prompts, num_entries)
            self._blank = _blank_candidates(arm.unit, *self._shape[1:])

    def pick(self, iteration: int, memory: Memory, critic: Critic) -> list[Ints]:
        """Return each seed's picks as rows (prompt, entry), [at most R, 2].

        The entry is the idea of a state, or says which of the kept successes is replayed.
        """
        arm = self._arm
        if arm.unit is None or iteration < arm.start:
            return [np.empty((0, 2), dtype=np.int64) for _ in self._seeds]
        columns = _COLUMNS[arm.unit](arm, iteration, memory, critic)
        columns = {name: np.broadcast_to(c, self._shape) for name, c in columns.items()}
        return [
            self._pick_seed(iteration, seed, {name: c[row].ravel() for name, c in columns.items()})
            for row, seed in enumerate(self._seeds)
        ]

    def _pick_seed(self, iteration: int, seed: int, facts: Columns) -> Ints:
        chunk = replace(self._blank, **facts)
        wanted = {str(self._arm.unit): self._arm.settings.replay_groups}
        picks = pick_entries(lambda: [chunk], wanted, self._rule, seed, iteration).picks
        entries = [[int(part) for part in pick.entry_id.split("/")] for pick in picks]
        return np.array(entries, dtype=np.int64).reshape(-1, 2)


def _state_columns(arm: Arm, iteration: int, memory: Memory, critic: Critic) -> Columns:
    value_SNA, prompt_value_SNA = critic.idea_values(), critic.prompt_values()[..., None]
    if arm.is_counted:
        value_SNA = posterior_value(*counts(memory.continued_SNAU), value_SNA)
        num_ok_SN, num_tries_SN = counts(memory.recent_SNU)
        prompt_value_SNA = posterior_value(
            num_ok_SN[..., None], num_tries_SN[..., None], prompt_value_SNA
        )
    if arm.is_stale:
        value_SNA, prompt_value_SNA = memory.value_SNA, memory.prompt_value_SNA
    # The product has no decay of states: what the log-priority loses is taken from the base.
    decay_SNA = arm.age_decay * (iteration - memory.seen_SNA) / BETA
    is_open_SN = success_rate(*counts(memory.recent_SNU)) < (SOLVED if arm.has_gates else 1.0)
    return {
        "value": value_SNA - decay_SNA,
        "prompt_value": prompt_value_SNA,
        "is_eligible": (memory.seen_SNA > 0) & is_open_SN[..., None],
    }


def _trajectory_columns(arm: Arm, iteration: int, memory: Memory, critic: Critic) -> Columns:
    p_hat_SN1 = success_rate(*counts(memory.recent_SNU))[..., None]
    is_kept_SNV = memory.solved_SNV > 0
    return {
        "value": np.ones(()),
        "p_hat": p_hat_SN1,
        "age": np.where(is_kept_SNV, iteration - memory.solved_SNV, 0),
        "signature_count": np.maximum(1, is_kept_SNV.sum(-1, keepdims=True)),
        "is_eligible": is_kept_SNV & (p_hat_SN1 <= RARELY_SOLVED),
    }


def _prompt_columns(arm: Arm, iteration: int, memory: Memory, critic: Critic) -> Columns:
    num_ok_SN, num_tries_SN = counts(memory.recent_SNU)
    p_hat_SN = success_rate(num_ok_SN, num_tries_SN)
    return {
        "value": p_hat_SN[..., None],
        "p_hat": p_hat_SN[..., None],
        "is_ever_solved": memory.solved_SNV[..., :1] > 0,
        "is_eligible": ((num_tries_SN > 0) & (p_hat_SN < SOLVED))[..., None],
    }


_COLUMNS: Mapping[str, Callable[[Arm, int, Memory, Critic], Columns]] = {
    "state": _state_columns,
    "trajectory": _trajectory_columns,
    "prompt": _prompt_columns,
}


def _blank_candidates(unit: str, num_prompts: int, num_entries: int) -> Candidates:
    places = [(x, entry) for x in range(num_prompts) for entry in range(num_entries)]
    zeros = np.zeros(len(places))
    numbers = ("value", "prompt_value", "p_hat", "is_ever_solved", "state_ok", "state_tries", "age")
    texts = [str(x) for x, _ in places]
    return make_candidates(
        {
            "unit": [unit] * len(places),
            "entry_id": [f"{x}/{entry}" for x, entry in places],
            "prompt_id": texts,
            "difficulty": [""] * len(places),
            "signature": texts,
            "signature_count": zeros + 1,
            "is_eligible": zeros,
            **dict.fromkeys(numbers, zeros),
        }
    )
