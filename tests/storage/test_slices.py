"""A slice finds each rollout that is left once, in shards that never change."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.slices import Contents, Shard, Slice, Wanted, check_condition
from tests.storage.rows import OPENED, prompt, rollout, score, tokens

EXACT_2 = {"scorer": "exact", "scorer_version": "2"}


def append(store: storage.Store, run_id: str, sizes: list[int], **facts: Any) -> list[str]:
    """Commit batches of so many rollouts, with tokens and prompts; return their ids in order."""
    writer = store.open_stream(run_id, OPENED)
    ids = []
    for number, size in enumerate(sizes):
        rows = [rollout(f"p{i % 3}", i, number, **facts) for i in range(size)]
        new = [writer.event_id_of("rollouts", row) for row in rows]
        ids += new
        writer.append(
            {
                "rollouts": rows,
                "rollout_tokens": [tokens(i, number) for i in new],
                "prompts": [prompt(f"p{i}") for i in range(3)] + [prompt(f"b{number}")],
            },
            f"b{number}",
        )
    return ids


def wanted(store: storage.Store, **facts: Any) -> Wanted:
    given: dict[str, Any] = {"as_of": store.head().number, "target_kind": "rollout"}
    return Wanted(**given | EXACT_2 | facts)


def read_all(store: storage.Store, what: Wanted, shard_rollouts: int) -> list[list[str]]:
    """The ids of every shard."""
    history = Slice(store, what)
    _, shards = history.shards(shard_rollouts)
    return [[row["event_id"] for row in history.read(shard).rollouts] for shard in shards]


def judge(store: storage.Store, targets: list[str], status: str = "ok", **facts: Any) -> None:
    value = 1.0 if status == "ok" else None
    rows = [score(i, value, status=status, **EXACT_2 | facts) for i in targets]
    store.open_stream(f"judge-{store.head().number}", OPENED).append({"scores": rows}, "s")


@pytest.mark.parametrize("shard_rollouts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("is_compacted", [False, True])
def test_shards_hold_every_rollout_once_in_order(
    shard_rollouts: int, is_compacted: bool, memory_path: Path
):
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [5, 1, 0, 9, 3, 2]) + append(store, "r2", [4, 4])
    what = wanted(store)
    if is_compacted:
        list(storage.compact(store, min_segments=2))
    shards = read_all(store, what, shard_rollouts)
    assert [i for shard in shards for i in shard] == ids
    assert max(map(len, shards)) <= shard_rollouts
    assert all(len(a) + len(b) > shard_rollouts for a, b in pairwise(shards))


def test_a_shard_stays_the_same_whatever_is_appended_judged_or_compacted(memory_path: Path):
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [5, 8, 3])
    what = wanted(store, where="sample_index <> 1")
    history = Slice(store, what)
    contents, shards = history.shards(4)
    before = [history.read(shard) for shard in shards]
    append(store, "r2", [6])
    judge(store, ids)
    list(storage.compact(store, min_segments=2))
    for _ in range(2):
        storage.collect(store, grace_s=0)  # the files that `history` has open are deleted
    assert [history.read(shard) for shard in shards] == before
    assert Slice(store, what).shards(4) == (contents, shards)
    # Rollout 1 of each batch is left out: 4 + 7 + 2.
    assert contents == Contents(num_rollouts=13, num_judged=0, num_left=13, unfit={})


@pytest.mark.parametrize(
    ("where", "run_id", "expected"),
    [
        ("iteration = 1 or sample_index = 0", "r1", [0, 2, 3]),
        ("rollouts.iteration = 1 -- the second", None, [2, 3, 6]),
        ("prompt_id in (select prompt_id from prompts where run_id = 'r2')", None, range(7)),
        ("event_id in (select r.event_id from rollouts as r where r.run_id = 'r2')", "r1", []),
        ("completion = '$where ''--'''", None, []),
    ],
)
def test_a_condition_over_rollouts_selects(
    where: str, run_id: str | None, expected: list[int], memory_path: Path
):
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [2, 2]) + append(store, "r2", [1, 1, 1])
    # r1: batch 0 is 0, 1 and batch 1 is 2, 3; r2: batches 0, 1, 2 are 4, 5, 6.
    shards = read_all(store, wanted(store, where=where, run_id=run_id), 64)
    found = [ids.index(i) for shard in shards for i in shard]
    assert found == ([5 if e == 6 and "second" in where else e for e in expected])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("iteration =", "expected one SQL condition"),
        ("true) union select (1", "expected one SQL condition"),
        ("true; drop table rollouts", "expected one SQL condition"),
        ("exists (select 1 from read_csv('/etc/passwd'))", "cannot be asked here"),
        ("random() < 0.5", "`random`"),
        ("recorded_at < now()", "`now`"),
        ("recorded_at < current_timestamp", "`current_timestamp`"),
        ("age(recorded_at) < interval 1 day", "`age`"),
        ("recorded_at < pg_postmaster_start_time()", "`pg_postmaster_start_time`"),
        ("current_setting('memory_limit') = '2GB'", "`current_setting`"),
        ("current_query() <> ''", "`current_query`"),
        ("event_id in (select target_id from scores(999999))", "`scores(...)`"),
        ("event_id in (select target_id from scores(as_of := 1))", "`scores(...)`"),
        ("exists (select 1 from lineage(1))", "`lineage(...)`"),
        ("event_id in (select event_id from rollouts using sample 10%)", "`sample`"),
        ("colour = 'red'", "colour"),
        ("count(*) over () > 1", "window"),
        ("$p = 1", "parameter"),
        ("completion::int = 4", "Could not convert"),
    ],
)
def test_what_is_no_condition_is_refused(where: str, message: str, memory_path: Path):
    store = storage.open(memory_path, create=True)
    append(store, "r1", [2])
    with pytest.raises(storage.QueryError, match=re.escape(message)):
        Slice(store, wanted(store, where=where)).shards(8)


def test_a_condition_reads_no_file_but_those_of_the_store(memory_path: Path):
    store = storage.open(memory_path / "store", create=True)
    append(store, "r1", [2])
    (memory_path / "x.csv").write_text("a,b\n1,2\n")
    where = f"exists (select 1 from '{memory_path / 'x.csv'}')"
    with pytest.raises(storage.QueryError, match="cannot be read"):
        Slice(store, wanted(store, where=where)).shards(8)


def test_a_word_that_looks_like_chance_may_be_compared_with():
    check_condition("completion like '%random() now%' or role = 'today'")
    check_condition("age(recorded_at, timestamptz '2026-01-01') < interval 1 day")
    check_condition("event_id in (select target_id from scores, generate_series(3))")


def test_final_verdicts_are_kept_and_others_are_tried_again(memory_path: Path):
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [5])
    judge(store, ids[:1])
    judge(store, ids[1:2], "unscorable")
    judge(store, ids[2:3], "timeout")
    judge(store, ids[2:3], "timeout", attempt=1)
    judge(store, ids[3:4], "scorer_error")
    judge(store, ids[4:], scorer_version="1")  # another judge
    history = Slice(store, wanted(store))
    contents, [shard] = history.shards(8)
    assert contents == Contents(num_rollouts=5, num_judged=2, num_left=3, unfit={})
    rows = history.read(shard).rollouts
    assert [(row["event_id"], row["attempt"]) for row in rows] == [
        (ids[2], 2), (ids[3], 1), (ids[4], 0),
    ]  # fmt: skip
    assert (rows[0]["answer"], rows[0]["completion"]) == ("4", "#### 4")


def test_what_was_judged_needs_no_prompt(memory_path: Path):
    store = storage.open(memory_path, create=True)
    writer = store.open_stream("r1", OPENED)
    rows = [rollout("p1", n) for n in range(2)]
    first = writer.event_id_of("rollouts", rows[0])
    writer.append({"rollouts": rows, "scores": [score(first, 1.0, **EXACT_2)]}, "b")
    contents, shards = Slice(store, wanted(store)).shards(8)
    assert (contents.num_judged, contents.num_left, shards) == (1, 0, [])
    assert contents.unfit == {"its prompt is not in the store": 1}


def test_a_review_is_no_answer_to_be_judged(memory_path: Path):
    store = storage.open(memory_path, create=True)
    facts = {"role": "control", "parent_id": "ro1"}
    append(store, "r1", [2], role="review")
    append(store, "r2", [1], **facts, arm="no_memory_review")
    answers = append(store, "r3", [1], **facts, arm="no_memory") + append(store, "r4", [1])
    contents, _ = Slice(store, wanted(store)).shards(8)
    assert (contents.num_left, contents.unfit) == (2, {"a review answers no prompt": 3})
    assert read_all(store, wanted(store), 8) == [answers]


def test_a_shard_reads_only_the_segments_its_positions_lie_in(memory_path: Path):
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [4, 4, 4])
    history = Slice(store, wanted(store, target_kind="state"))
    _, shards = history.shards(4)
    history.read(shards[0])
    first, _, third = sorted(
        (s for s in store.log.refresh().segments.values() if s.table == "rollouts"),
        key=lambda s: s.first_commit,
    )
    for segment in (first, third):
        (store.path / segment.path).unlink()
    assert [row["event_id"] for row in history.read(shards[1]).rollouts] == ids[4:8]


def test_a_missing_segment_stops_the_reading(memory_path: Path):
    store = storage.open(memory_path, create=True)
    append(store, "r1", [4])
    next((store.path / "events" / "rollouts").rglob("*.parquet")).unlink()
    with pytest.raises(storage.DamagedError):
        Slice(store, wanted(store)).shards(8)


@pytest.fixture
def cut_history(memory_path: Path) -> tuple[storage.Store, list[str], Callable[[int, int], str]]:
    """Eight responses of prompts p0, p1, p2, the first two cut; p0's prompt is a state too."""
    store = storage.open(memory_path, create=True)
    ids = append(store, "r1", [4, 4])
    writer = store.open_stream("cutter", OPENED)

    def state(number: int, prefix_tokens: int) -> dict[str, Any]:
        return {
            "iteration": 0, "rollout_id": ids[number], "prefix_tokens": prefix_tokens,
            "source_run_id": "r1", "prompt_id": f"p{number}", "prefix_sha256": "", "cut": "line",
        }  # fmt: skip

    writer.append({"states": [state(0, 0), state(0, 1), state(1, 1)]}, "cut")
    return store, ids, lambda n, t: writer.event_id_of("states", state(n, t))


def test_responses_whose_states_are_all_judged_are_left_out(
    cut_history: tuple[storage.Store, list[str], Callable[[int, int], str]],
):
    store, ids, state_id = cut_history
    judge(store, [state_id(0, 0), state_id(1, 1)])
    what = wanted(store, target_kind="state")
    contents, _ = Slice(store, what).shards(8)
    assert contents == Contents(num_rollouts=8, num_judged=1, num_left=7, unfit={})
    assert read_all(store, what, 8) == [[ids[0], *ids[2:]]]


def test_a_prompt_is_met_first_in_one_shard_and_its_known_states_come_with_it(
    cut_history: tuple[storage.Store, list[str], Callable[[int, int], str]],
):
    store, _, state_id = cut_history
    history = Slice(store, wanted(store, target_kind="state", where="iteration = 1"))
    # Batch 1 holds p0, p1, p2, p0. Neither of its responses was cut, but the prompt p0 is a state.
    _, shards = history.shards(2)
    assert len(shards) == 2
    first, second = (history.read(shard) for shard in shards)
    assert [row["is_first_of_prompt"] for row in first.rollouts] == [True, True]
    assert [row["is_first_of_prompt"] for row in second.rollouts] == [True, False]
    assert [state["event_id"] for state in first.states] == [state_id(0, 0)]
    assert second.states == first.states
    assert first.rollouts[0]["completion_ids"] == [4, 5]


def test_what_has_no_states_is_counted_with_its_reason(memory_path: Path):
    store = storage.open(memory_path, create=True)
    writer = store.open_stream("r1", OPENED)
    rows = [
        rollout("p0", 0),
        rollout("p0", 1, status="error", error="refused"),
        rollout("p0", 2, role="continuation"),
        rollout("p0", 3),
        rollout("p0", 4),
    ]
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    writer.append({"rollouts": rows}, "b0")
    writer.append({"rollout_tokens": [tokens(ids[3])]}, "late")
    contents, [shard] = (history := Slice(store, wanted(store, target_kind="state"))).shards(8)
    assert contents.unfit == {
        "nothing was sampled": 1,
        "only attempts, retries and imported responses are cut into states": 1,
        "no token ids are stored": 2,
    }
    assert shard == Shard((2, 3), (2, 3), 1)
    assert [row["completion_ids"] for row in history.read(shard).rollouts] == [[4, 5]]
