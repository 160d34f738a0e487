"""The candidates of replay, and the factors of their priority.

Source: Retrospective Replay (arXiv 2504.14363) for states judged by a value model; the formula is
our choice, since the paper gives none.

    w_i = exp(beta * base_i) * freshness_i * rarity_i^0.5  (* curriculum_i)

    unit        base                                    freshness            rarity
    state       gain V(s) - V(x), or a `STATE_BASES`    1                    1
    trajectory  r - p_hat(x)                            exp(-age / horizon)  1 / signature_count
    prompt      1 - p_hat(x) if ever solved, else 0     1                    1

Our choices:
1. A state's freshness is 1 however old its rollout: re-scoring renews the judgement, and decay by
   age would delete exactly the early ideas that replay is for.
2. Everything is computed in logs. The priority that is recorded is cut at exp(+-700), inside what
   a float64 holds; picks use the uncut log.
3. The curriculum (`schedule.curriculum_weights`) is off unless it is given.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNITS = ("state", "trajectory", "prompt")
RARITY_POWER = 0.5
MAX_LOG = 700.0  # exp(709.8) is the largest float64

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Texts = NDArray[np.object_]


@dataclass(frozen=True)
class Candidates:
    """Rows of the replay buffer as columns [N], checked by `make_candidates`.

    An entry is in one row of all chunks together. Only a row that is not eligible may have a NaN: a
    state never judged has no value.
    """

    unit: Texts
    """state, trajectory or prompt."""
    entry_id: Texts
    """Event id of the state or rollout, or the prompt id."""
    entry_hash: NDArray[np.uint64]
    """`hash_ids` of the entry id: what the draw of a pick depends on."""
    prompt_id: Texts
    difficulty: Texts
    """Bucket of the curriculum."""
    value: Floats
    """V(s) with counts of a state, reward of a trajectory, p_hat of a prompt."""
    prompt_value: Floats
    """V(x) with counts."""
    p_hat: Floats
    """Recent success rate of the prompt, in (0, 1)."""
    is_ever_solved: Flags
    """True where the prompt was solved at any time."""
    state_ok: Ints
    """Successes among the state's recent continuations."""
    state_tries: Ints
    """The state's recent continuations that were scored."""
    age: Ints
    """Policy versions since the rollout was sampled."""
    signature: Texts
    """Signature of the solution; "" where unknown."""
    signature_count: Ints
    """Successes of the prompt with this signature, 1 or more."""
    is_eligible: Flags

    def __len__(self) -> int:
        return len(self.entry_id)

    def take(self, rows: NDArray[Any]) -> "Candidates":
        """Return the rows that an index or mask [N] selects."""
        return Candidates(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def make_candidates(columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> Candidates:
    """Convert columns, as a query returns them, to `Candidates`.

    Args:
        columns: every field of `Candidates` but `entry_hash`, [N] each; a missing text is "", a
            missing number NaN. Others are ignored.

    Raises:
        ValueError: a column is missing, of another length, or holds what it must not.
    """
    names = [f.name for f in fields(Candidates) if f.name != "entry_hash"]
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"expected the columns {names}; missing: {missing}")
    converted: dict[str, NDArray[Any]] = {}
    for name in names:
        if name in _DTYPES:
            converted[name] = np.asarray(columns[name], dtype=_DTYPES[name])
        else:
            texts = ["" if text is None else text for text in columns[name]]
            converted[name] = np.array(texts, dtype=object)
    candidates = Candidates(entry_hash=hash_ids(converted["entry_id"]), **converted)
    _check(candidates)
    return candidates


def _check(candidates: Candidates) -> None:
    for field in fields(candidates):
        came = getattr(candidates, field.name).shape
        if came != candidates.entry_id.shape or len(came) != 1:
            raise ValueError(
                f"expected columns of one length; `{field.name}` came with shape {came}, "
                f"`entry_id` with {candidates.entry_id.shape}"
            )
    unknown = set(candidates.unit.tolist()) - set(UNITS)
    if unknown:
        raise ValueError(f"expected units of {UNITS}; came {sorted(map(str, unknown))}")
    for name in ("value", "prompt_value", "p_hat"):
        wrong = candidates.is_eligible & ~np.isfinite(getattr(candidates, name))
        if wrong.any():
            raise ValueError(
                f"expected a finite `{name}` of what is eligible; came "
                f"{getattr(candidates, name)[wrong][0]} for {candidates.entry_id[wrong][0]!r}; "
                "mark it as not eligible"
            )
    if (candidates.age < 0).any() or (candidates.signature_count < 1).any():
        raise ValueError("expected age >= 0 and signature_count >= 1 in every row")


_DTYPES: Mapping[str, type] = {
    "value": np.float64, "prompt_value": np.float64, "p_hat": np.float64,
    "is_ever_solved": np.bool_, "is_eligible": np.bool_,
    "state_ok": np.int64, "state_tries": np.int64, "age": np.int64, "signature_count": np.int64,
}  # fmt: skip


def concatenate(parts: Iterable[Candidates]) -> Candidates:
    """Return the rows of one or more parts, in order."""
    held = list(parts)
    columns = {f.name: [getattr(part, f.name) for part in held] for f in fields(Candidates)}
    return Candidates(**{name: np.concatenate(column) for name, column in columns.items()})


def hash_ids(entry_ids: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits [N] of each id, the same on every machine."""
    digests = (
        hashlib.blake2b(i.encode("utf-8", "surrogatepass"), digest_size=8) for i in entry_ids
    )
    return np.frombuffer(b"".join(d.digest() for d in digests), dtype="<u8").astype(np.uint64)


STATE_BASES: Mapping[str, Callable[[Candidates], Floats]] = {
    "gain": lambda c: c.value - c.prompt_value,
    "value": lambda c: c.value,
    "variance": lambda c: c.value * (1 - c.value),
    "retry_success": lambda c: (c.state_ok + 0.5) / (c.state_tries + 2),
}


@dataclass(frozen=True)
class PriorityRule:
    """The numbers in the formula of the priority."""

    horizon: float
    """Policy versions over which a trajectory fades to 1/e; above 0."""
    beta: float = 10.0
    """Sharpness, per unit of reward range; 0 or more."""
    state_base: str = "gain"
    """A key of `STATE_BASES`."""
    curriculum: Mapping[str, float] | None = None
    """Factor above 0 by difficulty, 1 where a difficulty is not named; None means off."""

    def __post_init__(self) -> None:
        if not (self.horizon > 0 and self.beta >= 0):
            raise ValueError(
                f"expected horizon > 0 and beta >= 0; came {self.horizon} and {self.beta}"
            )
        if self.state_base not in STATE_BASES:
            raise ValueError(
                f"expected a state base of {sorted(STATE_BASES)}; came {self.state_base!r}"
            )
        if any(weight <= 0 for weight in (self.curriculum or {}).values()):
            raise ValueError(f"expected curriculum weights above 0; came {self.curriculum}")


def default_horizon(planned_iterations: int) -> float:
    """Return a quarter of the planned iterations, 8 at least."""
    return max(8.0, 0.25 * planned_iterations)


def base(candidates: Candidates, rule: PriorityRule) -> Floats:
    """Return what each priority rests on, [N], about -1..1: larger = more worth going back to."""
    of_state = STATE_BASES[rule.state_base](candidates)
    of_trajectory = candidates.value - candidates.p_hat
    of_prompt = np.where(candidates.is_ever_solved, 1 - candidates.p_hat, 0.0)
    of_other = np.where(candidates.unit == "trajectory", of_trajectory, of_prompt)
    return np.where(candidates.unit == "state", of_state, of_other)


def log_freshness(candidates: Candidates, rule: PriorityRule) -> Floats:
    """Return the log of the factor for age, [N], at most 0."""
    return np.where(candidates.unit == "trajectory", -candidates.age / rule.horizon, 0.0)


def rarity(candidates: Candidates) -> Floats:
    """Return how rare each solution is among its prompt's successes, [N], in (0, 1]."""
    return np.where(candidates.unit == "trajectory", 1 / candidates.signature_count, 1.0)


def log_priority(candidates: Candidates, rule: PriorityRule) -> Floats:
    """Return ln w_i, [N]: finite for every beta where the base is."""
    log_priority_N = (
        rule.beta * base(candidates, rule)
        + log_freshness(candidates, rule)
        + RARITY_POWER * np.log(rarity(candidates))
    )
    if rule.curriculum is not None:
        weights = [rule.curriculum.get(bucket, 1.0) for bucket in candidates.difficulty]
        log_priority_N = log_priority_N + np.log(weights)
    return log_priority_N
