import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.tasks.signature import MAX_LENGTH, solution_signature

HOSTILE_BYTES = 200_000
HOSTILE_S = 0.5


@pytest.mark.parametrize(
    ("completion", "signature"),
    [
        ("3 boxes: 3*24 = 72, then 72-2 = 70.\n#### 70", "70 *-"),
        ("48/2 = <<48/2=24>>24 clips. 48+24 = <<48+24=72>>72\n#### 72", "72 /+"),
        ("He pays $5 + $7.50 = $12.50\n#### $12.50", "25/2 +"),
        ("(3 + 4) * (5 - 2) = 21 #### 21", "21 +*-"),
        ("20% * 50 = 10 #### 10", "10 *"),
        (r"\frac{3}{4} \times 8 = 6, so \boxed{6}", "6 /*"),
        ("2**3 = 8 and 2^3 = 8 #### 8.0", "8 ^^"),
        ("5 - -3 = 8 #### 8", "8 -"),  # the second minus is a sign
        ("-5 + 3 = -2 #### -2", "-2 +"),
        ("1,000+2,000 = 3,000 #### 3,000", "3000 +"),
        ("48 clips - a well-known 2 #### 48", "48"),  # words bring hyphens of their own
        ("The answer is 42", "42"),
    ],
)
def test_a_signature_is_the_answer_and_its_operations(completion, signature):
    assert solution_signature(completion) == signature


@pytest.mark.parametrize(
    "product", ["3*4", "3 x 4", "3X4", "3 \u00d7 4", "3 \u00b7 4", r"3 \times 4", r"3 \cdot 4"]
)
def test_all_ways_to_multiply_are_one(product):
    assert solution_signature(f"{product} = 12\n#### 12") == "12 *"


@pytest.mark.parametrize(("quotient", "signs"), [("8 \u00f7 2", "/"), (r"8 \div 2", "/")])
def test_all_ways_to_divide_are_one(quotient, signs):
    assert solution_signature(f"{quotient} = 4\n#### 4") == f"4 {signs}"


@pytest.mark.parametrize("completion", ["", "no idea", "#### none", "2^10"])
def test_without_an_answer_there_is_no_signature(completion):
    assert solution_signature(completion) is None


def test_other_words_leave_the_signature():
    first = "Each box holds 24: 3*24 = 72.\n#### 72"
    second = "Multiply!  3 * 24=72\n#### 72.0"
    assert solution_signature(first) == solution_signature(second)


def test_a_long_signature_is_replaced_by_a_hash_that_still_tells_apart():
    long = [solution_signature("1" + sign * 500 + " #### 9") for sign in ("+1", "-1")]
    assert all(signature.startswith("sha256:") for signature in long)
    assert long[0] != long[1]


@pytest.mark.parametrize(
    "piece",
    ["1+", "1 ", "(", "<<", "<<1+1", "<<1+1>>", "\\frac{", "\\frac{1}{2}", "\\", "\\x", "1,", "x",
     "é", "####", "**", "- ", "\\boxed{", "9", "\u0661", "\x00", "$%"],
)  # fmt: skip
def test_hostile_text_is_read_in_linear_time(piece):
    text = piece * (HOSTILE_BYTES // len(piece)) + "\n#### 7"
    seconds = []
    for _ in range(3):  # another program may disturb one
        started = time.process_time()
        signature = solution_signature(text)
        seconds.append(time.process_time() - started)
    assert min(seconds) < HOSTILE_S
    assert signature is None or len(signature) <= MAX_LENGTH


@given(st.text(alphabet="0123456789+-*/x<>=#{}\\()., $abfrc\n\u2212\u00d7"))
def test_any_text_gives_a_short_signature_or_none(text):
    signature = solution_signature(text)
    assert signature is None or 1 <= len(signature) <= MAX_LENGTH
