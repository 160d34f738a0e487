"""Ids and content hashes: fixed for ever, and a function of the values alone."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from storage.identity import identify
from storage.rows import to_arrow
from storage.schemas import TABLES
from tests.storage.rows import failure, prompt, rollout, score, tokens, update

PLACE = {
    "run_id": "r1",
    "iteration": 0,
    "role": "attempt",
    "prompt_id": "p1",
    "sample_index": 2,
    "parent_id": "",
    "attempt": 0,
}


def content(table: str, row: dict) -> str:
    return identify(TABLES[table], to_arrow(TABLES[table], [{**row, "run_id": "r1"}]))[1][0]


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def test_event_id_is_the_hash_of_table_and_place():
    # `printf %s PREIMAGE | sha256sum`, first 32 digits, behind the prefix of the table
    preimage = (
        '["rollouts",{"run_id":"r1","iteration":0,"role":"attempt","prompt_id":"p1",'
        '"sample_index":2,"parent_id":"","attempt":0}]'
    )
    assert storage.event_id("rollouts", PLACE) == "ro" + short(preimage)
    assert storage.event_id("rollouts", PLACE) == "ro6f426a49ef046401bb9117846cfa8548"


def test_event_id_ignores_facts_and_the_order_of_keys():
    shuffled = dict(reversed(list(PLACE.items())))
    assert storage.event_id("rollouts", {**shuffled, "completion": "x"}) == storage.event_id(
        "rollouts", PLACE
    )


def test_event_id_of_text_beyond_ascii():
    # canonical JSON is ASCII: é is \u00e9, and 😀 is its pair of surrogates
    preimage = '["prompts",{"run_id":"r\\u00e9\\ud83d\\ude00","prompt_id":"p"}]'
    place = {"run_id": "ré😀", "prompt_id": "p"}
    assert storage.event_id("prompts", place) == "pr" + short(preimage)


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": "0"},
        {"iteration": True},
        {"iteration": 0.0},
        {"prompt_id": None},
        {"prompt_id": 1},
        {"prompt_id": "a\ud800"},
    ],
)
def test_event_id_refuses_places_of_another_type(change: dict):
    with pytest.raises(storage.RowError, match=f"rollouts.{next(iter(change))}"):
        storage.event_id("rollouts", PLACE | change)


def test_event_id_refuses_missing_columns_and_unknown_tables():
    with pytest.raises(storage.RowError, match=r"rollouts\.role"):
        storage.event_id("rollouts", {k: v for k, v in PLACE.items() if k != "role"})
    with pytest.raises(storage.RowError, match="`rollout`"):
        storage.event_id("rollout", PLACE)


def test_content_hash_is_over_the_facts_in_order_without_nulls():
    # run_id and prompt_id are the place; answer is NULL and left out
    preimage = (
        '{"task":"arithmetic","split":"train","messages_json":"[]","difficulty":"easy",'
        '"meta_json":"{}"}'
    )
    assert content("prompts", prompt("p1") | {"answer": None}) == short(preimage)


def test_content_hash_of_lists_is_over_their_little_endian_bytes():
    # int32 1, 2, 3 = 01000000 02000000 03000000; float32 -0.5 = bf000000, -0.25 = be800000
    prompt_ids = hashlib.sha256(bytes.fromhex("010000000200000003000000")).hexdigest()
    completion_ids = hashlib.sha256(bytes.fromhex("0400000005000000")).hexdigest()
    logprobs = hashlib.sha256(bytes.fromhex("000000bf000080be")).hexdigest()
    preimage = (
        f'{{"prompt_ids":["int32",3,"{prompt_ids}"],"completion_ids":["int32",2,"{completion_ids}"],'
        f'"sampler_logprobs":["float",2,"{logprobs}"]}}'
    )
    assert content("rollout_tokens", tokens("ro1")) == short(preimage)


def test_content_hash_tells_neighbouring_floats_apart():
    next_float = 0.5000000000000001
    assert content("updates", update(loss=0.5)) != content("updates", update(loss=next_float))
    assert content("updates", update(loss=0.0)) != content("updates", update(loss=-0.0))


def test_content_hash_takes_an_integer_for_the_same_float():
    assert content("updates", update(loss=1)) == content("updates", update(loss=1.0))


def test_content_hash_leaves_timings_out():
    slow, fast = rollout(generate_s=9.0), rollout(generate_s=0.1)
    assert content("rollouts", slow) == content("rollouts", fast)


def test_content_hash_does_not_depend_on_the_place():
    assert content("failures", failure("a")) == content("failures", failure("b"))


def test_an_empty_list_is_not_null():
    empty, null = tokens("ro1", sampler_logprobs=[]), tokens("ro1", sampler_logprobs=None)
    assert content("rollout_tokens", empty) != content("rollout_tokens", null)


def test_rows_have_the_same_identity_alone_and_together():
    table = TABLES["rollout_tokens"]
    rows = [tokens(f"ro{i}", completion_ids=[i] * i, run_id="r1") for i in range(4)]
    together = identify(table, to_arrow(table, rows))
    alone = [identify(table, to_arrow(table, [row])) for row in rows]
    assert list(zip(*together, strict=True)) == [(ids[0], hashes[0]) for ids, hashes in alone]


def canonical(table: str, row: dict) -> tuple[str, str]:
    """Id and content hash of a row without lists, by the definition: JSON of the whole row."""
    columns = [c for c in TABLES[table].columns if c.name in row]
    place = {c.name: row[c.name] for c in columns if c.place}
    facts = {
        c.name: float(row[c.name]) if c.type == "float64" else row[c.name]
        for c in columns
        if not c.place and not c.timing and row[c.name] is not None
    }
    whole = [json.dumps(v, separators=(",", ":")) for v in ([table, place], facts)]
    return TABLES[table].prefix + short(whole[0]), short(whole[1])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1e22])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, FLOATS, st.none() | FLOATS, st.booleans()), min_size=1, max_size=5),
    st.sampled_from([1, 40]),  # few rows, and more than are looked at one by one
)
def test_identity_is_that_of_the_json_of_each_row(facts: list[tuple], copies: int):
    rows = [
        update(run_id=text, loss=loss, is_skipped=skipped, algorithm=text * 30, step=n)
        for n, (text, loss, _, skipped) in enumerate(facts * copies)
    ]
    scores = [
        score(text, value, run_id="r1", feedback=text) for text, _, value, _ in facts * copies
    ]
    for name, of_table in (("updates", rows), ("scores", scores)):
        table = TABLES[name]
        ids, hashes = identify(table, to_arrow(table, of_table))
        assert list(zip(ids, hashes, strict=True)) == [canonical(name, row) for row in of_table]


@pytest.mark.parametrize("num_plain", [0, 200])  # few rows, and more than are looked at one by one
def test_texts_are_escaped_as_json_does(num_plain: int):
    texts = ["plain", 'say "a\\b"', "line\nline\t\r", "\x7f", "\0\x1b[31m", "é😀\u2028", "é\n", ""]
    rows = [
        score(f"t{n}", 1.0, run_id="r1", feedback=text, signature=text or None)
        for n, text in enumerate(texts + ["plain"] * num_plain)
    ]
    ids, hashes = identify(TABLES["scores"], to_arrow(TABLES["scores"], rows))
    assert list(zip(ids, hashes, strict=True)) == [canonical("scores", row) for row in rows]


def test_the_first_place_and_the_first_fact_are_never_null():
    for table in TABLES.values():  # the one column of its JSON without a comma before it
        for names in (table.place_columns, table.content_columns):
            [first] = [c for c in table.columns if c.name == names[0]]
            assert not first.nullable
