"""Picks: which entries of the replay buffer an iteration goes back to.

    P(first pick = i) = 0.9 w_i / sum(w) + 0.1 / n        n eligible entries of the unit

Without replacement, by the Gumbel top-k trick (Kool et al., arXiv 1903.06059): the largest of
ln w_i + Gumbel noise is a draw with P ~ w, and the next largest a draw from what is left.

Our choices:
1. The noise of an entry comes from a hash of (seed, iteration, entry id) alone: neither the order
   of the candidates nor how they are cut into chunks matters, and a resumed run picks the same.
2. A slot is drawn uniformly with probability 0.1, decided by seed, iteration, unit and slot. The
   noise of uniform draws is independent of the prioritised one, so a draw of either kind has its
   law among what is left, whatever was picked before.
3. Caps hold while walking down the ranking: 2 picks a prompt and, of trajectories, a fifth of the
   iteration's samples a signature. Units are filled in the order of `UNITS`, under common caps.
4. Candidates come in chunks that can be opened again. A pass keeps only the best few of each
   ranking; where the caps use these up, another pass keeps the best few that the caps still allow.
   Each further pass finds a pick or ends its unit, so their number is bounded by that of the slots.
5. Substitutes are drawn when the fresh rewards are known, by priority alone and with noise of their
   own: the rewards say which prompts get one, and nothing about which of its trajectories.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rrl_core.replay.factors import (
    MAX_LOG,
    UNITS,
    Candidates,
    Floats,
    PriorityRule,
    base,
    concatenate,
    log_freshness,
    log_priority,
    rarity,
)
from rrl_core.replay.ranking import Best
from rrl_core.replay.tally import Tally, mixture
from rrl_core.seeds import derive_seed

PickKind = Literal["prioritised", "uniform", "substitute"]
KINDS: tuple[PickKind, ...] = ("prioritised", "uniform")
SIGNATURE_SHARE = 0.2
SPARE_ROWS = 64  # kept beyond eight a slot, for what the caps leave out

OpenChunks = Callable[[], Iterable[Candidates]]


@dataclass(frozen=True)
class PickRule:
    """How entries are drawn."""

    priority: PriorityRule
    max_per_signature: int
    """Trajectories of one signature an iteration, 1 or more: see `signature_cap`."""
    uniform_share: float = 0.1
    """Probability that a slot is drawn uniformly, in [0, 1]."""
    max_per_prompt: int = 2
    """Picks of one prompt an iteration, of all units together, 1 or more."""

    def __post_init__(self) -> None:
        if not 0 <= self.uniform_share <= 1:
            raise ValueError(f"expected a uniform share in [0, 1]; came {self.uniform_share}")
        if self.max_per_prompt < 1 or self.max_per_signature < 1:
            raise ValueError(
                f"expected caps of 1 or more; came {self.max_per_prompt} a prompt and "
                f"{self.max_per_signature} a signature"
            )


@dataclass(frozen=True)
class Pick:
    """An entry that was picked, and everything its pick rests on."""

    position: int
    """Place among the iteration's picks, from 0."""
    unit: str
    entry_id: str
    prompt_id: str
    value: float
    prompt_value: float
    age: int
    base: float
    freshness: float
    rarity: float
    priority: float
    """w, cut at exp(+-700)."""
    probability: float
    """Probability of being the first pick of its unit."""
    gumbel_key: float
    """Key it was ranked by: Gumbel noise, plus ln w where prioritised."""
    pick_kind: PickKind


@dataclass(frozen=True)
class Picks:
    """The picks of an iteration, and what they were drawn from."""

    picks: tuple[Pick, ...]
    num_candidates: int
    """Rows that were read, of any unit."""
    num_eligible: int
    """Those that could be picked: eligible and of a unit that was asked for."""
    priority_entropy: float | None
    """Entropy of a first pick in nats, mean over the slots; None where nothing is eligible."""


def signature_cap(num_samples: int) -> int:
    """Return the most trajectories of one signature in an iteration of `num_samples` samples."""
    return max(1, int(SIGNATURE_SHARE * num_samples))


def pick_entries(
    open_chunks: OpenChunks,
    num_picks: Mapping[str, int],
    rule: PickRule,
    seed_root: int,
    iteration: int,
    taken: Candidates | None = None,
) -> Picks:
    """Pick entries of each unit without replacement.

    Args:
        open_chunks: starts the candidates anew, the same rows at each call.
        num_picks: slots by unit; a unit that is not named gets none.
        rule: priorities, share of uniform draws, caps.
        seed_root: root of the run's seeds.
        iteration: the iteration the picks are for.
        taken: what was picked for it before: never picked again, and counted for the caps.

    Returns:
        At most `num_picks` of each unit: fewer where the eligible or the caps allow no more.

    Raises:
        ValueError: an unknown unit or a negative number of picks.
    """
    if set(num_picks) - set(UNITS) or min(num_picks.values(), default=0) < 0:
        raise ValueError(f"expected 0 or more picks of units {UNITS}; came {dict(num_picks)}")
    wanted = {unit: num_picks[unit] for unit in UNITS if num_picks.get(unit)}
    buffer = _Buffer(open_chunks, wanted, rule, (seed_root, iteration), taken)
    picks: list[Pick] = []
    for unit, num_slots in wanted.items():
        found = []
        for slot in range(num_slots):
            kind = _draw_kind(rule.uniform_share, seed_root, iteration, unit, slot)
            best = buffer.take_best(unit, kind)
            if best is None:
                break
            found.append(best)
        picks += _describe(found, rule, buffer.tallies[unit], len(picks))
    drawn = {unit: tally for unit, tally in buffer.tallies.items() if tally.num}
    return Picks(
        picks=tuple(picks),
        num_candidates=buffer.num_candidates,
        num_eligible=sum(tally.num for tally in drawn.values()),
        priority_entropy=_mean_entropy(drawn, wanted, rule.uniform_share),
    )


def pick_substitutes(
    trajectories: Candidates,
    num_picks: int,
    rule: PickRule,
    seed_root: int,
    iteration: int,
    taken: Candidates,
) -> list[Pick]:
    """Pick trajectories that take the place of fresh samples, one a prompt at most.

    Args:
        trajectories: those of the prompts whose fresh group is to be replaced.
        num_picks: groups that may be replaced; where it binds, the prompts with the best go first.
        rule: priorities and caps; nothing is drawn uniformly.
        seed_root: root of the run's seeds.
        iteration: the iteration they are for.
        taken: all that was picked for it before; their prompts get none, and positions go on.
    """
    rule = replace(rule, uniform_share=0.0, max_per_prompt=1)
    seed = derive_seed(seed_root, "substitutes")
    wanted = {"trajectory": num_picks}
    found = pick_entries(lambda: [trajectories], wanted, rule, seed, iteration, taken).picks
    return [
        replace(pick, position=len(taken) + pick.position, pick_kind="substitute") for pick in found
    ]


def gumbel_noise(
    entry_hashes: NDArray[np.uint64], kind: PickKind, seed_root: int, iteration: int
) -> Floats:
    """Return standard Gumbel noise, [N], that depends on each hash and the place alone."""
    seed = np.uint64(derive_seed(seed_root, "gumbel noise", iteration, kind))
    bits = _mix(_mix(entry_hashes ^ seed) ^ seed)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52  # never 0 or 1
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the bits mixed, each of them changing half of the others: SplitMix64's finaliser."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _draw_kind(
    uniform_share: float, seed_root: int, iteration: int, unit: str, slot: int
) -> PickKind:
    seed = derive_seed(seed_root, "pick kind", iteration, unit, slot)
    return "uniform" if seed / 2**63 < uniform_share else "prioritised"


@dataclass(frozen=True)
class _Found:
    """A row of the buffer, and how it was drawn."""

    row: Candidates
    key: float
    kind: PickKind


class _Taken:
    """What is picked already, and what the caps exclude because of it."""

    def __init__(self, rule: PickRule):
        self._rule = rule
        self._entry_ids: set[str] = set()
        self._prompts: Counter[str] = Counter()
        self._signatures: Counter[str] = Counter()

    def add(self, rows: Candidates) -> None:
        self._entry_ids.update(rows.entry_id)
        self._prompts.update(rows.prompt_id)
        self._signatures.update(rows.signature[rows.unit == "trajectory"])

    def allowed(self, rows: Candidates) -> Iterator[int]:
        """Yield the indices of the rows, of one unit, that may still be picked."""
        is_capped = len(rows) > 0 and rows.unit[0] == "trajectory"
        columns = zip(rows.entry_id, rows.prompt_id, rows.signature, strict=True)
        for index, (entry_id, prompt_id, signature) in enumerate(columns):
            is_free = self._signatures[signature] < self._rule.max_per_signature
            if (
                entry_id not in self._entry_ids
                and self._prompts[prompt_id] < self._rule.max_per_prompt
                and (is_free or not is_capped or not signature)  # "" is unknown, so not the same
            ):
                yield index


class _Buffer:
    """Rankings of the candidates by unit and kind of draw, read again where the caps use one up."""

    def __init__(
        self,
        open_chunks: OpenChunks,
        wanted: Mapping[str, int],
        rule: PickRule,
        place: tuple[int, int],
        taken: Candidates | None,
    ):
        self._open_chunks, self._wanted, self._rule = open_chunks, wanted, rule
        self._place = place
        self._taken = _Taken(rule)
        if taken is not None:
            self._taken.add(taken)
        self._rankings: dict[tuple[str, PickKind], Best] = {}
        self.num_candidates = 0
        self.tallies = {unit: Tally() for unit in wanted}
        for unit in wanted:
            self._empty_rankings(unit)
        for chunk in open_chunks():
            self.num_candidates += len(chunk)
            for unit, tally in self.tallies.items():
                rows = _eligible(chunk, unit)
                log_weights = log_priority(rows, rule.priority)
                tally.add(log_weights)
                self._rank(unit, rows, log_weights)

    def take_best(self, unit: str, kind: PickKind) -> _Found | None:
        """Return the best that the caps allow, and count it for them; None if there is none."""
        found = self._best_allowed(unit, kind)
        if found is None and self._rankings[unit, kind].has_dropped:
            self._read_again(unit)
            found = self._best_allowed(unit, kind)
        if found is not None:
            self._taken.add(found.row)
        return found

    def _read_again(self, unit: str) -> None:
        self._empty_rankings(unit)
        for chunk in self._open_chunks():
            rows = _eligible(chunk, unit)
            rows = rows.take(np.fromiter(self._taken.allowed(rows), dtype=np.intp))
            self._rank(unit, rows, log_priority(rows, self._rule.priority))

    def _empty_rankings(self, unit: str) -> None:
        size = 8 * self._wanted[unit] + SPARE_ROWS
        self._rankings |= {(unit, kind): Best(size) for kind in KINDS}

    def _rank(self, unit: str, rows: Candidates, log_weights: Floats) -> None:
        for kind in KINDS:
            noise = gumbel_noise(rows.entry_hash, kind, *self._place)
            keys = noise + log_weights if kind == "prioritised" else noise
            self._rankings[unit, kind].add(rows, keys)

    def _best_allowed(self, unit: str, kind: PickKind) -> _Found | None:
        ranking = self._rankings[unit, kind]
        if ranking.rows is None:
            return None
        for index in self._taken.allowed(ranking.rows):
            return _Found(ranking.rows.take(np.array([index])), float(ranking.keys[index]), kind)
        return None


def _eligible(chunk: Candidates, unit: str) -> Candidates:
    return chunk.take(chunk.is_eligible & (chunk.unit == unit))


def _describe(found: Sequence[_Found], rule: PickRule, tally: Tally, num_before: int) -> list[Pick]:
    """Return the picks of one unit, in the order they were found."""
    if not found:
        return []
    rows = concatenate(each.row for each in found)
    log_weights = log_priority(rows, rule.priority)
    columns = {
        "unit": rows.unit,
        "entry_id": rows.entry_id,
        "prompt_id": rows.prompt_id,
        "value": rows.value,
        "prompt_value": rows.prompt_value,
        "age": rows.age,
        "base": base(rows, rule.priority),
        "freshness": np.exp(log_freshness(rows, rule.priority)),
        "rarity": rarity(rows),
        "priority": np.exp(np.clip(log_weights, -MAX_LOG, MAX_LOG)),
        "probability": mixture(log_weights - tally.log_sum(), rule.uniform_share, tally.num),
    }
    facts: dict[str, list[Any]] = {name: column.tolist() for name, column in columns.items()}
    return [
        Pick(
            position=num_before + index,
            gumbel_key=each.key,
            pick_kind=each.kind,
            **{name: column[index] for name, column in facts.items()},
        )
        for index, each in enumerate(found)
    ]


def _mean_entropy(
    tallies: Mapping[str, Tally], wanted: Mapping[str, int], uniform_share: float
) -> float | None:
    if not tallies:
        return None
    num_slots = sum(wanted[unit] for unit in tallies)
    return sum(t.entropy(uniform_share) * wanted[u] for u, t in tallies.items()) / num_slots
