"""A hundred damaged stores: each is found, stops what builds on history, and misleads nobody."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.commits import body_sha256, canonical_json, commit_path
from storage.log import checkpoint_path
from tests.storage.rows import OPENED, rollout
from tests.storage.test_compaction import fill

SEED = 11
CHECKPOINT_EVERY = 12
QUERIES = (
    "select * from rollouts order by _commit, _row",
    "select * from rollout_tokens order by _commit, _row",
    "select * from training_history order by run_id, iteration",
    "select * from replay_audit order by run_id, iteration, step, position",
)
CONSOLE_QUERIES = (QUERIES[0], QUERIES[3])  # a table and a view: it checks all alike
Mutation = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A store with plain and compacted segments, two runs, checkpoints, and an artifact in use."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("storage.log.CHECKPOINT_EVERY", CHECKPOINT_EVERY)
        store = storage.open(tmp_path_factory.mktemp("whole") / "store", create=True)
        first, second = store.open_stream("r1", OPENED), store.open_stream("r2", OPENED)
        fill(first, range(4))
        list(storage.compact(store, min_segments=2))
        fill(first, range(4, 6))
        fill(second, range(3))
        second.append({"policies": [policy(store)]}, "publish")
    return storage.open(store.path)


def policy(store: storage.Store) -> dict[str, Any]:
    return {
        "policy_version": 1,
        "iteration": 2,
        "base_digest": "b",
        "adapter_digest": "a",
        "policy_digest": "p",
        "adapter_artifact": store.artifacts.put(b"adapter" * 100, "adapter"),
    }


def put(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def some(folder: Path, pattern: str, source: random.Random) -> Path:
    return source.choice(sorted(folder.glob(pattern)))


def segment(folder: Path, source: random.Random) -> Path:
    live = storage.open(folder).log.refresh().segments
    return folder / source.choice(sorted(live))


def flip_bit(path: Path, source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    put(path, bytes(data))


def edit(path: Path, change: Callable[[dict[str, Any]], None], is_forged: bool) -> None:
    """Change a commit; a forged one gets the hash that its new content has."""
    body = json.loads(path.read_bytes())
    change(body)
    if is_forged:
        body.pop("sha256")
        body["sha256"] = body_sha256(body)
    put(path, canonical_json(body) + b"\n")


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    put(one, second)
    put(other, first)


def swap_segments(folder: Path, source: random.Random) -> None:
    one = segment(folder, source)
    other = next(p for p in iter(lambda: segment(folder, source), None) if p != one)
    swap(one, other)


def put_foreign_segment(folder: Path, source: random.Random) -> None:
    """Put in its place the segment that another store has for the same rows and other values."""
    foreign = storage.open(folder.parent / "foreign", create=True)
    writer = foreign.open_stream("r1", OPENED)
    writer.append({"rollouts": [rollout(f"p{i}", completion="other") for i in range(3)]}, "b")
    put(
        segment(folder, source),
        some(foreign.path, "events/rollouts/*/*.parquet", source).read_bytes(),
    )


def a_commit(folder: Path, source: random.Random) -> Path:
    """Any but the last, whose absence only an anchor shows."""
    newest = storage.open(folder).head().number
    return folder / commit_path(source.randrange(1, newest))


def change_commit(key: str, value: Any, is_forged: bool) -> Mutation:
    def mutate(folder: Path, source: random.Random) -> None:
        edit(a_commit(folder, source), lambda body: body.update({key: value}), is_forged)

    return mutate


def forge_last_commit(folder: Path, source: random.Random) -> None:
    """The chain cannot show it: the last commit has no successor. The anchor does."""
    path = folder / commit_path(storage.open(folder).head().number)
    edit(path, lambda body: body.update(recorded_at="2020-01-01T00:00:00+00:00"), is_forged=True)


def remove_last_commit(folder: Path, source: random.Random) -> None:
    (folder / commit_path(storage.open(folder).head().number)).unlink()


def forge_checkpoint(folder: Path, source: random.Random) -> None:
    """Drop a segment from the newest checkpoint, with a hash that fits."""
    number = storage.open(folder).log.checkpoints()[0]
    edit(folder / checkpoint_path(number), lambda body: body["segments"].pop(), is_forged=True)


def cut(path: Path, source: random.Random) -> None:
    put(path, path.read_bytes()[: source.randrange(1, path.stat().st_size)])


def lengthen(path: Path, source: random.Random) -> None:
    put(path, path.read_bytes() + source.randbytes(8))


def replace_end(path: Path, source: random.Random) -> None:
    put(path, path.read_bytes()[:-4] + b"XXXX")


def empty(path: Path, source: random.Random) -> None:
    put(path, b"")


def remove(path: Path, source: random.Random) -> None:
    path.unlink()


def in_segment(spoil: Callable[[Path, random.Random], None]) -> Mutation:
    return lambda folder, source: spoil(segment(folder, source), source)


def in_commit(spoil: Callable[[Path, random.Random], None]) -> Mutation:
    return lambda folder, source: spoil(a_commit(folder, source), source)


def in_checkpoint(spoil: Callable[[Path, random.Random], None]) -> Mutation:
    return lambda folder, source: spoil(some(folder, "_checkpoints/*", source), source)


def in_artifact(spoil: Callable[[Path, random.Random], None]) -> Mutation:
    return lambda folder, source: spoil(some(folder, "artifacts/*/*/*", source), source)


def swap_commits(folder: Path, source: random.Random) -> None:
    one, other = source.sample(sorted(folder.glob("_log/*.json")), 2)
    swap(one, other)


def put_foreign_commit(folder: Path, source: random.Random) -> None:
    foreign = storage.open(folder.parent / "foreign", create=True)
    foreign.open_stream("r9", OPENED)
    put(a_commit(folder, source), (foreign.path / commit_path(1)).read_bytes())


SEGMENT, COMMIT, CHECKPOINT, LAST = "segment", "commit", "checkpoint", "last"
FORGED, ARTIFACT = "forged", "artifact"
MUTATIONS: tuple[tuple[str, int, str, Mutation], ...] = (
    ("a flipped bit in a segment", 24, SEGMENT, in_segment(flip_bit)),
    ("a cut segment", 8, SEGMENT, in_segment(cut)),
    ("a longer segment", 2, SEGMENT, in_segment(lengthen)),
    ("a segment without its end", 2, SEGMENT, in_segment(replace_end)),
    ("an empty segment", 6, SEGMENT, in_segment(empty)),
    ("a missing segment", 6, SEGMENT, in_segment(remove)),
    ("two segments swapped", 6, SEGMENT, swap_segments),
    ("a segment of another store", 4, SEGMENT, put_foreign_segment),
    ("a flipped bit in a commit", 8, COMMIT, in_commit(flip_bit)),
    ("a cut commit", 3, COMMIT, in_commit(cut)),
    ("an empty commit", 2, COMMIT, in_commit(empty)),
    ("a missing commit", 5, COMMIT, in_commit(remove)),
    ("two commits swapped", 3, COMMIT, swap_commits),
    ("a commit of another store", 2, COMMIT, put_foreign_commit),
    ("an edited commit", 3, COMMIT, change_commit("batch_key", "other", is_forged=False)),
    ("a forged commit", 3, COMMIT, change_commit("recorded_at", "2020-01-01", is_forged=True)),
    ("the last commit missing", 1, LAST, remove_last_commit),
    ("the last commit forged", 1, LAST, forge_last_commit),
    ("a flipped bit in a checkpoint", 3, CHECKPOINT, in_checkpoint(flip_bit)),
    ("a cut checkpoint", 2, CHECKPOINT, in_checkpoint(cut)),
    ("an empty checkpoint", 1, CHECKPOINT, in_checkpoint(empty)),
    ("a forged checkpoint", 1, FORGED, forge_checkpoint),
    ("a flipped bit in an artifact", 2, ARTIFACT, in_artifact(flip_bit)),
    ("a missing artifact", 2, ARTIFACT, in_artifact(remove)),
)
CASES = [(name, kind, mutate, n) for name, times, kind, mutate in MUTATIONS for n in range(times)]


def test_there_are_a_hundred():
    assert len(CASES) == 100


@pytest.mark.parametrize(
    ("kind", "mutate", "seed"),
    [(kind, mutate, SEED + n) for n, (_, kind, mutate, _) in enumerate(CASES)],
    ids=[f"{name} {n}" for name, _, _, n in CASES],
)
def test_damage_is_reported_and_misleads_nobody(
    whole: storage.Store, memory_path: Path, kind: str, mutate: Mutation, seed: int
):
    folder = memory_path / "store"
    shutil.copytree(whole.path, folder)
    mutate(folder, random.Random(seed))
    assert storage.verify(storage.open(folder), deep=True, anchor=whole.head())
    if kind == FORGED:  # only a comparison with the whole log can tell: what builds on it makes it
        for build in (train_on, compact, collect):
            assert outcome(lambda build=build: build(folder)) is STOPPED
        return
    as_of = whole.head().number - (mutate is remove_last_commit)
    found = answers(folder, as_of)
    for question, answer in expected(whole, as_of).items():
        assert found[question] in (STOPPED, answer)
    if kind in (SEGMENT, COMMIT):
        assert outcome(lambda: train_on(folder)) is STOPPED
    if kind == SEGMENT:
        assert STOPPED in found.values()


STOPPED = object()


def outcome(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except storage.StorageError:
        return STOPPED


def answers(folder: Path, as_of: int) -> dict[str, Any]:
    """What each kind of reader is told: rows, or that it must stop."""
    reading, asking, console = (storage.open(folder) for _ in range(3))
    asked: dict[str, Callable[[], Any]] = {}
    for table in storage.TABLES:
        asked[table] = lambda table=table: reading.read(table, as_of=as_of)
    for query in QUERIES:
        asked[query] = lambda query=query: asking.sql(query, as_of=as_of).fetchall()
    for query in CONSOLE_QUERIES:
        asked[f"console: {query}"] = lambda query=query: storage.console.run_query(
            console, query, as_of=as_of
        )
    return {question: outcome(ask) for question, ask in asked.items()}


_expected: dict[int, dict[str, Any]] = {}


def expected(whole: storage.Store, as_of: int) -> dict[str, Any]:
    if as_of not in _expected:
        _expected[as_of] = answers(whole.path, as_of)
        assert STOPPED not in _expected[as_of].values()
    return _expected[as_of]


def compact(folder: Path) -> None:
    list(storage.compact(storage.open(folder), min_segments=2))


def collect(folder: Path) -> None:
    storage.collect(storage.open(folder), grace_s=0)


def train_on(folder: Path) -> None:
    """What a run does with history: open its stream, read all of it, append, merge."""
    store = storage.open(folder)
    storage.require_whole(store)
    for run_id in ("r1", "r2"):
        writer = store.open_stream(run_id, OPENED)
        writer.append({"rollouts": [rollout("new", iteration=9)]}, "new")
    for table in storage.TABLES:
        store.read(table)
