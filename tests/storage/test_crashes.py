"""Killed at any instant of an append, a store is whole and the append can simply be done again."""

import pytest

import storage
from tests.storage import children
from tests.storage.rows import OPENED

STEPS = ("temporary opened", "temporary written", "temporary synced", "linked", "folders synced")
FILES = ("rollouts", "prompts", "commit")  # in the order an append writes them
INSTANTS = [(file, step) for file in FILES for step in STEPS]


def kill_at(store: storage.Store, file: str, step: str) -> None:
    instant = INSTANTS.index((file, step))
    child = children.start(children.append_and_die, store.path, "r1", instant)
    child.join(60)
    assert child.exitcode == children.KILLED


@pytest.mark.parametrize(("file", "step"), INSTANTS)
def test_a_killed_append_is_there_or_not_and_can_be_done_again(
    store: storage.Store, file: str, step: str
):
    kill_at(store, file, step)
    is_committed = file == "commit" and step in ("linked", "folders synced")
    assert store.head().number == 1 + is_committed
    assert len(store.read("rollouts")) == 2 * is_committed
    assert store.sql("select count(*) from prompts").fetchall() == [(int(is_committed),)]

    again = store.open_stream("r1", OPENED).append(children.crash_batch(), "crash")
    assert again.commit == (2 if is_committed else 3)
    assert store.read("rollouts") == again.rows["rollouts"]
    assert store.sql("select count(*), count(distinct event_id) from rollouts").fetchall() == [
        (2, 2)
    ]
    assert not storage.verify(store, deep=True)


def test_an_uncommitted_segment_means_nothing_and_its_name_is_not_used_again(store: storage.Store):
    kill_at(store, "prompts", "linked")
    [left] = (store.path / "events" / "prompts").rglob("*.parquet")
    content = left.read_bytes()
    store.open_stream("r1", OPENED).append(children.crash_batch(), "crash")
    assert str(left.relative_to(store.path)) not in store.log.refresh().segments
    assert left.read_bytes() == content
