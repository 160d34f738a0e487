"""Reviews are read by their labels; every text is read, fast; copies are no reviews."""

import hashlib
import time
import tomllib
from string import Template

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl_core.review.formats import FORMATS, load_format, parse_review

FMT = load_format()
LIMIT_S = 0.8
SIZE = 200_000
ATTEMPT = "3 + 4 is eight because four and four make eight\n#### 8"


def read(text: str, finish_reason: str = "stop", attempt: str = ATTEMPT):
    return parse_review(FMT, text, finish_reason, attempt)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_format_is_whole_and_bears_the_hash_of_its_file(path):
    fmt = load_format(path.stem)
    assert fmt.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert fmt.name == path.stem
    assert set(fmt.labels) == {"what_went_wrong", "what_to_do"}
    assert set(fmt.max_chars) == {"attempt", "feedback", "part", "review"}
    placeholders = {
        "memory": {"reviews"}, "verdict": set(), "feedback": {"feedback"}, "reflect": set(),
        "request": set(), "second_attempt": {"problem", "review"}, "blank": set(),
        "raw_feedback": {"feedback"}, "no_feedback": set(),
    }  # fmt: skip
    assert set(fmt.texts) == set(placeholders)
    for name, text in fmt.texts.items():
        assert Template(text).is_valid()
        assert set(Template(text).get_identifiers()) == placeholders[name], name
        assert not text.startswith("\n")
    assert all(label in fmt.texts["request"] for label in fmt.labels.values())
    assert tomllib.loads(path.read_text())["texts"] == fmt.texts


def test_an_unknown_format_names_those_there_are():
    for name in ("v0", "../v1", ""):
        with pytest.raises(ValueError, match=r"\['v1'\]"):
            load_format(name)


WRONG, INSTEAD = "I added four and four", "add three and four"
READ = [
    f"Wrong: {WRONG}\nInstead: {INSTEAD}",
    f"  wrong : {WRONG}\r\n\r\nINSTEAD: {INSTEAD}\n",
    f"**Wrong:** {WRONG}\n**Instead:** {INSTEAD}",
    f"**Wrong**: {WRONG}\n- **Instead**: {INSTEAD}",
    f"1. Wrong: {WRONG}\n2. Instead: {INSTEAD}",
    f"Here is my review.\nWrong: {WRONG}. Instead: {INSTEAD}",
    f"Wrong:\n{WRONG}\nInstead:\n{INSTEAD}\n\nThe answer is 7",
    f"Wrong: {WRONG}\nInstead: {INSTEAD}\nWrong: something else\nInstead: other things",
    f"> Wrong: I added four\nand four\n> Instead: {INSTEAD}",
]


@pytest.mark.parametrize("text", READ)
def test_labelled_parts_are_read_whatever_stands_around(text):
    review = read(text)
    wrong, instead = review.what_went_wrong, review.what_to_do
    assert review.status == "ok"
    assert (wrong.rstrip("."), instead) == (WRONG, INSTEAD)
    assert review.text == f"Wrong: {wrong}\nInstead: {instead}"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", "empty"),
        (" \n\t ", "empty"),
        ("!? ...", "empty"),
        ("Wrong:\nInstead:", "empty"),
        ("Wrong: !\nInstead: ?", "empty"),
        (f"Wrong: {WRONG}\nInstead: ...", "malformed"),
        ("I was careless and will count again", "malformed"),
        (f"Wrong: {WRONG}", "malformed"),
        (f"Instead: {INSTEAD}", "malformed"),
        (f"Instead: {INSTEAD}\nWrong: {WRONG}", "malformed"),
        (f"Wrong: {WRONG}\nInstead:", "malformed"),
        (f"The answer is wrong: {WRONG}\nInstead: {INSTEAD}", "malformed"),
        (f"Wrongly: {WRONG}\nInstead: {INSTEAD}", "malformed"),
        # copies of the attempt
        (ATTEMPT, "parrot"),
        ("3+4 IS **eight**, because four and four make eight.  #### 8", "parrot"),
        ("Wrong: four and four make eight\nInstead: 3 + 4 is eight", "parrot"),
        # copies of the request
        (FMT.texts["request"], "parrot"),
        ("Wrong: the mistake in your answer\nInstead: add three and four", "parrot"),
        (f"Wrong: {WRONG}\nInstead: what to do differently in the next try", "parrot"),
        ("Wrong: your answer is wrong\nInstead: add three and four", "parrot"),
        # quoting is no copying
        (
            "Wrong: four and four make eight, but the numbers were 3 and 4\nInstead: " + INSTEAD,
            "ok",
        ),
        ("Wrong: four is 4\nInstead: make 4 and 3 because 8 is four and four", "ok"),
        ("Wrong: 8\nInstead: count on from three", "ok"),
    ],
)
def test_what_is_no_review_is_told_apart(text, status):
    assert read(text).status == status


def test_a_review_cut_off_is_truncated_and_keeps_the_parts_it_has():
    review = read(READ[0], "length")
    assert (review.status, review.what_went_wrong, review.what_to_do) == (
        "truncated",
        WRONG,
        INSTEAD,
    )
    assert review.text == READ[0]
    review = read(f"Wrong: {WRONG}", "length")
    assert (review.status, review.what_went_wrong) == ("truncated", None)
    assert read(" ", "length").status == "empty"


def test_a_malformed_review_gives_its_raw_text_cut():
    assert read("  be careful  ").text == "be careful"
    assert (
        read("be careful " * 500).text == ("be careful " * 500)[: FMT.max_chars["review"]].strip()
    )
    long = read("Wrong: " + "so bad " * 500 + "\nInstead: " + "count " * 500)
    assert long.status == "ok"
    assert len(long.what_went_wrong) <= FMT.max_chars["part"]
    assert len(long.text) <= FMT.max_chars["review"]


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["Wrong:", "Instead:", "\n", "\n\n", " ", "**", "- ", "1. ", ":", "!", "four "]
        ),
        st.text(max_size=8),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=60)
@given(PIECES | st.text(), st.sampled_from(["stop", "length", "error"]), PIECES | st.text())
def test_any_text_is_read(text, finish_reason, attempt):
    review = read(text, finish_reason, attempt)
    parts = (review.what_went_wrong, review.what_to_do)
    assert all(parts) if review.status == "ok" else True
    assert (parts[0] is None) == (parts[1] is None)
    if review.status in ("malformed", "empty"):
        assert parts == (None, None)
    assert len(review.text) <= FMT.max_chars["review"]
    if review.status == "ok":  # what the second attempt is given reads the same
        assert parse_review(FMT, review.text, "stop", attempt).text == review.text


@pytest.mark.parametrize(
    "unit", ["\n", " ", "*", "1. ", "Wrong: ", "Wrong:\n", "Instead: ", "wrong", "Wrong   ", "a ",
             "Wrong: a b c\nInstead: d e f\n\n", "\n \n", "####", "é"],
)  # fmt: skip
def test_hostile_texts_are_read_in_time(unit):
    text = unit * (SIZE // len(unit))
    for whole in (text, "Wrong: x" + text + "Instead: y", "Wrong: x\nInstead: y" + text):
        started = time.process_time()
        read(whole, attempt=text)
        assert time.process_time() - started < LIMIT_S


def test_what_follows_a_finished_review_may_be_cut_off():
    whole = "Wrong: I added.\nInstead: subtract the second number.\n\nAnd now the answer is"
    assert parse_review(FMT, whole, "length", "7").status == "ok"
    assert parse_review(FMT, whole, "length", "7").what_to_do == "subtract the second number."
    cut = "Wrong: I added.\nInstead: subtract the sec"
    assert parse_review(FMT, cut, "length", "7").status == "truncated"


def test_the_opening_alone_is_no_review():
    assert parse_review(FMT, FMT.opening, "stop", "7").status == "empty"
    assert parse_review(FMT, FMT.opening + " \n ", "length", "7").status == "empty"
