"""Run one query past the gate, straight on the locked connection, under small limits.

`hostile_child.py STORE`, the query on stdin.
"""

import re
import sys
import threading

import duckdb

import storage
from flows.asking import limit_process
from storage import console
from storage.schemas import TABLES
from storage.views import VIEWS

TIME_LIMIT_S = 0.3


def run_past_the_gate(store: storage.Store, query: str) -> list[tuple]:
    """Run a query on the locked connection; whatever it leaves there goes with the connection.

    The connection knows the tables and views that the query names: to define all of them for one
    that names none takes longer than all else here, and brings nothing that could be attacked.
    """
    state = store.log.refresh()
    views = console.views_of(store, state, state.head.number)
    named = set(re.findall(r"\w+", query.lower())) & {*TABLES, *VIEWS}
    if named:
        views.define(" ".join(named))
    connection = console.locked(views)
    timer = threading.Timer(TIME_LIMIT_S, connection.interrupt)
    timer.start()
    try:
        with connection:
            connection.execute(query)
            return connection.fetchmany(1000)
    finally:
        timer.cancel()


def main() -> None:
    store = storage.open(sys.argv[1])
    query = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    console.MEMORY_LIMIT = "100MB"
    limit_process(2 * TIME_LIMIT_S, max_more_bytes=2**30)
    try:
        print("answered", len(run_past_the_gate(store, query)))
    except (storage.QueryError, duckdb.Error, MemoryError) as error:
        print("refused", type(error).__name__, str(error)[:200])


if __name__ == "__main__":
    main()
