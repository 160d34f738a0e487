"""What the child processes of `log.py` measure; each function returns plain JSON."""

import gc
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from log_data import OPENED, RUN_ID, Data, Record, make_data, make_records, table_rows
from log_questions import STORY, TOP, ask_duckdb, ask_log, ask_polars, comparable
from log_rivals import as_tables, open_appender

import storage

BATCH_SIZES = (64, 512, 4096)
NUM_WRITERS = 4
WRITER_BATCH = 64
NUM_LOOKED_UP = 64
NUM_ANSWERS = 5
_REPEATS = {64: 15, 512: 7, 4096: 5}
_STORE_BATCH = 4096
_SAMPLED_FRACS = (0.1, 1.0)  # of the rollouts, at which the resident memory is looked at


def measure_append(contender: str, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of durable appends, by batch size; the first of each size is a warm-up."""
    data, seconds = make_data(), dict[str, list[float]]()
    append, number = open_appender(contender, folder, "writer"), 0
    for size in BATCH_SIZES:
        seconds[str(size)] = []
        for repeat in range(_REPEATS[size] + 1):
            tables = as_tables(contender, make_records(data, size, number, "writer"))
            gc.collect()
            started = time.perf_counter()
            append(tables, number)
            if repeat:
                seconds[str(size)].append(time.perf_counter() - started)
            number += 1
    return seconds


def measure_writers(contender: str, folder: Path, num_batches: int) -> dict[str, float]:
    """Return how many rollouts a second processes that append to one store get in together."""
    context = multiprocessing.get_context("spawn")
    barrier, spans = context.Barrier(NUM_WRITERS), context.Queue()
    first = open_appender(contender, folder, "first")
    first(as_tables(contender, make_records(make_data(), 8, 0, "first")), 0)  # makes the store
    processes = [
        context.Process(
            target=_write, args=(contender, folder, f"w{n}", num_batches, barrier, spans)
        )
        for n in range(NUM_WRITERS)
    ]
    for process in processes:
        process.start()
    found = [spans.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    seconds = max(end for _, end in found) - min(start for start, _ in found)
    return {"rollouts_per_s": NUM_WRITERS * num_batches * WRITER_BATCH / seconds}


def _write(
    contender: str, folder: Path, writer: str, num_batches: int, barrier: Any, spans: Any
) -> None:
    data = make_data()
    batches = [
        as_tables(contender, make_records(data, WRITER_BATCH, n, writer))
        for n in range(num_batches)
    ]
    append = open_appender(contender, folder, writer)
    barrier.wait()
    started = time.time()
    for number, tables in enumerate(batches):
        append(tables, number)
    spans.put((started, time.time()))


def build_store(path: Path, num_rollouts: int) -> dict[str, Any]:
    """Append rollouts to a new store, compact it, and return the memory on the way.

    Returns:
        `rss_bytes` at 10 % and at 100 % of the appends; `append_s` and `compact_s`; `num_tokens`.
    """
    store = storage.open(path, create=True)
    writer = store.open_stream(RUN_ID, OPENED)
    facts: dict[str, Any] = {"rss_bytes": [], "append_s": 0.0, "num_tokens": 0}
    done = 0
    for number, records in _batches(make_data(), num_rollouts):
        rows = table_rows(records)
        started = time.perf_counter()
        writer.append(rows, f"batch-{number}", closes_iteration=number)
        facts["append_s"] += time.perf_counter() - started
        facts["num_tokens"] += sum(
            row["num_prompt_tokens"] + row["num_completion_tokens"] for row in rows["rollouts"]
        )
        done += len(records)
        if done >= num_rollouts * _SAMPLED_FRACS[len(facts["rss_bytes"])]:
            facts["rss_bytes"].append(_resident_bytes())
    started = time.perf_counter()
    for _ in storage.compact(store):
        pass
    for _ in range(2):  # condemned, then deleted
        storage.collect(store, grace_s=0)
    return facts | {"compact_s": time.perf_counter() - started}


def _batches(data: Data, num_rollouts: int) -> Iterator[tuple[int, list[Record]]]:
    for number, start in enumerate(range(0, num_rollouts, _STORE_BATCH)):
        yield number, make_records(data, min(_STORE_BATCH, num_rollouts - start), number)


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) << 10 for x in status.split("\n") if x.startswith("VmRSS"))


def write_jsonl(folder: Path, num_rollouts: int) -> tuple[Path, Path]:
    """Write the rollouts of `build_store` as JSONL, with tokens and as text only."""
    whole, text = folder / "with-tokens.jsonl", folder / "text-only.jsonl"
    with whole.open("w") as whole_file, text.open("w") as text_file:
        for _, records in _batches(make_data(), num_rollouts):
            for record in records:
                whole_file.write(json.dumps(record) + "\n")
                for name in ("prompt_ids", "completion_ids", "sampler_logprobs"):
                    del record[name]
                text_file.write(json.dumps(record) + "\n")
    return whole, text


def measure_questions(path: Path, num_rollouts: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each question by reader, all over the same rollouts."""
    store = storage.open(path)
    query = "select event_id from rollouts order by hash(event_id) limit 1"
    [[event_id]] = store.sql(query).fetchall()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="jsonl-") as folder:
        whole, text = write_jsonl(Path(folder), num_rollouts)
        readers = {
            "log": ask_log(store, event_id),
            "with tokens, DuckDB": ask_duckdb(whole, event_id, with_tokens=True),
            "with tokens, Polars": ask_polars(whole, event_id, with_tokens=True),
            "text only, DuckDB": ask_duckdb(text, event_id, with_tokens=False),
            "text only, Polars": ask_polars(text, event_id, with_tokens=False),
        }
        found: dict[str, dict[str, float]] = {name: {} for name in readers}
        for question in readers["log"]:
            expected = comparable(readers["log"][question]())
            for name, asks in readers.items():
                answer, seconds = _timed(asks[question])
                assert comparable(answer) == expected, f"{name} answers `{question}` otherwise"
                found[name][question] = statistics.median(seconds)
    return found


def _timed(ask: Callable[[], Any]) -> tuple[Any, list[float]]:
    seconds = []
    for _ in range(NUM_ANSWERS):
        started = time.perf_counter()
        answer = ask()
        seconds.append(time.perf_counter() - started)
    return answer, seconds


def measure_large(path: Path, seed: int) -> dict[str, Any]:
    """Open a large store, ask it, look up rollouts; return seconds, sizes and the peak memory.

    The program is loaded before anything is timed. `first` are the answers of a new process.
    """
    import duckdb  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import storage.reading
    import storage.segments
    import storage.store

    started = time.perf_counter()
    store = storage.open(path)
    store.head()
    store.check_whole()
    open_s = time.perf_counter() - started
    rng = random.Random(seed)
    query = "select event_id from rollouts where hash(event_id) % 97 = 0 order by event_id"
    ids = [event_id for [event_id] in store.sql(query).fetchall()]
    asks = ask_log(store, ids[0])
    _, top = _timed(asks[TOP])
    _, told = _timed(asks[STORY])
    _, found = _timed(lambda: look_up(store, rng.sample(ids, min(NUM_LOOKED_UP, len(ids)))))
    sizes: dict[str, int] = {}
    rows: dict[str, int] = {}
    for segment in store.log.refresh().segments.values():
        sizes[segment.table] = sizes.get(segment.table, 0) + segment.size_bytes
        rows[segment.table] = rows.get(segment.table, 0) + segment.rows
    return {
        "open_s": open_s,
        "seconds": {"top": top, "look_up": found, "story": told},
        "size_bytes": sizes,
        "num_rows": rows,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def look_up(store: storage.Store, event_ids: list[str]) -> int:
    """Read rollouts by id, then their tokens; return how many of both there are."""
    rollouts = store.read("rollouts", event_ids=event_ids, check_hashes=False)
    places = [{**row, "rollout_id": row["event_id"]} for row in rollouts]
    token_ids = [storage.event_id("rollout_tokens", place) for place in places]
    tokens = store.read("rollout_tokens", event_ids=token_ids, check_hashes=False)
    assert len(rollouts) == len(tokens) == len(event_ids)
    return len(rollouts)
