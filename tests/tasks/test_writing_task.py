"""Constrained writing: what is asked can be done, is told apart, and pays only as a text."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.tasks import writing
from rrl_core.tasks.protocol import Prompt, TaskError
from rrl_core.tasks.registry import build_task
from rrl_core.tasks.scorers import score_all, score_one
from rrl_core.tasks.writing_constraints import KINDS, Constraints, is_met, take_apart, words_of

SENTENCES = (
    "We walked along the water until the light went out",
    "My sister carried a heavy box across the square",
    "Somebody had painted the door in a deep green",
    "The old man told us a story about his boat",
    "A cold wind came over the hill from the north",
    "Her brother waited near the gate with two tickets",
    "Children were playing under the trees behind the church",
    "In the evening the whole street smelled of coffee",
)


def compose(constraints: dict[str, Any]) -> str:
    """Return a text that meets constraints, made of `SENTENCES`."""
    low, high = constraints["words"]
    shapes = [constraints[kind] for kind in ("sentences", "lines", "list") if kind in constraints]
    size = shapes[0] if shapes else high // 14
    lines = list(SENTENCES[:size])
    for place, word in enumerate(constraints.get("include", [])):
        lines[place % size] += f" and {word}"
    place = 0
    while len(words_of(" ".join(lines))) < low:  # a problem may ask for more than eight a sentence
        lines[place % size] += f" near {('Paris', 'Rome', 'Cork', 'Oslo', 'Bern')[place % 5]}"
        place += 1
    if "starts" in constraints:
        lines[0] = f"{constraints['starts']} {lines[0][0].lower()}{lines[0][1:]}"
    if "ends" in constraints:
        lines[-1] += f" {constraints['ends']}"
    assert len(words_of(" ".join(lines))) <= high
    if "list" in constraints:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    text = ("\n" if {"list", "lines"} & constraints.keys() else " ").join(f"{x}." for x in lines)
    return f"# The long way\n{text}" if "title" in constraints else text


def prompt_with(**constraints: Any) -> Prompt:
    message = {"role": "user", "content": "Write a postcard from an old harbour."}
    return Prompt("p-1", "writing", "train", (message,), None, "",
                  {"constraints": json.dumps(constraints)})  # fmt: skip


def value(completion: str, **constraints: Any) -> float | None:
    return score_one(Constraints(), prompt_with(**constraints), completion).value


def test_every_problem_can_be_solved_and_says_what_it_asks():
    task = build_task("writing", {"max_constraints": 6, "num_train": 300, "num_eval": 50})
    kinds = set()
    for prompt in [*task.prompts("train"), *task.prompts("eval")]:
        constraints = json.loads(prompt.meta["constraints"])
        kinds |= constraints.keys()
        score = score_one(task.scorers[0], prompt, compose(constraints))
        assert (score.value, score.feedback) == (1.0, ""), prompt
        assert prompt.difficulty == f"{len(constraints)} constraints"
        for asked in [*constraints.get("include", []), *constraints.get("avoid", [])]:
            assert asked in prompt.messages[0]["content"]
    assert kinds == set(KINDS)


def test_problems_are_the_same_again_and_a_longer_training_leaves_the_evaluation():
    short = build_task("writing", {"num_train": 20, "num_eval": 10})
    long = build_task("writing", {"num_train": 60, "num_eval": 10})
    assert short.prompts("eval") == long.prompts("eval")
    assert short.prompts("train") == long.prompts("train")[:20]
    other = build_task("writing", {"num_train": 20, "num_eval": 10, "seed": 1})
    ids = [{p.prompt_id for p in task.prompts("train")} for task in (short, other)]
    assert not ids[0] & ids[1]


def test_the_reward_is_the_weighted_share_and_the_feedback_names_what_is_missing():
    text = "We found the lamp near the water. It was still warm."
    asked = {"words": [5, 20], "sentences": 2, "include": ["lamp", "river"], "ends": "warm"}
    score = score_one(Constraints(), prompt_with(**asked), text)
    assert score.value == 0.75
    assert score.feedback == "not met: include"
    assert score.components == {
        "words": 1.0, "sentences": 1.0, "include": 0.0, "ends": 1.0, "prose": 1.0,
    }  # fmt: skip
    heavy = Constraints({"include": 5.0})  # 3 of 3 + 5
    assert score_one(heavy, prompt_with(**asked), text).value == 3 / 8
    assert heavy.version != Constraints().version
    assert score_one(Constraints({"words": 0}), prompt_with(words=[1, 2]), text).status == (
        "unscorable"
    )


@pytest.mark.parametrize(
    ("kind", "asked", "good", "bad"),
    [
        ("words", [3, 4], "One two 3 three", "One two 3"),
        ("words", [3, 4], "1. It's well-made indeed", "1. One two three four five"),
        ("sentences", 2, "Is this it? No, it is not.", "Is this it? No. It is."),
        ("sentences", 1, "He paid 3.5 pounds today.", "He paid 3.5 pounds today. And"),
        ("lines", 2, "# A title\n\nOne two\n\nthree four", "One two\nthree"),
        ("list", 2, "1. One two\n2. Three four", "1. One two\n3. Three four"),
        ("list", 2, "# A title\n1. One two\n2. Three four", "Here:\n1. One two\n2. Three four"),
        ("list", 2, "1. One two\n2. Three four", "1. One two\n2. Three four\n2. Three four"),
        ("title", 1, "# A title\nOne two", "A title\nOne two"),
        ("title", 1, "# A title\nOne two", "# A title\n# Another one"),
        ("include", ["lamp"], "The Lamp, again", "The lampshade"),
        ("include", ["lamp"], "lamp a lamp a lamp", "lamp a lamp a lamp a lamp"),
        ("avoid", ["very"], "every lamp", "Very good"),
        ("avoid", ["very"], "every lamp", ""),
        ("starts", "Today", "today we went", "# Today\nwe went"),
        ("ends", "home", "He went home.", "He went home today."),
    ],
)
def test_each_kind_of_constraint(kind, asked, good, bad):
    assert is_met(kind, asked, take_apart(good))
    assert not is_met(kind, asked, take_apart(bad))


REQUEST = "Use 5 to 60 words. It must contain these words: lamp, river. Write about the harbour."
ASKED = {"words": [5, 60], "include": ["lamp", "river"], "avoid": ["very"]}
HONEST = (
    "We sat by the river until the lamp went out. Nobody said a word, and that was fine.",
    "My dear friend, the boats are back and I still think of you whenever I see a lamp here.",
    "1. Buy bread for the journey\n2. Put the lamp by the river\n3. Wait for us until dawn",
)
dice = random.Random(7)
GAMES = {
    "nothing": "",
    "spaces": " \n \n ",
    "random letters": " ".join(
        "".join(dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6)) for _ in range(30)
    ),
    "random characters": "".join(chr(dice.randrange(33, 0x2FFF)) for _ in range(300)),
    "only the keywords": "lamp river",
    "stuffed keywords": "lamp river " * 15,
    "a list of keywords": "lamp river window bread music stone garden ladder copper whistle",
    "one word": "the " * 30,
    "function words": "the of and to a in that it with as his on be at by this had not are but",
    "one sentence again": "We saw the lamp at the river. " * 5,
    "the request": REQUEST,
    "the request, opened": "Sure! " + REQUEST,
    "figures": "12 34 lamp 56 78 river 90 12 34 56 78 90 12 34 56 78 90 12 34 56 78",
    "no vowels": "the lmp nd th rvr r nt wht thy wr bfr th brdg cm dwn n th",
    "one long word": "the " + "a" * 400 + " lamp and the river are here",
    "too much": "We saw the lamp at the river. " * 5000,
}


@pytest.mark.parametrize("text", HONEST)
def test_an_honest_text_pays(text):
    prompt = prompt_with(**ASKED)
    assert score_one(Constraints(), prompt, text).components["prose"] == 1.0
    assert score_one(Constraints(), prompt, text).value >= 2 / 3


@pytest.mark.parametrize("text", GAMES.values(), ids=GAMES)
def test_what_is_no_text_pays_nothing(text):
    message = {"role": "user", "content": REQUEST}
    prompt = Prompt("p-1", "writing", "train", (message,), None, "",
                    {"constraints": json.dumps(ASKED)})  # fmt: skip
    score = score_one(Constraints(), prompt, text)
    assert score.value == 0.0
    assert "no readable text" in score.feedback


PIECES = st.sampled_from(
    [*SENTENCES, "1. ", "# ", "\n", ". ", "lamp", "lamp ", "#", "!?", "\ud800", "\x00", "\u2028",
     "\u0663", "\u200b", "é", "'", "1. x\n" * 9]
)  # fmt: skip


@given(st.lists(st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=40), max_size=4))
@settings(max_examples=40)
def test_any_text_is_judged_alone_and_the_same_again(completions):
    asked = {"words": [2, 9], "sentences": 2, "lines": 2, "list": 2, "title": 1,
             "include": ["lamp"], "avoid": ["very"], "starts": "we", "ends": "out"}  # fmt: skip
    prompts = [prompt_with(**asked)] * len(completions)
    scores = score_all(Constraints(), prompts, completions)
    assert [score_one(Constraints(), prompts[0], text) for text in completions] == scores
    assert score_all(Constraints(), prompts, completions[::-1]) == scores[::-1]
    assert all(score.status == "ok" and 0 <= score.value <= 1 for score in scores)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_constraints": 4, "max_constraints": 3}, "expected min_constraints <= max_constr"),
        ({"weights": {"words": -1}}, "expected weights of 0 or more; came {'words': -1"),
        ({"weights": {"rhymes": 1}}, "parameter `weights.rhymes"),
        ({"reward": "best"}, "expected `module:function`"),
    ],
)
def test_what_cannot_be_asked_is_refused(params, message):
    with pytest.raises(TaskError, match=message):
        build_task("writing", params)


def test_too_few_distinct_problems_are_refused(monkeypatch):
    monkeypatch.setattr(writing, "_FORMS", ("a note about",))
    monkeypatch.setattr(writing, "_SUBJECTS", ("snow",))
    params = {"min_constraints": 1, "max_constraints": 1, "num_train": 200, "num_eval": 0}
    # Lengths alone: 4 sizes with 6 times 6 bounds give at most 144 texts.
    with pytest.raises(TaskError, match=r"expected 200 distinct problems .* gave 1[0-9][0-9];"):
        build_task("writing", params)


def test_a_prompt_without_constraints_is_unscorable():
    assert value("We saw the lamp at the river today.") is None
