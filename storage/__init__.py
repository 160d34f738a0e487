"""The memory of a run: everything that happened, appended once, asked with SQL.

    store = storage.open("rrl-data", create=True)
    writer = store.open_stream(run_id, opened)
    committed = writer.append({"rollouts": rows}, batch_key="attempts-0")
    store.sql("select count(*) from rollouts").fetchall()

Names are loaded when first used, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import storage.console as console
    from storage.artifacts import ArtifactStore
    from storage.commits import Head
    from storage.compaction import Collected, Compacted, collect, compact, num_small_segments
    from storage.errors import (
        ClosedIterationError,
        ConflictError,
        DamagedError,
        DiskFullError,
        NewerSchemaError,
        QueryError,
        RowError,
        StorageError,
        StoreNotFoundError,
        SupersededError,
    )
    from storage.export import Exported, export_duckdb
    from storage.identity import event_id
    from storage.liveness import hold_run, is_run_held
    from storage.moment import Moment
    from storage.schemas import TABLES
    from storage.sft import sft_examples
    from storage.store import Store
    from storage.store import open_store as open
    from storage.verification import Finding, require_whole, verify
    from storage.views import view_digests
    from storage.writer import Committed, StreamWriter

_HOMES = {
    "ArtifactStore": "artifacts",
    "ClosedIterationError": "errors",
    "Collected": "compaction",
    "Committed": "writer",
    "Compacted": "compaction",
    "ConflictError": "errors",
    "DamagedError": "errors",
    "DiskFullError": "errors",
    "Finding": "verification",
    "Head": "commits",
    "Moment": "moment",
    "NewerSchemaError": "errors",
    "QueryError": "errors",
    "RowError": "errors",
    "StorageError": "errors",
    "Store": "store",
    "StoreNotFoundError": "errors",
    "StreamWriter": "writer",
    "SupersededError": "errors",
    "TABLES": "schemas",
    "collect": "compaction",
    "compact": "compaction",
    "Exported": "export",
    "event_id": "identity",
    "export_duckdb": "export",
    "hold_run": "liveness",
    "is_run_held": "liveness",
    "num_small_segments": "compaction",
    "open": "store",
    "require_whole": "verification",
    "sft_examples": "sft",
    "verify": "verification",
    "view_digests": "views",
}

__all__ = [
    "TABLES",
    "ArtifactStore",
    "ClosedIterationError",
    "Collected",
    "Committed",
    "Compacted",
    "ConflictError",
    "DamagedError",
    "DiskFullError",
    "Exported",
    "Finding",
    "Head",
    "Moment",
    "NewerSchemaError",
    "QueryError",
    "RowError",
    "StorageError",
    "Store",
    "StoreNotFoundError",
    "StreamWriter",
    "SupersededError",
    "collect",
    "compact",
    "console",
    "event_id",
    "export_duckdb",
    "hold_run",
    "is_run_held",
    "num_small_segments",
    "open",
    "require_whole",
    "sft_examples",
    "verify",
    "view_digests",
]


def __getattr__(name: str) -> Any:
    if name == "console":
        return import_module("storage.console")
    if name not in _HOMES:
        raise AttributeError(f"module `storage` has no attribute {name!r}")
    return getattr(
        import_module(f"storage.{_HOMES[name]}"), "open_store" if name == "open" else name
    )
