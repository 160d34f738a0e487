import itertools
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.replay.factors import UNITS, PriorityRule, hash_ids, log_priority
from rrl_core.replay.picks import (
    PickRule,
    Picks,
    gumbel_noise,
    pick_entries,
    pick_substitutes,
    signature_cap,
)
from rrl_core.seeds import derive_seed
from tests.replay.candidates import candidates, chunks

RULE = PickRule(PriorityRule(horizon=8.0, beta=2.0), max_per_signature=3)
SEEDS = st.integers(0, 2**32)
EXACT = 1e-11
NUM_SEEDS = 3000
CHI2_4_DOF = 23.5  # exceeded by chance once in 10,000
CHI2_11_DOF = 37.4  # the same for 11 degrees of freedom


def pick(rows, num_picks, *, rule=RULE, seed=0, iteration=1) -> Picks:
    return pick_entries(lambda: [rows], num_picks, rule, seed, iteration)


def states(*gains):
    return candidates(*({"value": gain, "prompt_value": 0.0} for gain in gains))


def chi2(observed, expected):
    return sum((observed[key] - e) ** 2 / e for key, e in expected.items())


def test_first_picks_follow_the_law():
    gains = [1.0, 0.8, 0.5, 0.2, -0.5]
    weights = [math.exp(2 * gain) for gain in gains]
    law = [0.9 * w / sum(weights) + 0.1 / 5 for w in weights]
    rows = states(*gains)
    firsts = [pick(rows, {"state": 1}, seed=seed).picks[0] for seed in range(NUM_SEEDS)]
    observed = Counter(first.entry_id for first in firsts)
    assert chi2(observed, {f"e{i}": NUM_SEEDS * p for i, p in enumerate(law)}) < CHI2_4_DOF
    assert all(p.probability == pytest.approx(law[int(p.entry_id[1])], abs=EXACT) for p in firsts)


def test_second_picks_follow_the_law_among_what_is_left():
    weights = [math.exp(2 * gain) for gain in (1.0, 0.8, 0.5, -0.5)]
    rule = PickRule(RULE.priority, max_per_signature=3, uniform_share=0.5)
    expected = {}
    for first, second in itertools.permutations(range(4), 2):
        p = 0.5 * weights[first] / sum(weights) + 0.5 / 4
        left = sum(weights) - weights[first]
        expected[f"e{first}", f"e{second}"] = (
            NUM_SEEDS * p * (0.5 * weights[second] / left + 0.5 / 3)
        )
    rows = states(1.0, 0.8, 0.5, -0.5)
    observed = Counter(
        tuple(p.entry_id for p in pick(rows, {"state": 2}, rule=rule, seed=seed).picks)
        for seed in range(NUM_SEEDS)
    )
    assert chi2(observed, expected) < CHI2_11_DOF


def test_the_share_of_uniform_slots_is_as_configured_and_their_kind_is_recorded():
    rows = states(*[0.1] * 10)
    kinds = Counter(
        p.pick_kind for seed in range(300) for p in pick(rows, {"state": 10}, seed=seed).picks
    )
    # 3000 slots at 0.1: mean 300, standard deviation 16.4
    assert abs(kinds["uniform"] - 300) < 4 * 16.4
    assert kinds["uniform"] + kinds["prioritised"] == 3000


def test_noise_is_standard_gumbel_and_its_kinds_are_independent():
    hashes = hash_ids(map(str, range(20_000)))
    drawn, uniform = (gumbel_noise(hashes, kind, 0, 1) for kind in ("prioritised", "uniform"))
    # mean 0.5772, standard deviation pi / sqrt 6 = 1.2825: 4 errors of the mean are 0.036
    assert abs(drawn.mean() - 0.5772) < 0.036
    assert abs(drawn.std() - math.pi / math.sqrt(6)) < 0.036
    assert abs(np.corrcoef(drawn, uniform)[0, 1]) < 4 / math.sqrt(20_000)
    assert abs(np.corrcoef(drawn, gumbel_noise(hashes, "prioritised", 0, 2))[0, 1]) < 0.03


def test_noise_is_what_integer_arithmetic_gives():
    def mix(bits):
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return bits ^ (bits >> 31)

    seed = derive_seed(7, "gumbel noise", 3, "uniform")
    bits = mix(mix(12345 ^ seed) ^ seed)
    expected = -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))
    noise = gumbel_noise(np.array([12345], dtype=np.uint64), "uniform", 7, 3)
    assert noise == pytest.approx([expected], abs=EXACT)


def random_rows(random, num, *, prompts=6, signatures=4):
    return candidates(
        *(
            {
                "unit": random.choice(UNITS),
                "entry_id": f"e{i}",
                "prompt_id": f"p{random.randrange(prompts)}",
                "value": random.random(),
                "prompt_value": random.random(),
                "age": random.randrange(30),
                "is_ever_solved": random.random() < 0.5,
                "signature": random.choice(["", *map(str, range(signatures))]),
                "signature_count": random.randrange(1, 5),
                "is_eligible": random.random() < 0.8,
            }
            for i in range(num)
        )
    )


@given(SEEDS, st.integers(0, 300), st.lists(st.integers(0, 300)))
def test_order_and_chunking_never_matter(seed, num, cuts):
    random = Random(seed)
    rows = random_rows(random, num)
    wanted = {unit: random.randrange(6) for unit in UNITS}
    parts = chunks(rows, [min(cut, num) for cut in cuts], random.sample(range(num), num))
    assert pick(rows, wanted, seed=seed) == pick_entries(lambda: parts, wanted, RULE, seed, 1)


def picks_by_sorting_everything(rows, wanted, seed):
    log_weights = log_priority(rows, RULE.priority)
    noise = {k: gumbel_noise(rows.entry_hash, k, seed, 1) for k in ("prioritised", "uniform")}
    keys = {"prioritised": noise["prioritised"] + log_weights, "uniform": noise["uniform"]}
    picked, prompts, signatures = [], Counter(), Counter()
    for unit, slot in ((u, slot) for u in UNITS for slot in range(wanted[u])):
        is_uniform = derive_seed(seed, "pick kind", 1, unit, slot) / 2**63 < RULE.uniform_share
        kind = "uniform" if is_uniform else "prioritised"
        for row in sorted(range(len(rows)), key=lambda row: -keys[kind][row]):
            signature = rows.signature[row] if unit == "trajectory" else ""
            if (
                rows.unit[row] == unit
                and rows.is_eligible[row]
                and rows.entry_id[row] not in picked
                and prompts[rows.prompt_id[row]] < RULE.max_per_prompt
                and (not signature or signatures[signature] < RULE.max_per_signature)
            ):
                picked.append(rows.entry_id[row])
                prompts[rows.prompt_id[row]] += 1
                signatures[signature] += 1
                break
    return picked


@given(SEEDS, st.integers(1, 12))
def test_bounded_memory_picks_what_sorting_everything_would(seed, prompts):
    random = Random(seed)
    rows = random_rows(random, 200, prompts=prompts, signatures=2)
    wanted = {unit: random.randrange(6) for unit in UNITS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rrl_core.replay.picks.SPARE_ROWS", 0)  # so that the caps use up what is kept
        picks = pick(rows, wanted, seed=seed).picks
    assert [p.entry_id for p in picks] == picks_by_sorting_everything(rows, wanted, seed)


def test_caps_that_use_up_what_was_kept_lead_to_another_pass():
    crowd = [{"prompt_id": "crowd", "value": 1.0, "prompt_value": 0.0} for _ in range(2000)]
    others = [{"prompt_id": f"q{i}", "value": 0.0, "prompt_value": 1.0} for i in range(3)]
    rows = candidates(*crowd, *others)
    passes = []

    def open_chunks():
        passes.append(1)
        return [rows]

    rule = PickRule(PriorityRule(horizon=8.0, beta=100.0), max_per_signature=1, uniform_share=0.0)
    picks = pick_entries(open_chunks, {"state": 8}, rule, 0, 1).picks
    assert Counter(p.prompt_id for p in picks) == {"crowd": 2, "q0": 1, "q1": 1, "q2": 1}
    assert len(passes) == 2


@given(SEEDS)
def test_picks_are_without_replacement_and_the_caps_hold(seed):
    rows = random_rows(Random(seed), 200)
    facts = {rows.entry_id[i]: i for i in range(len(rows))}
    picks = pick(rows, {"state": 5, "trajectory": 9, "prompt": 5}).picks
    assert len({p.entry_id for p in picks}) == len(picks)
    assert max(Counter(p.prompt_id for p in picks).values()) <= 2
    used = Counter(rows.signature[facts[p.entry_id]] for p in picks if p.unit == "trajectory")
    used.pop("", None)  # unknown: not known to be the same
    assert max(used.values(), default=0) <= 3
    assert all(rows.is_eligible[facts[p.entry_id]] for p in picks)
    assert [p.position for p in picks] == list(range(len(picks)))


def test_what_is_not_eligible_is_never_picked():
    rows = candidates(*({"is_eligible": False, "value": math.nan} for _ in range(3)))
    assert pick(rows, {"state": 2}) == Picks((), 3, 0, None)
    assert pick_entries(list, {"state": 2}, RULE, 0, 1) == Picks((), 0, 0, None)


def test_an_entry_with_nothing_beside_it_is_certain():
    (only,) = pick(states(0.5), {"state": 3}).picks
    assert only.probability == pytest.approx(1.0, abs=EXACT)
    assert only.priority == pytest.approx(math.e, abs=EXACT)  # exp(2 * 0.5)


def test_a_pick_carries_everything_its_priority_rests_on():
    row = {
        "unit": "trajectory", "entry_id": "r", "prompt_id": "p", "value": 1.0, "p_hat": 0.2,
        "age": 4, "signature": "70 *-", "signature_count": 4,
    }  # fmt: skip
    (p,) = pick(candidates(row), {"trajectory": 1}).picks
    assert (p.unit, p.entry_id, p.prompt_id, p.age, p.position) == ("trajectory", "r", "p", 4, 0)
    assert (p.value, p.base, p.rarity) == (1.0, 0.8, 0.25)
    assert p.freshness == pytest.approx(math.exp(-0.5), abs=EXACT)
    # exp(2 * 0.8 - 0.5) * 0.25^0.5
    assert p.priority == pytest.approx(math.exp(1.1) / 2, rel=EXACT)


def test_the_entropy_of_equal_priorities_is_that_of_a_uniform_draw():
    assert pick(states(*[0.5] * 8), {"state": 1}).priority_entropy == pytest.approx(math.log(8))


def test_a_sharpness_of_a_thousand_does_not_overflow():
    rule = PickRule(PriorityRule(horizon=8.0, beta=1000.0), max_per_signature=1, uniform_share=0.0)
    picks = pick(states(1.0, 0.9, -1.0), {"state": 3}, rule=rule).picks
    assert [p.entry_id for p in picks] == ["e0", "e1", "e2"]
    assert all(math.isfinite(p.priority) and p.priority > 0 for p in picks)
    assert [p.probability for p in picks] == pytest.approx([1.0, 0.0, 0.0], abs=EXACT)


def test_other_iterations_and_seeds_pick_otherwise():
    rows = states(*[0.5] * 50)
    first = [p.entry_id for p in pick(rows, {"state": 5}).picks]
    assert first == [p.entry_id for p in pick(rows, {"state": 5}).picks]
    assert first != [p.entry_id for p in pick(rows, {"state": 5}, iteration=2).picks]
    assert first != [p.entry_id for p in pick(rows, {"state": 5}, seed=1).picks]


def test_a_fifth_of_the_samples_may_share_a_signature():
    assert [signature_cap(n) for n in (1, 9, 10, 64, 128)] == [1, 1, 2, 12, 25]


@pytest.mark.parametrize("num_picks", [{"token": 1}, {"state": -1}])
def test_slots_that_do_not_exist_are_refused(num_picks):
    with pytest.raises(ValueError, match="expected 0 or more picks of units"):
        pick(states(0.5), num_picks)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"max_per_signature": 0}, "0 a signature"),
        ({"max_per_signature": 1, "max_per_prompt": 0}, "0 a prompt"),
        ({"max_per_signature": 1, "uniform_share": 1.5}, "came 1.5"),
    ],
)
def test_a_rule_out_of_range_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        PickRule(RULE.priority, **numbers)


# --- substitutes

NONE = candidates()


def trajectories(*prompts, **facts):
    own = {"unit": "trajectory", "value": 1.0, "p_hat": 0.1} | facts
    return candidates(*(own | {"prompt_id": p, "entry_id": f"old {p}"} for p in prompts))


def test_a_prompt_gets_one_substitute_by_the_law_of_priorities():
    # two trajectories of p1, of ages 0 and 8 with a horizon of 8: weights 1 : exp(-1)
    rows = candidates(
        *(
            {"unit": "trajectory", "value": 1.0, "p_hat": 0.1, "prompt_id": "p1", "age": age}
            for age in (0, 8)
        )
    )
    law = 1 / (1 + math.exp(-1))
    found = [pick_substitutes(rows, 4, RULE, seed, 1, NONE) for seed in range(NUM_SEEDS)]
    assert {len(picks) for picks in found} == {1}
    assert {picks[0].pick_kind for picks in found} == {"substitute"}
    firsts = Counter(picks[0].entry_id for picks in found)
    expected = {"e0": NUM_SEEDS * law, "e1": NUM_SEEDS * (1 - law)}
    assert chi2(firsts, expected) < CHI2_4_DOF
    [first] = [p[0] for p in found if p[0].entry_id == "e0"][:1]
    assert first.probability == pytest.approx(law, abs=EXACT)


def test_substitutes_go_on_after_the_picks_under_common_caps():
    rows = trajectories("p1", "p2", "p3", "p4", signature="42")
    taken = trajectories("q1", "q2", signature="42")
    picks = pick_substitutes(rows, 4, RULE, 0, 1, taken)
    assert [p.position for p in picks] == [2]  # 3 of a signature, 2 of them taken
    assert pick_substitutes(rows, 0, RULE, 0, 1, NONE) == []
    of_taken_prompt = pick_substitutes(trajectories("p1"), 4, RULE, 0, 1, trajectories("p1"))
    assert of_taken_prompt == []
