"""What a log cannot say is refused, whoever wrote it."""

from dataclasses import replace
from typing import Any

import pytest

import storage
from storage.commits import Draft, Head, Segment, seal
from storage.state import State, fold

PATH = "events/rollouts/r1/b-1.parquet"
OTHER = "events/rollouts/r1/b-2.parquet"
ROWS = 3


def segment(path: str, **facts: Any) -> Segment:
    plain = Segment("rollouts", path, ROWS, 100, "0" * 64, 0, 0, 1)
    return replace(plain, **facts)


def draft(kind: str, **facts: Any) -> Draft:
    is_stream = kind in ("open", "append")
    plain = Draft("n", kind, "" if kind in ("condemn", "collect") else "r1", int(is_stream), "",
                  "2026-01-01T00:00:00+00:00")  # fmt: skip
    return replace(plain, **facts)


def folded(*drafts: Draft) -> State:
    state = State()
    for one in drafts:
        state = fold(state, [seal(one, state.head)])
    return state


OPENED = draft("open", added=(segment(PATH),))


def test_a_whole_life_folds():
    state = folded(
        OPENED,
        draft("append", added=(segment(OTHER),)),
        draft("compact", added=(segment("events/rollouts/r1/c.parquet", rows=2 * ROWS),),
              removed=(PATH, OTHER)),
        draft("condemn", removed=(PATH, OTHER)),
        draft("collect", removed=(PATH,)),
    )  # fmt: skip
    assert (list(state.segments), list(state.condemned)) == (
        ["events/rollouts/r1/c.parquet"],
        [OTHER],
    )
    [live] = state.segments.values()
    assert (live.first_commit, live.last_commit, live.is_compacted) == (1, 2, True)
    assert state.head != Head(0, "")


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([draft("append", added=(segment(PATH),))], "committed twice"),
        ([draft("condemn", removed=(OTHER,)), draft("append", added=(segment(OTHER),))],
         "after it was condemned"),
        ([draft("condemn", removed=(PATH,))], "which is live"),
        ([draft("compact", added=(segment(OTHER),), removed=("events/rollouts/r1/x.parquet",))],
         "which is not live"),
        ([draft("compact", added=(segment(OTHER, rows=2),), removed=(PATH,))], "other rows"),
        ([draft("compact", added=(segment(OTHER, table="scores"),), removed=(PATH,))],
         "other rows"),
        ([draft("compact", run_id="r2", added=(segment(OTHER),), removed=(PATH,))], "other rows"),
        ([draft("append", added=(segment("events/../a.parquet"),))], "path of a segment"),
        ([draft("append", added=(segment("/etc/a.parquet"),))], "path of a segment"),
        ([draft("condemn", removed=("../victim.txt",))], "path of a segment"),
        ([draft("condemn", removed=("_log/00000000000000000001.json",))], "path of a segment"),
        ([draft("condemn", removed=("events/x/..",))], "path of a segment"),
        ([draft("append", epoch=2)], "expected epoch 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(drafts: list[Draft], message: str):
    with pytest.raises(storage.DamagedError, match=message):
        folded(OPENED, *drafts)
