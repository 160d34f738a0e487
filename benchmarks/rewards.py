"""Measure how fast completions are judged: GSM8K by its number, code in the sandbox.

- `gsm8k`: texts as long as GSM8K's solutions, through `score_all` with `final_number`; they are
  made up here, so that the figure needs no data.
- `code`: the reference solutions of our own problems, all their tests in one child process each,
  side by side on all CPUs. Also told: how a batch fares in which every eighth completion hangs.
- `own`: a reward function `module:function` in its child processes, through `score_all`.
- `beside`: what code verdicts add to the generation they run beside. Generation is a schedule: 128
  completions of drawn lengths that end one by one within 8 seconds, as on an accelerator, which
  leaves the CPUs alone. (An engine on the same CPUs shares them: there `cpu_ms` tells the cost.)
  Compared are generation alone, then the verdicts after it, and the verdicts beside it.

At least 5,000 scores and 20 verdicts a second, and at most 5 % added, pass (exit code 0). `cpu_ms`
is processor time of this process and its children for one verdict: it tells the cost also where
other work runs.

    python benchmarks/rewards.py [--verdicts 200] [--json]
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import machine_facts, print_machine, print_table
from rich.console import Console

PASS_SCORES_PER_S = 5_000
PASS_VERDICTS_PER_S = 20
PASS_ADDED_FRAC = 0.05
GENERATION_S = 8.0
NUM_GENERATED = 128
MEDIAN_TOKENS, MAX_TOKENS, SIGMA = 100, 256, 0.5  # of the drawn lengths, lognormal
OWN_REWARD = "rrl_core.tasks.dense:contains_digit"
NUM_TEXTS = 5_000
HANGING = "def hang(*args):\n    while True:\n        pass\n"


def made_up_solutions(number: int) -> list[tuple[int, str]]:
    """Return answers and solutions: a few sentences with sums, and the answer after the marker."""
    draw = random.Random(0)
    solutions = []
    for _ in range(number):
        total, sentences = draw.randint(1, 99), []
        for _ in range(draw.randint(2, 6)):
            more = draw.randint(1, 99)
            sentences.append(
                f"Then there are {more} more of them in the other box, so that all together it is "
                f"{total} + {more} = <<{total}+{more}={total + more}>>{total + more}."
            )
            total += more
        solutions.append((total, "\n".join(sentences) + f"\n#### {total:,}"))
    return solutions


def measure_gsm8k() -> dict[str, Any]:
    from rrl_core.tasks.prompts import ask, make_prompt
    from rrl_core.tasks.scorers import BUILT_IN, score_all

    solutions = made_up_solutions(NUM_TEXTS)
    prompts = [
        make_prompt("gsm8k", "train", ask("?"), str(answer), instruction="")
        for answer, _ in solutions
    ]
    started, cpu_s = time.perf_counter(), _cpu_s()
    scores = score_all(BUILT_IN["final_number"], prompts, [text for _, text in solutions])
    seconds = time.perf_counter() - started
    assert {score.value for score in scores} == {1.0}
    cpu_ms = (_cpu_s() - cpu_s) * 1e3 / len(scores)
    return {"scores_per_s": len(scores) / seconds, "cpu_ms": cpu_ms}


def measure_own() -> dict[str, Any]:
    from rrl_core.tasks.prompts import ask, make_prompt
    from rrl_core.tasks.scorers import make_reward, score_all

    scorer = make_reward(OWN_REWARD)
    texts = [text for _, text in made_up_solutions(NUM_TEXTS)]
    prompts = [make_prompt("own", "train", ask("?"), None, instruction="")] * len(texts)
    score_all(scorer, prompts[:64], texts[:64])  # starts the children
    started = time.perf_counter()
    scores = score_all(scorer, prompts, texts)
    seconds = time.perf_counter() - started
    assert {score.value for score in scores} == {1.0}
    return {"scores_per_s": len(scores) / seconds}


def measure_code(num_verdicts: int) -> dict[str, Any]:
    from rrl_core.tasks.code import OWN_PROBLEMS
    from rrl_core.tasks.registry import build_task
    from rrl_core.tasks.scorers import score_all

    task = build_task("code", {"eval_fraction": 0})
    [scorer], prompts = task.scorers, task.prompts("train")
    rows = [json.loads(line) for line in OWN_PROBLEMS.read_text().split("\n") if line]
    places = [number % len(rows) for number in range(num_verdicts)]
    good = [rows[place]["code"] for place in places]
    mixed = [
        f"{HANGING}{prompts[place].meta['entry']} = hang" if number % 8 == 0 else good[number]
        for number, place in enumerate(places[:64])
    ]
    figures: dict[str, Any] = {"isolation": scorer.isolation}
    for name, completions in (("good", good), ("mixed", mixed)):
        asked = [prompts[place] for place in places[: len(completions)]]
        started, cpu_s = time.perf_counter(), _cpu_s()
        scores = score_all(scorer, asked, completions)
        seconds = time.perf_counter() - started
        figures[name] = {
            "verdicts": len(scores),
            "verdicts_per_s": len(scores) / seconds,
            "cpu_ms": (_cpu_s() - cpu_s) * 1e3 / len(scores),
        }
        _check(name, [score.value for score in scores])
    return figures


def measure_beside() -> dict[str, Any]:
    from rrl_core.tasks.code import OWN_PROBLEMS
    from rrl_core.tasks.registry import build_task
    from rrl_core.tasks.scoring_pool import Asked, ScoringPool

    task = build_task("code", {"eval_fraction": 0})
    prompts = task.prompts("train")
    rows = [json.loads(line) for line in OWN_PROBLEMS.read_text().split("\n") if line]
    asked = [
        Asked(str(number), prompts[number % len(rows)], rows[number % len(rows)]["code"])
        for number in range(NUM_GENERATED)
    ]
    figures = {}
    for name in ("generation_s", "after_s", "beside_s"):
        pool = ScoringPool(task.scorers)
        started = time.perf_counter()
        _generate(asked, pool.begin if name == "beside_s" else lambda one: None)
        if name != "generation_s":
            judged = pool.judge(task.scorers[0], asked)
            assert {one.score.value for one in judged} == {1.0}
        figures[name] = time.perf_counter() - started
        pool.close()
    for name in ("after", "beside"):
        figures[f"{name}_added_frac"] = figures[f"{name}_s"] / figures["generation_s"] - 1
    return figures


def _generate(asked: Sequence[Any], tell: Callable[[Any], None]) -> None:
    """Wait for each completion as its length says, and tell of it."""
    draw = random.Random(0)
    lengths = [
        min(MAX_TOKENS, round(draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))) for _ in asked
    ]
    started = time.perf_counter()
    for place in sorted(range(len(asked)), key=lengths.__getitem__):
        ends_s = GENERATION_S * lengths[place] / max(lengths)
        time.sleep(max(0.0, ends_s - (time.perf_counter() - started)))
        tell(asked[place])


def _check(name: str, values: Sequence[float | None]) -> None:
    expected = [0.0 if name == "mixed" and n % 8 == 0 else 1.0 for n in range(len(values))]
    assert values == expected, f"{name}: some verdicts are wrong"


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--verdicts", type=int, default=200, help="of code that ends")
    arguments = parser.parse_args()
    facts = machine_facts(os.cpu_count() or 1)
    gsm8k, own, code = measure_gsm8k(), measure_own(), measure_code(arguments.verdicts)
    beside = measure_beside()
    is_passed = (
        gsm8k["scores_per_s"] >= PASS_SCORES_PER_S
        and code["good"]["verdicts_per_s"] >= PASS_VERDICTS_PER_S
        and beside["beside_added_frac"] <= PASS_ADDED_FRAC
    )
    if arguments.json:
        figures = {"machine": facts, "gsm8k": gsm8k, "own": own, "code": code, "beside": beside}
        print(json.dumps(figures | {"passed": is_passed}))
        return 0 if is_passed else 1
    console = Console()
    print_machine(console, facts)
    rows = [
        ("GSM8K, final_number", gsm8k["scores_per_s"], gsm8k["cpu_ms"], f">= {PASS_SCORES_PER_S}"),
        ("own reward, in child processes", own["scores_per_s"], "", ""),
        (f"code, {code['isolation']}", code["good"]["verdicts_per_s"], code["good"]["cpu_ms"],
         f">= {PASS_VERDICTS_PER_S}"),
        ("code, every 8th hangs 4 s", code["mixed"]["verdicts_per_s"], code["mixed"]["cpu_ms"], ""),
    ]  # fmt: skip
    print_table(console, "Judgements", ("", "a second", "CPU ms each", "wanted"), rows)
    rows = [
        ("generation alone", beside["generation_s"], "", ""),
        ("code verdicts after it", beside["after_s"], f"{beside['after_added_frac']:+.1%}", ""),
        ("code verdicts beside it", beside["beside_s"], f"{beside['beside_added_frac']:+.1%}",
         f"<= {PASS_ADDED_FRAC:.0%}"),
    ]  # fmt: skip
    print_table(console, f"{NUM_GENERATED} completions", ("", "seconds", "added", "wanted"), rows)
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
