"""Short texts under constraints that can be checked, asked for offline.

A problem is an occasion ("a postcard from an old harbour"), a length, and further constraints of
`rrl_core.tasks.writing_constraints`. Problems are distinct by their text. The first `num_eval` of
the stream are the eval split and the next `num_train` the train split, so a longer training leaves
the evaluation as it is. The number of constraints is the difficulty. Every problem can be solved:
values are drawn so that constraints leave room for each other.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from rrl_core.seeds import derive_seed
from rrl_core.tasks.prompts import PromptTask, TaskSettings, ask, make_prompt
from rrl_core.tasks.protocol import Prompt, Scorer, Split, TaskError
from rrl_core.tasks.scorers import load_reward
from rrl_core.tasks.writing_constraints import Constraints

INSTRUCTION = "Answer with the text alone."
BARREN_DRAWS = 5000  # so many draws in a row without a new problem: there are no more
WORDS_A_SENTENCE = (6, 14)

Kind = Literal["words", "sentences", "lines", "list", "title", "include", "avoid", "starts", "ends"]

_FORMS = (
    "a postcard from", "a diary entry about", "a short scene set in", "a note to a friend about",
    "the opening of a story about", "a speech about", "a description of",
)  # fmt: skip
_SUBJECTS = (
    "an old harbour", "a night train", "a village bakery", "the first snow", "a broken clock",
    "a mountain hut", "a crowded market", "an empty theatre", "a lost letter", "a school garden",
    "a quiet library", "a bicycle repair shop", "a thunderstorm", "a wedding in autumn",
    "the last bus home", "an island without roads",
)  # fmt: skip
_KEYWORDS = (
    "river", "lamp", "window", "bread", "music", "stone", "garden", "ladder", "copper", "whistle",
    "basket", "candle", "mirror", "blanket", "orange", "silver", "dog", "engine", "coin", "shadow",
)  # fmt: skip
_AVOIDED = ("very", "suddenly", "beautiful", "just", "really", "amazing", "happy", "thing")
_FIRST = ("Today", "Yesterday", "Once", "Nobody", "Beyond", "Every", "Before", "Behind")
_LAST = ("tomorrow", "again", "home", "forever", "together", "alone", "morning", "silence")
_SHAPES = ("sentences", "lines", "list")  # a text has one of these at most


class WritingSettings(TaskSettings):
    """Parameters of the task `writing`."""

    min_constraints: int = Field(2, ge=1, le=6, description="Fewest constraints, length included.")
    max_constraints: int = Field(4, ge=1, le=6, description="Most constraints, length included.")
    weights: dict[Kind, float] = Field(
        default_factory=dict, description="Weights of constraints by kind; 1 where none is given."
    )
    num_train: int = Field(500, ge=1, description="Number of train problems.")
    num_eval: int = Field(100, ge=0, description="Number of eval problems.")
    seed: int = Field(0, description="Other seeds give other problems.")
    instruction: str = Field(
        INSTRUCTION, description="Put after each problem, a space between; empty adds nothing."
    )
    reward: str = Field("constraints", description="`constraints` or your `module:function`.")


def build_writing(settings: WritingSettings) -> PromptTask:
    """Generate the problems; equal settings give equal prompts.

    Raises:
        TaskError: settings contradict each other, or allow too few distinct problems.
    """
    if settings.min_constraints > settings.max_constraints:
        raise TaskError(
            f"writing: expected min_constraints <= max_constraints; came "
            f"{settings.min_constraints} and {settings.max_constraints}; set both"
        )
    if bad := {k: weight for k, weight in settings.weights.items() if not 0 <= weight < math.inf}:
        raise TaskError(f"writing: expected weights of 0 or more; came {bad}; correct them")
    num_asked = settings.num_eval + settings.num_train
    problems = list(islice(_distinct_problems(settings), num_asked))
    if len(problems) < num_asked:
        raise TaskError(
            f"writing: expected {num_asked} distinct problems (num_eval {settings.num_eval} + "
            f"num_train {settings.num_train}); these settings gave {len(problems)}; ask for fewer, "
            f"or for more constraints"
        )
    return PromptTask(
        "writing",
        _scorers(settings),
        train_prompts=[_prompt("train", *p, settings) for p in problems[settings.num_eval :]],
        eval_prompts=[_prompt("eval", *p, settings) for p in problems[: settings.num_eval]],
    )


def _scorers(settings: WritingSettings) -> tuple[Scorer, ...]:
    if settings.reward == "constraints":
        return (Constraints({str(kind): weight for kind, weight in settings.weights.items()}),)
    return (load_reward(settings.reward),)


def _prompt(
    split: Split, text: str, constraints: Mapping[str, Any], settings: WritingSettings
) -> Prompt:
    return make_prompt(
        "writing",
        split,
        ask(text),
        None,
        instruction=settings.instruction,
        difficulty=f"{len(constraints)} constraints",
        meta={"constraints": json.dumps(constraints)},
    )


def _distinct_problems(settings: WritingSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield problems of different texts with their constraints, in the order of the stream."""
    seen = set()
    draw, last_new = 0, 0
    while draw - last_new < BARREN_DRAWS:
        dice = random.Random(derive_seed(settings.seed, "writing", draw))
        constraints = _draw_constraints(dice, settings)
        text = f"Write {dice.choice(_FORMS)} {dice.choice(_SUBJECTS)}. {request(constraints)}"
        if text not in seen:
            seen.add(text)
            last_new = draw
            yield text, constraints
        draw += 1


def _draw_constraints(dice: random.Random, settings: WritingSettings) -> dict[str, Any]:
    number = dice.randint(settings.min_constraints, settings.max_constraints)
    others = [dice.choice(_SHAPES), "title", "include", "avoid", "starts", "ends"]
    kinds = dice.sample(others, number - 1)
    size = dice.randint(2, 5)  # sentences, lines, or items of a list
    low, high = (size * words for words in WORDS_A_SENTENCE)
    if not set(kinds) & {*_SHAPES}:
        low, high = low + dice.randint(0, 5), high + dice.randint(0, 5)
    values: dict[str, Any] = {
        "sentences": size,
        "lines": size,
        "list": size,
        "title": 1,
        "include": sorted(dice.sample(_KEYWORDS, dice.randint(1, 3))),
        "avoid": sorted(dice.sample(_AVOIDED, dice.randint(1, 2))),
        "starts": dice.choice(_FIRST),
        "ends": dice.choice(_LAST),
    }
    return {"words": [low, high]} | {kind: values[kind] for kind in sorted(kinds)}


def request(constraints: Mapping[str, Any]) -> str:
    """Return the sentences that ask for constraints."""
    asked = []
    for kind, value in constraints.items():
        given = value
        if kind == "words":
            given = f"{value[0]} to {value[1]}"
        elif isinstance(value, list):
            given = ", ".join(value)
        asked.append(_REQUESTS[kind].format(given))
    return " ".join(asked)


_REQUESTS: Mapping[str, str] = {
    "words": "Use {} words.",
    "sentences": "Write exactly {} sentences.",
    "lines": "Write exactly {} lines.",
    "list": "Write a numbered list of {} items, each on a line like `1. text`.",
    "title": "Put a title on the first line, like `# title`.",
    "include": "It must contain these words: {}.",
    "avoid": "Do not use these words: {}.",
    "starts": "The first word must be: {}.",
    "ends": "The last word must be: {}.",
}
