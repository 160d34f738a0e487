"""The task `jsonl`: every line is a problem or an error with its number."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl_core.tasks.jsonl import read_json_lines
from rrl_core.tasks.protocol import TaskError
from rrl_core.tasks.registry import build_task

TWO = [{"prompt": "2 + 3?", "answer": "5"}, {"prompt": "2 + 4?", "answer": 6}]


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="problems.jsonl"):
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_bytes("\n".join(lines).encode())
        return path

    return write_rows


def build(path, **params):
    return build_task("jsonl", {"path": path, "eval_fraction": 0, **params})


def numbered(num_rows: int) -> list[dict[str, str]]:
    return [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(num_rows)]


def contents(task, split):
    return [prompt.messages[-1]["content"] for prompt in task.prompts(split)]


def test_a_line_is_a_prompt_taken_as_it_is(write):
    first, second = build(write(TWO)).prompts("train")
    assert first.messages == ({"role": "user", "content": "2 + 3?"},)
    assert (first.answer, second.answer) == ("5", "6")
    # The first 20 digits of what sha256sum says of
    # ["jsonl", "train", [{"role": "user", "content": "2 + 3?"}], "5"]
    assert first.prompt_id == "p-bccec4da79b6e64785c3"


def test_messages_are_taken_and_the_instruction_follows_the_last(write):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    (prompt,) = build(write([{"messages": chat, "answer": "5"}])).prompts("train")
    assert prompt.messages == tuple(chat)
    task = build(write([{"messages": chat, "answer": "5"}]), instruction="Now.")
    assert task.prompts("train")[0].messages == (
        chat[0],
        {"role": "user", "content": "2 + 3? Now."},
    )


def test_difficulty_and_other_keys_are_kept_for_the_reward(write):
    row = {**TWO[0], "difficulty": "easy", "source": "me", "tests": [1, "a"], "n": 2.5}
    (prompt,) = build(write([row])).prompts("train")
    assert prompt.difficulty == "easy"
    assert prompt.meta == {"source": "me", "tests": '[1, "a"]', "n": "2.5"}


def test_only_a_newline_ends_a_line(write):
    line = '{"prompt": "a\u2028b\u2029c\x85d\x0b", "answer": "1"}'.replace("\x0b", "\\u000b")
    task = build(write([line + "\r", "", "  ", json.dumps(TWO[0])]))
    assert contents(task, "train") == ["a\u2028b\u2029c\x85d\x0b", "2 + 3?"]


def test_a_byte_order_mark_is_no_content(write):
    assert contents(build(write(["\ufeff" + json.dumps(TWO[0])])), "train") == ["2 + 3?"]


def test_lone_surrogates_survive(write):
    (prompt,) = build(write(['{"prompt": "a\\ud800b", "answer": "1"}'])).prompts("train")
    assert prompt.messages[0]["content"] == "a\ud800b"
    assert prompt.prompt_id.startswith("p-")
    # Also where a hash of the content decides the split.
    assert len(
        build(write(['{"prompt": "\\udfff", "answer": "1"}', TWO[0]]), eval_fraction=0.5).prompts(
            "eval"
        )
    )


@given(prompts=st.lists(st.text(alphabet=st.characters(exclude_categories=[])), min_size=1))
def test_any_text_comes_back(tmp_path_factory, prompts):
    path = tmp_path_factory.mktemp("any") / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    assert contents(build(path), "train") == list(dict.fromkeys(prompts))


def test_repeated_lines_count_once(write):
    assert contents(build(write([*TWO, TWO[0]])), "train") == ["2 + 3?", "2 + 4?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object in UTF-8; Expecting property name"),
        ("5", "expected a JSON object; came int"),
        ('{"prompt": "?", "answer": NaN}', "NaN is no JSON number"),
        ('{"prompt": "?", "answer": ' + "9" * 5000 + "}", "expected a JSON object in UTF-8"),
        ("[" * 100_000, "expected a JSON object in UTF-8"),
        ('{"prompt": "?"}', "expected `answer`, text or a number; came None"),
        ('{"prompt": "?", "anwser": "5"}', "expected `answer`, text or a number; came None"),
        ('{"prompt": "?", "answer": true}', "expected `answer`, text or a number; came True"),
        ('{"prompt": "?", "answer": ["5"]}', "expected `answer`, text or a number; came ['5']"),
        (
            '{"prompt": "?", "answer": "5", "difficulty": 3}',
            "expected `difficulty` as text; came 3",
        ),
        ('{"answer": "5"}', "came the keys ['answer']"),
        ('{"prompt": 5, "answer": "5"}', "expected either `prompt` as text or `messages`"),
        ('{"messages": [], "answer": "5"}', "expected either `prompt` as text or `messages`"),
        ('{"messages": "?", "answer": "5"}', "expected either `prompt` as text or `messages`"),
        ('{"messages": [{"role": "user"}], "answer": "5"}', "expected either `prompt` as text"),
        (
            '{"messages": [{"role": "assistant", "content": "?"}], "answer": "5"}',
            "that ends with the user's",
        ),
        (
            '{"prompt": "?", "messages": [{"role": "user", "content": "?"}], "answer": "5"}',
            "expected either `prompt` as text or `messages`",
        ),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(write, line, message):
    path = write([TWO[0], "", line])
    with pytest.raises(TaskError) as caught:
        build(path)
    assert f"{path}:3: " in str(caught.value)
    assert message in str(caught.value)


def test_bytes_that_are_no_utf8_are_an_error_with_the_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(TWO[0]).encode() + b'\n{"prompt": "caf\xe9", "answer": "1"}')
    with pytest.raises(TaskError, match=r"latin\.jsonl:2: expected a JSON object in UTF-8"):
        list(read_json_lines(path))


def test_a_missing_or_empty_file_is_refused(write, tmp_path):
    with pytest.raises(TaskError, match="No such file or directory; give another path"):
        build(tmp_path / "nowhere.jsonl")
    with pytest.raises(TaskError, match="expected train prompts; came none"):
        build(write([]))


def test_a_share_is_set_aside_and_more_lines_move_none(write):
    task = build(write(numbered(400)), eval_fraction=0.1)
    held_out, trained = contents(task, "eval"), contents(task, "train")
    assert not set(held_out) & set(trained)
    assert len(held_out) + len(trained) == 400
    # Binomial(400, 0.1): mean 40, standard deviation 6; within four of them.
    assert 16 <= len(held_out) <= 64
    more = build(write(numbered(800)), eval_fraction=0.1)
    assert set(held_out) <= set(contents(more, "eval"))
    assert set(trained) <= set(contents(more, "train"))


def test_at_least_one_is_set_aside_unless_the_share_is_zero(write):
    assert len(build(write(TWO), eval_fraction=1e-9).prompts("eval")) == 1
    assert len(build(write(TWO), eval_fraction=1e-9).prompts("train")) == 1
    assert len(build(write(TWO), eval_fraction=0).prompts("eval")) == 0


def test_the_same_question_never_stands_in_both_splits(write):
    rows = [{**row, "answer": answer} for row in numbered(50) for answer in ("1", "2")]
    task = build(write(rows), eval_fraction=0.5)
    assert not set(contents(task, "eval")) & set(contents(task, "train"))
    assert len(task.prompts("train")) + len(task.prompts("eval")) == 100


def test_eval_problems_can_have_their_own_file(write):
    task = build_task("jsonl", {"path": write(TWO), "eval_path": write(numbered(2), "eval.jsonl")})
    assert contents(task, "train") == ["2 + 3?", "2 + 4?"]
    assert contents(task, "eval") == ["0 + 1?", "1 + 1?"]


def test_eval_problems_that_are_trained_on_are_refused(write):
    with pytest.raises(TaskError, match="1 stand in both splits, the first '2 \\+ 3\\?'"):
        build(write(TWO), eval_path=write([TWO[0]], "eval.jsonl"))


def test_a_reward_of_your_own_needs_no_answer(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = "def shout(prompt, completion):\n    return float(completion.isupper())\n"
    (tmp_path / "reward_of_jsonl.py").write_text(source)
    task = build(write([{"prompt": "Shout!"}]), reward="reward_of_jsonl:shout")
    (prompt,) = task.prompts("train")
    (scorer,) = task.scorers
    assert prompt.answer is None
    assert (scorer(prompt, "HEY").value, scorer(prompt, "hey").value) == (1.0, 0.0)
