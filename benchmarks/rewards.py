"""Measure how fast completions are judged: GSM8K by its number, code in the sandbox.

- `gsm8k`: texts as long as GSM8K's solutions, through `score_all` with `final_number`; they are
  made up here, so that the figure needs no data.
- `code`: the reference solutions of our own problems, all their tests in one child process each,
  side by side on all CPUs. Also told: how a batch fares in which every eighth completion hangs.

At least 5,000 scores and 20 verdicts a second pass (exit code 0). `cpu_ms` is processor time of
this process and its children for one verdict: it tells the cost also where other work runs.

    python benchmarks/rewards.py [--verdicts 200] [--json]
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import machine_facts, print_machine, print_table
from rich.console import Console

PASS_SCORES_PER_S = 5_000
PASS_VERDICTS_PER_S = 20
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
    started = time.perf_counter()
    scores = score_all(BUILT_IN["final_number"], prompts, [text for _, text in solutions])
    seconds = time.perf_counter() - started
    assert {score.value for score in scores} == {1.0}
    return {"scores_per_s": len(scores) / seconds}


def measure_code(num_verdicts: int) -> dict[str, Any]:
    from rrl_core.tasks.code import OWN_PROBLEMS
    from rrl_core.tasks.registry import build_task

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
        scores = scorer.judge_many(asked, completions)
        seconds = time.perf_counter() - started
        figures[name] = {
            "verdicts": len(scores),
            "verdicts_per_s": len(scores) / seconds,
            "cpu_ms": (_cpu_s() - cpu_s) * 1e3 / len(scores),
        }
        _check(name, [score.value for score in scores])
    return figures


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
    gsm8k, code = measure_gsm8k(), measure_code(arguments.verdicts)
    is_passed = (
        gsm8k["scores_per_s"] >= PASS_SCORES_PER_S
        and code["good"]["verdicts_per_s"] >= PASS_VERDICTS_PER_S
    )
    if arguments.json:
        figures = {"machine": facts, "gsm8k": gsm8k, "code": code, "passed": is_passed}
        print(json.dumps(figures))
        return 0 if is_passed else 1
    console = Console()
    print_machine(console, facts)
    rows = [
        ("GSM8K, final_number", gsm8k["scores_per_s"], "", f">= {PASS_SCORES_PER_S}"),
        (f"code, {code['isolation']}", code["good"]["verdicts_per_s"], code["good"]["cpu_ms"],
         f">= {PASS_VERDICTS_PER_S}"),
        ("code, every 8th hangs 4 s", code["mixed"]["verdicts_per_s"], code["mixed"]["cpu_ms"], ""),
    ]  # fmt: skip
    print_table(console, "Judgements", ("", "a second", "CPU ms each", "wanted"), rows)
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
