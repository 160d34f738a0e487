"""What the runs of the example store sample and how it is judged: small sums, tokens are bytes."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.storage import rows as make
from tests.storage.rows import Row

TRAIN = ((17, "+", 25), (8, "-", 13), (36, "+", 7), (90, "-", 44), (5, "+", 68), (12, "+", 12))
EVAL = ((11, "+", 31), (70, "-", 9), (3, "+", 44))
Sum = tuple[int, str, int]
Texts = dict[tuple[int, int, int], str]  # by iteration, number of the prompt, sample index

GROUP_SIZE = 4
MAX_TOKENS = 48
PICKED = {1: (0, 1, 2, 3), 2: (4, 5, 0, 1), 3: (2, 3, 4, 5), 4: (0, 1, 2, 3)}  # of TRAIN
THOUGHTS = ("Ones first. ", "Then tens. ", "Now both. ")
VERSIONS = {"final_number": "1", "strict_format": "1"}
REFUSED = ("sums-b", 2, 2)  # run, iteration and held-out prompt the sampler could not serve


@dataclass(frozen=True)
class Run:
    """One run: how many of each group are right (picked prompts in order), and how it learns."""

    run_id: str
    right: dict[int, tuple[int, ...]]
    held_out: dict[int, tuple[bool, ...]]
    learning_rate: float
    kl_coef: float
    epochs: int
    drift: float  # of the mismatch per iteration
    texts: Texts = field(default_factory=dict)
    interrupted_after: int | None = None
    replayed: dict[int, int] = field(default_factory=dict)  # iteration: the one it replays from
    refitted: tuple[int, ...] = ()  # iterations that end with a new value model
    continued: tuple[int, ...] = ()  # iterations that replay states

    @property
    def config(self) -> Row:
        return {
            "run": {"name": self.run_id, "iterations": 4, "seed": 7},
            "sampler": {"prompts": 4, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS},
            "learner": {
                "algorithm": "dr_grpo",
                "learning_rate": self.learning_rate,
                "kl_coef": self.kl_coef,
                "epochs": self.epochs,
                "clip_high": None if self.epochs == 1 else 0.28,
            },
        }

    @property
    def opened(self) -> Row:
        return make.OPENED | {"config_json": json.dumps(self.config), "kind": "train"}


SUMS_A = Run(
    "sums-a",
    right={1: (1, 2, 0, 0), 2: (2, 4, 1, 0), 3: (1, 0, 2, 4), 4: (3, 2, 2, 0)},
    held_out={0: (True, False, False), 2: (True, True, False), 4: (True, True, False)},
    learning_rate=1e-4,
    kl_coef=0.0,
    epochs=1,
    drift=0.0,
    texts={(1, 2, 1): "36 + 7 = 43\n#### 43 = 40 + 3"},  # its last number is not the answer
)
SUMS_B = Run(
    "sums-b",
    right={1: (1, 2, 0, 0), 2: (3, 4, 2, 1), 3: (0, 2, 0, 4), 4: (4, 0, 3, 1)},
    held_out={0: (True, False, False), 2: (True, True, False), 4: (False, True, False)},
    learning_rate=4e-4,
    kl_coef=0.02,
    epochs=2,
    drift=0.01,
    interrupted_after=2,
    replayed={4: 2},
    refitted=(2, 3),
    continued=(3,),
)


def prompt_id(problem: Sum) -> str:
    left, sign, right = problem
    return f"p-{left}-{'plus' if sign == '+' else 'minus'}-{right}"


def prompt_row(problem: Sum, split: str) -> Row:
    messages = [{"role": "user", "content": f"What is {spelled(problem)}?"}]
    row = make.prompt(prompt_id(problem), str(right_answer(problem)))
    return row | {"split": split, "messages_json": json.dumps(messages)}


def right_answer(problem: Sum) -> int:
    left, sign, right = problem
    return left + right if sign == "+" else left - right


def spelled(problem: Sum) -> str:
    return " ".join(map(str, problem))


def wrong_answer(problem: Sum, *place: object) -> int:
    chance = random.Random(repr((problem, *place)))
    return right_answer(problem) + chance.choice([1, 1, 10, -10])


def completion_text(problem: Sum, guess: int, num_thoughts: int, has_line: bool) -> str:
    thoughts = "".join(THOUGHTS[:num_thoughts])
    return f"{thoughts}{spelled(problem)} = {guess}" + (f"\n#### {guess}" if has_line else "")


def sampled_facts(problem: Sum, text: str) -> Row:
    """Return the facts of a completion whose tokens are the bytes of `text`, cut at the limit."""
    return {
        "num_prompt_tokens": len(prompt_id(problem)),
        "num_completion_tokens": min(len(text), MAX_TOKENS),
        "finish_reason": "length" if len(text) > MAX_TOKENS else "stop",
        "completion": text[:MAX_TOKENS],
    }


def _last_number(text: str) -> str | None:
    return (re.findall(r"-?\d+", text) or [None])[-1]


def _marked_number(text: str) -> str | None:
    found = re.search(r"#### (-?\d+)", text)
    return found and found[1]


def _marked_alone(text: str) -> str | None:
    found = re.search(r"^#### (-?\d+)\Z", text, re.M)
    return found and found[1]


READERS: dict[tuple[str, str], Callable[[str], str | None]] = {
    ("final_number", "1"): _last_number,
    ("final_number", "2"): _marked_number,
    ("strict_format", "1"): _marked_alone,
}


def score_row(rollout: Row, scorer: str, version: str) -> Row:
    """Return the judgement of a committed rollout."""
    problem = next(p for p in (*TRAIN, *EVAL) if prompt_id(p) == rollout["prompt_id"])
    read = READERS[scorer, version](rollout["completion"])
    return make.score(
        rollout["event_id"],
        float(read == str(right_answer(problem))),
        rollout["iteration"],
        scorer=scorer,
        scorer_version=version,
        feedback="no number found" if read is None else "",
    )
