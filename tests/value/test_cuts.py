import hashlib
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rrl_core.policy.tiny import tiny_tokenizer
from rrl_core.value.cuts import Cut, cut_points, drop_cut, prefix_sha256

HOSTILE_S = 5.0  # tens of milliseconds each; quadratic time would be minutes
TINY = tiny_tokenizer()


def tiny_decode(ids):
    return TINY.decode(list(ids), skip_special_tokens=True)


def tiny_ids(text):
    return list(text.encode())


def merged_tokenizer():
    """A byte-level BPE whose tokens hold several letters, and parts of letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["so the sum is 12. 字 宇 🙂 😀\n\nthe end\n"] * 4, trainer)
    return tokenizer


MERGED = merged_tokenizer()


def metaspace_decode(ids):
    """What sentencepiece models do: the space in front of the first word is not written."""
    pieces = {0: "▁", 1: "▁so", 2: "▁the", 3: "▁sum", 4: ".", 5: "\n", 6: "▁is"}
    return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")


def cut_texts(text, max_cuts=8, **options):
    """Cut a text of bytes and return (given text, kind)."""
    ids = tiny_ids(text)
    cuts = cut_points(ids, tiny_decode, max_cuts, **options)
    return [(tiny_decode(ids[: cut.prefix_tokens]), cut.cut) for cut in cuts]


def test_lines_and_sentences_are_cut():
    text = "First add. Then stop.\nThe sum is 3.5 or so! Now write it: 12345678901234567890"
    assert cut_texts(text) == [
        ("First add.", "sentence"),
        ("First add. Then stop.\n", "line"),
        ("First add. Then stop.\nThe sum is 3.5 or so!", "sentence"),
    ]


def test_blank_lines_and_indentation_give_one_cut():
    assert cut_texts("one\n\n\n    two and three and four and five") == [("one\n", "line")]


def test_a_line_inside_a_fence_is_code():
    text = "See:\n```python\nx = 1\ny = 2\n```\nDone now, and this goes on for quite a while."
    assert [kind for _, kind in cut_texts(text)] == ["line", "code", "code", "code", "line"]


def test_sentences_in_other_scripts_and_closing_quotes_are_cut():
    assert cut_texts('He said "yes." Then 一加一等于二。所以答案是这样的一个数字') == [
        ('He said "yes."', "sentence"),
        ('He said "yes." Then 一加一等于二。', "sentence"),
    ]


def test_white_space_alone_is_no_state():
    assert cut_texts("\n\n\nabc\ndefghijkl") == [("\n\n\nabc\n", "line")]


def test_a_short_answer_is_cut_between_its_terms():
    assert cut_texts("12+5=17") == [("12+5=", "word")]
    assert cut_texts("12 + 5 = 17 or so") == [
        ("12", "word"), ("12 +", "word"), ("12 + 5", "word"), ("12 + 5 =", "word"),
        ("12 + 5 = 17", "word"),
    ]  # fmt: skip


def test_a_single_word_is_cut_in_half():
    assert cut_texts("1234567") == [("123", "half")]
    assert cut_texts("17") == [("1", "half")]


def test_half_a_word_is_not_half_a_character():
    assert cut_texts("字字") == [("字", "half")]  # 6 bytes: half is 3
    assert cut_texts("a字") == [("a", "half")]  # 4 bytes: half, 2, lies within the second
    assert cut_texts("🙂a") == [("🙂", "half")]  # 5 bytes: half, 2, lies within the first
    ids = tiny_ids("字")[:2] * 4  # no character is ever complete: the text is broken everywhere
    assert cut_points(ids, tiny_decode, 4) == [Cut(4, "half")]


@pytest.mark.parametrize("text", ["", "7", " \n ", "字"])
def test_nothing_that_can_be_cut_has_no_cuts(text):
    assert cut_texts(text) == []


def test_the_last_fifth_is_not_given():
    # At most 8 of 10 tokens are given, and the line ends with the 8th. In the second text at most
    # 8.8 of 11, and the line ends with the 10th.
    assert cut_texts("abcdefg\nhi") == [("abcdefg\n", "line")]
    assert cut_texts("abcdefghi\nj") == [("abcde", "half")]
    assert cut_texts("abcdefghi\nj", max_frac=0.95) == [("abcdefghi\n", "line")]


def test_many_boundaries_leave_a_spread():
    text = "".join(f"{i}\n" for i in range(9)) + "x" * 20
    # Of 9 lines, 3 in the middle of each third: the 2nd, 5th and 8th.
    assert [len(given) for given, _ in cut_texts(text, max_cuts=3)] == [4, 10, 16]
    assert len(cut_texts(text, max_cuts=100)) == 9


def test_the_end_of_a_turn_is_cut():
    eos = 258
    ids = [*tiny_ids("What is it?"), eos, *tiny_ids("Tell. Now tell me more, and then more")]
    cuts = cut_points(ids, tiny_decode, 8, turn_token_ids={eos})
    assert cuts == [Cut(12, "turn"), Cut(17, "sentence")]
    assert cut_points(ids, tiny_decode, 1, turn_token_ids={eos}) == [Cut(12, "turn")]


def test_a_boundary_inside_a_token_is_no_cut():
    pieces = {0: "a b", 1: ".\nc", 2: " d", 3: ".\n", 4: " tail", 5: " end"}
    ids = [0, 1, 2, 3, 4, 5, 4, 5]
    cuts = cut_points(ids, lambda given: "".join(pieces[i] for i in given), 8)
    assert cuts == [Cut(4, "line")]


def test_a_token_that_ends_a_line_and_begins_a_character_is_no_cut():
    text = "ab\n字 and so on".encode()
    chunks = [text[:2], text[2:4], *(text[i : i + 1] for i in range(4, len(text)))]
    ids = list(range(len(chunks)))

    def decode(given):
        return b"".join(chunks[i] for i in given).decode(errors="replace")

    assert decode(ids[:2]) == "ab\n\ufffd"
    assert all(cut.cut == "word" for cut in cut_points(ids, decode, 8))


def test_a_prefix_that_reads_otherwise_than_the_response_is_no_cut():
    text = "ab\ncd ef gh"

    def decode(given):  # writes its first letter once all is known
        return text if len(given) == len(text) else "?" + text[1 : len(given)]

    assert cut_points(range(len(text)), decode, 8) == []


def test_a_decoder_that_drops_the_first_space_is_cut_right():
    ids = [1, 2, 3, 4, 0, 5, 2, 6, 6, 6]  # "so the sum. \n the is is is"
    assert cut_points(ids, metaspace_decode, 8) == [Cut(6, "line")]


words = st.lists(
    st.sampled_from(
        ["so", " the", " sum is", " 12", ".", "! ", "\n", "\n\n  ", "字", "🙂", "é", "。"]
    )
)


@given(words, st.integers(1, 5), st.sampled_from([0.3, 0.8, 1.0]))
def test_cuts_are_increasing_never_beyond_the_limit_and_end_at_a_character(parts, num, max_frac):
    ids = MERGED.encode("".join(parts)).ids
    cuts = cut_points(ids, MERGED.decode, num, max_frac)
    taken = [cut.prefix_tokens for cut in cuts]
    assert taken == sorted(set(taken))
    assert len(taken) <= num
    assert all(1 <= t <= max_frac * len(ids) for t in taken)
    for cut in cuts:
        text = MERGED.decode(ids[: cut.prefix_tokens])
        assert "".join(parts).startswith(text)
        assert text.rstrip(" \n").endswith((".", "!", "。")) or cut.cut != "sentence"
        assert "\n" in text[len(text.rstrip()) :] or cut.cut != "line"


def test_a_blank_opening_does_not_hide_the_half():
    # nine blanks, then two digits: after the first of them
    cuts = cut_points(list(b"\n\n  \n\n   12"), tiny_decode, 1, max_frac=1.0)
    assert cuts == [Cut(10, "half")]


@given(words.filter(lambda parts: len("".join(parts).strip()) > 1), st.integers(1, 5))
def test_whatever_has_two_characters_is_cut(parts, num):
    ids = list("".join(parts).encode())
    assert cut_points(ids, tiny_decode, num, max_frac=1.0)


@given(words, st.integers(1, 5))
def test_the_same_response_is_always_cut_in_the_same_places(parts, num):
    ids = MERGED.encode("".join(parts)).ids
    assert cut_points(ids, MERGED.decode, num) == cut_points(tuple(ids), MERGED.decode, num)


def test_little_is_decoded_however_long_the_response():
    num_decoded = 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return tiny_decode(ids)

    ids = tiny_ids("One. Two!\n" * 2000)
    assert len(cut_points(ids, decode, 8)) == 8
    # Prefix by prefix would be 10,000 responses' worth. A search of one boundary decodes at most
    # log2 n prefixes, and all of them are shorter than the response.
    assert num_decoded <= len(ids) * (2 + 8 * math.log2(len(ids)))


@pytest.mark.parametrize("hostile", [".", ". ", " ", '."', "\n ", "```\n"])
def test_hostile_text_takes_linear_time(hostile):
    ids = tiny_ids("x" + hostile * (100_000 // len(hostile)))
    started = time.perf_counter()
    assert len(cut_points(ids, tiny_decode, 4)) in (1, 4)  # 1: all is one run of white space
    assert time.perf_counter() - started < HOSTILE_S


@pytest.mark.parametrize(
    ("max_cuts", "max_frac", "message"),
    [(0, 0.8, "`max_cuts`"), (4, 0.0, "`max_frac`"), (4, 1.5, "`max_frac`")],
)
def test_impossible_limits_are_refused(max_cuts, max_frac, message):
    with pytest.raises(ValueError, match=message):
        cut_points([1, 2, 3], tiny_decode, max_cuts, max_frac)


def test_the_drop_is_given_up_to_the_forgotten_token():
    # log mu - log pi = 0.1, 2.0, 0.5, 3.0, 0.0: the largest of the first 4 (0.8 of 5) is the 4th.
    mu, pi = [-0.5, -1.0, -0.5, -1.0, -0.1], [-0.6, -3.0, -1.0, -4.0, -0.1]
    assert drop_cut(mu, pi) == Cut(4, "drop")
    assert drop_cut(mu, pi, max_frac=0.6) == Cut(2, "drop")


def test_equal_drops_go_to_the_first_and_infinite_ones_win():
    assert drop_cut([-1.0, -1.0, -1.0, -1.0], [-2.0, -2.0, -2.0, -2.0]) == Cut(1, "drop")
    assert drop_cut([-1.0, -1.0, -1.0, -1.0], [-9.0, -math.inf, -9.0, -9.0]) == Cut(2, "drop")


def test_what_was_not_forgotten_has_no_drop():
    assert drop_cut([-2.0, -2.0, -2.0], [-1.0, -2.0, -9.0]) is None  # the last is beyond 0.8
    assert drop_cut([-1.0], [-5.0]) is None
    assert drop_cut([], []) is None
    # rounding is no drop: 5e-7 nats; nor is 0.09, a probability of 0.914 of what it was
    assert drop_cut([-1.0, -2.0, -0.5], [-1.0, -2.0000005, -0.5]) is None
    assert drop_cut([-1.0, -2.0, -0.5], [-1.0, -2.09, -0.5]) is None
    assert drop_cut([-1.0, -2.0, -0.5], [-1.0, -2.11, -0.5]) == Cut(2, "drop")


@pytest.mark.parametrize(
    ("mu", "pi", "message"),
    [([-1.0], [-1.0, -1.0], "one log-prob per token"), ([math.nan, -1.0], [-1.0, -1.0], "NaN")],
)
def test_log_probs_that_cannot_be_compared_are_refused(mu, pi, message):
    with pytest.raises(ValueError, match=message):
        drop_cut(mu, pi)


def test_a_prefix_is_hashed_as_little_endian_int32():
    data = bytes([1, 0, 0, 0, 2, 1, 0, 0])  # 1, and 258 = 2 + 256
    assert prefix_sha256([1, 258]) == hashlib.sha256(data).hexdigest()
    assert prefix_sha256(()) == hashlib.sha256(b"").hexdigest()
    assert prefix_sha256([12, 3]) != prefix_sha256([1, 23])


def episode(*pieces):
    """Return ids and bounds of an episode: sampled and given texts take turns."""
    ids, bounds = [], []
    for number, text in enumerate(pieces):
        bounds += [len(ids), len(ids) + len(text)] if number % 2 == 0 else []
        ids += tiny_ids(text)
    return ids, bounds


def test_an_episode_is_cut_where_a_turn_begins_and_within_turns_alone():
    ids, bounds = episode(
        "I ask.\nWhat is it?\n", "tool\nIt is.\n42\nassistant\n", "So.\nIt is 42."
    )
    cuts = cut_points(ids, tiny_decode, 8, bounds=bounds)
    # The line after `I ask.` (7 tokens), the begin of the second turn (19 + 25), and a line of it.
    # The end of the first turn is no cut, and nothing that the tool said.
    assert cuts == [Cut(7, "line"), Cut(44, "turn"), Cut(48, "line")]
    assert cut_points(ids, tiny_decode, 1, bounds=bounds) == [Cut(44, "turn")]


def test_the_part_of_an_episode_that_may_be_given_is_of_what_was_sampled():
    # 8 of 10 sampled tokens may be given, with all that stands between: not 0.8 of 50.
    ids, bounds = episode("abcdefgh", "x" * 40, "ij")
    assert cut_points(ids, tiny_decode, 8, bounds=bounds) == [Cut(48, "turn")]
    ids, bounds = episode("abcdefghi", "x" * 40, "j")
    assert cut_points(ids, tiny_decode, 8, bounds=bounds) == []


def test_an_end_token_of_an_episode_is_no_cut():
    eos = 258
    ids = [*tiny_ids("What is it"), eos, *tiny_ids("tool"), *tiny_ids("It is what it is"), eos]
    cuts = cut_points(ids, tiny_decode, 8, turn_token_ids={eos}, bounds=[0, 11, 15, len(ids)])
    assert cuts == [Cut(15, "turn")]


def test_what_was_given_did_not_fall():
    mu, pi = [-1.0, 0.0, 0.0, -1.0, -1.0], [-1.2, -9.0, -9.0, -1.5, -1.0]
    assert drop_cut(mu, pi, bounds=[0, 1, 3, 5], max_frac=1.0) == Cut(4, "drop")
    assert drop_cut(mu, pi, bounds=[0, 1, 3, 5]) == Cut(4, "drop")  # 2.4 of 3 sampled ones
    assert drop_cut(mu, pi, bounds=[0, 1, 3, 5], max_frac=0.5) == Cut(1, "drop")
