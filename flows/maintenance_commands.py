"""What keeps a store small and quick: `rrl compact`."""

import json
from dataclasses import asdict
from pathlib import Path

import storage
from flows.cli import print_result
from flows.progress import Progress


def compact(run_id: str | None, grace_s: float, store_path: Path, as_json: bool) -> None:
    """Merge small segments, then condemn what is left over and delete what was condemned before."""
    store = storage.open(store_path)
    done = []
    with Progress() as progress, progress.status("merging small segments"):
        for merger in storage.compact(store, run_id):
            done.append(merger)
            progress.note(
                f"{merger.run_id} · {merger.table}: {merger.num_before} segments, {merger.rows} "
                f"rows, {merger.bytes_before / 1e6:.2f} to {merger.bytes_after / 1e6:.2f} MB"
            )
    collected = storage.collect(store, grace_s=grace_s)
    head = store.head()
    if as_json:
        facts = {"mergers": [asdict(m) for m in done], "collected": asdict(collected)}
        print_result(json.dumps(facts | {"head": {"number": head.number, "sha256": head.sha256}}))
        return
    num_live = len(store.log.refresh().segments)
    print_result(
        f"{store.path}: {sum(m.num_before for m in done)} segments became {len(done)}, "
        f"{num_live} are live\n"
        f"{collected.num_condemned} files condemned, {collected.num_deleted} deleted "
        f"({collected.deleted_bytes / 1e6:.2f} MB); what is condemned is deleted by a later call, "
        f"{grace_s:g} s from now at the earliest\n"
        f"head {head.number}:{head.sha256}"
    )
