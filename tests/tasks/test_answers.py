"""The answer of a completion: which text holds it, which number it is, in linear time."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from rrl_core.tasks.answers import (
    MAX_DIGITS,
    ends_with_answer_line,
    find_answer,
    read_reference,
)

LIMIT_S = 1.0  # for one hostile text of 200 kB
SIZE = 200_000

# completion -> its answer as a ratio or decimal; None means that it gives no answer
WHERE = {
    # 1. the last marker
    "#### 18": "18",
    "####18": "18",
    "####   18   ": "18",
    "3 + 4 = 7\n#### 7\n": "7",
    "#### 7\r\n": "7",
    "#### 1\n#### 2": "2",
    "#### 1 #### 2": "2",
    "##### 5": "5",
    "#### 8\nSo \\boxed{9} and 10": "8",
    "\\boxed{9}\n#### 8": "8",
    "####\n12": "12",
    "#### \n\n  12 apples\nof 30": "12",
    "#### The answer is 12.": "12",
    "#### <12>": "12",
    "#### **12**": "12",
    "#### \\boxed{12}": "12",
    "#### 3 + 4 = 7": "7",
    "#### x = 5": "5",
    "#### 5 = x": None,
    "#### 5. So it is 5.": "5",
    "#### 5 or 6": None,
    "#### 3 + 4": None,
    "The answer is 5.\n####": None,
    "The answer is 5.\n#### none": None,
    "#### Step\n5": None,
    # 2. the last balanced box
    "\\boxed{42}": "42",
    "so $\\boxed{42}$.": "42",
    "\\boxed{1} then \\boxed{2} and 3": "2",
    "\\boxed{\\text{about } 42 \\text{ cm}}": "42",
    "\\boxed{x = 42}": "42",
    "\\boxed{\\boxed{42}}": "42",
    "\\boxed{6 \\boxed{42}}": "42",
    "\\boxed{42} and {1}": "42",
    "{1} and 2": "2",
    "{1, \\boxed{42}": "42",
    "} \\boxed{42}": "42",
    "\\boxed{\\$42\\%}": "42",
    "\\boxed{42\\} and 1}": None,
    "\\boxed{x}, that is 5": None,
    "\\boxed{}": None,
    "\\boxed{1, 2}": None,
    "\\boxed{7}, or \\boxed{42": "7",
    "\\boxed{42": None,
    "\\boxed{4{2}": None,
    "It is 7: \\boxed{42": "7",
    "boxed{42": "42",
    # 3. the last number
    "": None,
    "no number": None,
    "7": "7",
    "First 3, then 4, so 7.": "7",
    "7!": "7",
    "(7)": "7",
    "16-3-4=9": "9",
    "The total is 9 apples": "9",
    "It costs 9 dollars (not 8)": "8",
    "**Answer:** 7": "7",
    "_7_": "7",
    "答案是7个": "7",
    "7\u2028": "7",
    "\ud800 7": "7",
}
NUMBERS = {
    # signs
    "#### -5": "-5",
    "#### +5": "5",
    "#### \u22125": "-5",
    "x = \u22125": "-5",
    "(-5)": "-5",
    "#### --5": "-5",
    "3-5": "5",
    "3 -5": "-5",
    "x-5": "5",
    "(3)-5": "5",
    "- 5": "5",
    # thousands
    "#### 1,234": "1234",
    "#### 1,234,567": "1234567",
    "#### 70,000.50": "70000.5",
    "#### -1,000": "-1000",
    "1,23": "23",
    "12,34": "34",
    "1234,567": "567",
    "1,2,3": "3",
    "1,2,3.5": "3.5",
    "#### 1,2": None,
    "1,234,": "1234",
    "1,2345": "2345",
    # decimals, ratios, powers of ten
    "#### 5.0": "5",
    "#### 5.": "5",
    "#### .5": "0.5",
    "#### -.5": "-0.5",
    "wait...5": "5",
    "#### 007": "7",
    "#### 3/4": "0.75",
    "#### -3/4": "-0.75",
    "#### 3/-4": "-0.75",
    "#### 1.5/2": "0.75",
    "#### 6/8": "3/4",
    "#### 1,000/4": "250",
    "#### 3/0": None,
    "#### 3/4/2024": None,
    "#### 1.2.3": None,
    "#### 1 1/2": None,
    "\\boxed{\\frac{3}{4}}": "0.75",
    "\\boxed{-\\dfrac{3}{4}}": "-0.75",
    "\\boxed{1\\frac{1}{2}}": None,
    "#### 1.2e6": "1200000",
    "#### 1.2E+6": "1200000",
    "#### 12e-1": "1.2",
    "#### 2^10": None,
    "#### 2^{10}": None,
    "#### 2**10": None,
    "#### 2x3": None,
    "#### 0x1F": None,
    "#### 1_000": None,
    # units
    "#### $5": "5",
    "#### -$5": "-5",
    "#### $-5": "-5",
    "#### \\$5": "5",
    "#### €5": "5",
    "#### 20%": "20",
    "#### 20 %": "20",
    "#### 20\\%": "20",
    "#### 5kg": "5",
    "#### 5 m2": "5",
    "#### 12cm2": "12",
    "#### 5 m^2": "5",
    "#### 5 m s^-1": "5",
    "#### 5 m s^{-1}": "5",
    "#### 5 dollars/hour": "5",
    "3rd": "3",
    "H2O": None,
    "x1.5": None,
    # too large, or no number at all
    "#### " + "9" * MAX_DIGITS: "9" * MAX_DIGITS,
    "#### " + "9" * (MAX_DIGITS + 1): None,
    "9" * 5000: None,
    "0." + "3" * 5000: None,
    "1/" + "3" * 5000: None,
    "#### 1e80000000": None,
    "#### 1e-80000000": None,
    "#### 1e" + "9" * 5000: None,
    "1e80000000/1e80000000": None,
    "#### inf": None,
    "#### -Infinity": None,
    "#### nan": None,
}


MORE = {
    # signs
    "#### (\u22125)": "-5",
    "#### -0": "0",
    "#### -0.0": "0",
    "#### 5-3": None,
    "x=-5": "-5",
    "so $-5$": "-5",
    "#### \u22121,234.5": "-1234.5",
    "\\boxed{-5}": "-5",
    # thousands
    "#### 1,234,5": None,
    "#### 12,345,678.9": "12345678.9",
    "1,234 and 5,678": "5678",
    "#### 1,000,000%": "1000000",
    "#### 1 000": None,
    "#### 1'000": None,
    # currency and per cent
    "#### £5": "5",
    "#### 5¢": "5",
    "#### US$5": "5",
    "#### $1,234.50": "1234.5",
    "#### $.50": "0.5",
    "#### ($5)": "5",
    "#### -$1,000": "-1000",
    "#### $5-$10": None,
    "#### 5 USD": "5",
    "#### 12.5%": "12.5",
    # fractions
    "#### 10/4": "2.5",
    "#### \\frac{10}{4}": "2.5",
    "\\boxed{\\tfrac{1}{2}}": "0.5",
    "\\boxed{\\frac{-3}{4}}": "-0.75",
    "\\boxed{\\frac{3}{0}}": None,
    "\\boxed{x=\\frac{1}{2}}": "0.5",
    "#### 22/7": "22/7",
    # powers of ten
    "#### 3e8": "300000000",
    "#### 1E-3": "0.001",
    "#### 1e0": "1",
    "#### 1e1000": "1e1000",
    "#### 1e1001": None,
    "#### 2.5 \\times 10^3": None,
    # other scripts
    "#### \uff15": None,
    "#### \u0665": None,
    "#### 1\u20442": None,
    "#### 5\u00a0000": None,
    "#### 5\u201310": None,
    "#### 5\u200b": "5",
    # boxes
    "\\boxed{ 42 }": "42",
    "\\boxed{42}\\boxed{43}": "43",
    "\\boxed{\\mathbf{42}}": "42",
    "$$\\boxed{42}$$": "42",
    "\\boxed{42}\\text{ cm or 3 in}": "42",
    "\\fbox{42}": "42",
    # boxes that were cut off
    "\\boxed{1}\\boxed{42": "1",
    "Answer 3. \\boxed{4": "3",
    "\\boxed{\\frac{1}{2}": None,
    "\\boxed{42 and \\boxed{7": None,
    # several answers, pairs and lists
    "#### 5 and 5": "5",
    "#### 7\n#### none": None,
    "The answer is 7. The answer is 8.": "8",
    "#### (1, 2)": None,
    "\\boxed{(1, 2)}": None,
    "\\boxed{\\{1, 2\\}}": None,
    "#### [5]": "5",
    "(3, 4)": "4",
    # what follows the answer
    "#### 7.": "7",
    "#### 7)": "7",
    "#### 7 (seven)": "7",
    "#### 7 <|im_end|>": "7",
    "#### 7\n\nLet me check: 3+5=8": "7",
    "#### `7`": "7",
    "#### 7\\\\": "7",
    "#### 7\t": "7",
}


@pytest.mark.parametrize(
    ("completion", "answer"), [*WHERE.items(), *NUMBERS.items(), *MORE.items()]
)
def test_the_answer_of_a_completion(completion, answer):
    assert find_answer(completion) == (None if answer is None else Fraction(answer))


REFERENCES = {
    "18": "18",
    "70,000": "70000",
    "$5.50": "5.5",
    "20%": "20",
    "3/4": "0.75",
    "\u22125": "-5",
    "He has 3 + 4 = <<3+4=7>>7.\n#### 7": "7",
    "so \\boxed{7} of 8": "7",
    "5 or 6": None,
    "about five": None,
    "": None,
    "inf": None,
    "1e80000000": None,
    "2026-05-01": None,
}


@pytest.mark.parametrize(("answer", "number"), REFERENCES.items())
def test_a_reference_is_exactly_one_number(answer, number):
    assert read_reference(answer) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("completion", "is_formatted"),
    [
        ("#### 5", True),
        ("so 5\n#### 5\n\n", True),
        ("#### -1,234.5", True),
        ("#### \u22125", True),
        ("#### 3/4", True),
        ("#### 1.2e6", True),
        ("#### 5.", False),
        ("####5", False),
        ("####  5", False),
        (" #### 5", False),
        ("##### 5", False),
        ("so #### 5", False),
        ("#### 5 apples", False),
        ("#### $5", False),
        ("#### <5>", False),
        ("#### 5 6", False),
        ("#### 5\nDone.", False),
        ("5", False),
        ("", False),
    ],
)
def test_only_a_bare_number_on_the_last_line_is_formatted(completion, is_formatted):
    assert ends_with_answer_line(completion) is is_formatted


HOSTILE = {
    "digits": "9",
    "thousands": ",111",
    "fractions": "1/",
    "exponents": "1e",
    "signs": "+-",
    "dots": ".",
    "versions": "1.",
    "powers": "2^",
    "braced powers": "2^{",
    "letters": "e",
    "word with digits": "a1.",
    "open boxes": "\\boxed{",
    "boxes and braces": "\\boxed{{",
    "closed boxes": "\\boxed{1}",
    "braces": "{",
    "closing braces": "}",
    "markers": "#",
    "marked lines": "#### 1\n",
    "spaces": " ",
    "newlines": "\n",
    "fraction commands": "\\frac{1",
    "nested fractions": "\\frac{\\frac{",
    "large powers of ten": "9e999 ",
    "equations": "1=",
    "minus signs": "\u2212",
    "backslashes": "\\",
    "dollars": "$",
    "products": "1x",
}


def slowest_reading_s(text: str) -> float:
    """Return the longest CPU time of one reading of `text`, bare, marked and boxed."""
    times_s = []
    for completion in (text, "#### " + text, "\\boxed{" + text + "}"):
        for read in (find_answer, read_reference, ends_with_answer_line):
            started_s = time.thread_time()
            read(completion)
            times_s.append(time.thread_time() - started_s)
    return max(times_s)


TEXTS = {name: (unit * SIZE)[:SIZE] for name, unit in HOSTILE.items()} | {
    "nested boxes": "\\boxed{" * (SIZE // 8) + "}" * (SIZE // 8),
    "thousands broken at the end": "1" + ",111" * (SIZE // 4) + "1",
}
SOME_TEXTS = [TEXTS["signs"], TEXTS["nested boxes"], "9" * 5000, "1e80000000", "inf", "nan"]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_hostile_text_takes_linear_time(text):
    assert slowest_reading_s(text) < LIMIT_S


def test_hostile_text_is_read_in_a_worker_thread():
    with ThreadPoolExecutor(1) as pool:
        assert max(pool.map(slowest_reading_s, SOME_TEXTS, timeout=60)) < LIMIT_S


def test_hostile_text_is_read_in_a_child_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert max(pool.map_async(slowest_reading_s, SOME_TEXTS).get(timeout=60)) < LIMIT_S
