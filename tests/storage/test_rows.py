"""What enters a segment: exactly the columns, types and NULLs of the schema, all numbers finite."""

import math

import numpy as np
import pytest

import storage
from tests.storage.rows import prompt, rollout, score, tokens, update


@pytest.mark.parametrize(
    ("table", "row", "message"),
    [
        ("rollouts", rollout(surprise=1), "unknown columns 'surprise'"),
        ("rollouts", rollout(epoch=1), "unknown columns 'epoch'"),
        (
            "rollouts",
            rollout(completion=None),
            "rollouts.completion`, row 0: expected text, came NULL",
        ),
        ("rollouts", rollout(completion=b"x"), "expected str, came b'x'"),
        ("rollouts", rollout(sample_index=1.0), "expected int, came 1.0"),
        ("rollouts", rollout(sample_index=True), "expected int, came True"),
        ("rollouts", rollout(sample_index="1"), "expected int, came '1'"),
        ("rollouts", rollout(sample_index=2**31), "rollouts.sample_index"),
        ("rollouts", rollout(temperature="1"), "expected float or int, came '1'"),
        ("rollouts", rollout(temperature=False), "expected float or int, came False"),
        ("rollouts", rollout(temperature=math.nan), "came NaN or an infinity"),
        ("rollouts", rollout(temperature=math.inf), "came NaN or an infinity"),
        ("rollouts", rollout(prompt_id="a\ud800"), "lone surrogate"),
        ("rollouts", rollout(run_id="other"), "expected run_id 'r1' or none, came 'other'"),
        ("updates", update(is_skipped=0), "expected bool, came 0"),
        ("updates", update(loss=2**53 + 1), "updates.loss"),
        ("rollout_tokens", tokens("ro1", completion_ids=[1.5]), "came lists of double"),
        ("rollout_tokens", tokens("ro1", completion_ids=[7, True]), "completion_ids"),
        ("rollout_tokens", tokens("ro1", completion_ids=[True]), "came lists of bool"),
        ("rollout_tokens", tokens("ro1", completion_ids=[1, None]), "came one with None in it"),
        ("rollout_tokens", tokens("ro1", completion_ids=[2**31]), "completion_ids"),
        ("rollout_tokens", tokens("ro1", completion_ids=["a"]), "completion_ids"),
        ("rollout_tokens", tokens("ro1", completion_ids=None), "came NULL"),
        ("rollout_tokens", tokens("ro1", sampler_logprobs=[-math.inf]), "came NaN or an infinity"),
        ("rollout_tokens", tokens("ro1", sampler_logprobs=[1e300]), "came NaN or an infinity"),
        ("scores", score("ro1", math.nan), "came NaN or an infinity"),
        ("nothing", {}, "came `nothing`"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    store: storage.Store, writer: storage.StreamWriter, table: str, row: dict, message: str
):
    head = store.head()
    with pytest.raises(storage.RowError) as error:
        writer.append({"prompts": [prompt("p1")], table: [row]}, "b")
    assert message in str(error.value)
    assert store.head() == head


def test_the_message_names_the_row(writer: storage.StreamWriter):
    rows = [rollout(sample_index=0), rollout(sample_index=1, completion=3)]
    with pytest.raises(storage.RowError, match=r"rollouts.completion`, row 1: expected str"):
        writer.append({"rollouts": rows}, "b")


def test_committed_logprobs_are_rounded_to_float32(writer: storage.StreamWriter):
    row = tokens("ro1", sampler_logprobs=[-0.1, -1 / 3])
    committed = writer.append({"rollout_tokens": [row]}, "b").rows["rollout_tokens"][0]
    assert committed["sampler_logprobs"] == [float(np.float32(-0.1)), float(np.float32(-1 / 3))]


def test_token_ids_may_be_negative(writer: storage.StreamWriter):
    row = tokens("ro1", prompt_ids=[], completion_ids=[-1, 0, 2**31 - 1])
    committed = writer.append({"rollout_tokens": [row]}, "b").rows["rollout_tokens"][0]
    assert (committed["prompt_ids"], committed["completion_ids"]) == ([], [-1, 0, 2**31 - 1])


def test_arrays_are_lists_too(writer: storage.StreamWriter):
    row = tokens("ro1", prompt_ids=np.array([7, 8]), sampler_logprobs=np.array([-0.5, -1.5]))
    committed = writer.append({"rollout_tokens": [row]}, "b").rows["rollout_tokens"][0]
    assert (committed["prompt_ids"], committed["sampler_logprobs"]) == ([7, 8], [-0.5, -1.5])


@pytest.mark.parametrize(
    "text", ["", "a\0b", "\u2028\x1b[31m", "é\u0301😀", "'; drop table rollouts; --"]
)
def test_any_text_comes_back_as_it_was(
    store: storage.Store, writer: storage.StreamWriter, text: str
):
    writer.append({"rollouts": [rollout(completion=text)]}, "b")
    assert store.read("rollouts")[0]["completion"] == text
    assert store.sql("select completion from rollouts").fetchall() == [(text,)]


def test_lone_surrogates_in_facts_become_replacement_characters(writer: storage.StreamWriter):
    given = rollout(completion="a\ud83d!\udc00")
    committed = writer.append({"rollouts": [given]}, "b").rows["rollouts"][0]
    assert committed["completion"] == "a\ufffd!\ufffd"
    assert writer.append({"rollouts": [given]}, "b").rows["rollouts"] == [committed]


@pytest.mark.parametrize("run_id", ["", "r\ud800", None, 3])
def test_run_ids_are_text_that_can_be_stored(store: storage.Store, run_id: str):
    with pytest.raises(storage.RowError, match="expected a run id"):
        store.open_stream(run_id, {})


@pytest.mark.parametrize(
    "run_id", ["Run 1", "../../etc", "a" * 300, "läuft/😀", "'", "run\nid", "-"]
)
def test_any_other_run_id_works(store: storage.Store, run_id: str):
    from tests.storage.rows import OPENED

    writer = store.open_stream(run_id, OPENED)
    writer.append({"rollouts": [rollout()]}, "Batch/../1")
    assert [row["run_id"] for row in store.read("rollouts", run_id=run_id)] == [run_id]
    folders = list((store.path / "events" / "rollouts").iterdir())
    assert len(folders) == 1
    assert set(folders[0].name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not storage.verify(store, deep=True)
