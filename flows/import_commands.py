"""What `rrl import` does: import, and say what came of it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import storage
from flows.cli import EXIT_INTERRUPTED, print_result
from flows.progress import Progress
from storage import Store
from storage.answers import printable

if TYPE_CHECKING:
    from flows.importing import ImportRequest, ImportSummary


def import_(request: "ImportRequest", store_path: Path, as_json: bool) -> None:
    """Import a file or folder; print the summary, and after Ctrl-C how to go on."""
    from flows.importing import check_request, import_rollouts

    check_request(request)  # before a store is created for nothing
    store = storage.open(store_path, create=True)
    with Progress() as progress:
        summary = import_rollouts(store, request, progress)
    is_interrupted = summary.ended == "interrupted"
    command = import_command(asdict(request), store_path)
    if as_json:
        facts = {"store": str(store.path), **asdict(summary)}
        print_result(json.dumps(facts | ({"resume": command} if is_interrupted else {})))
    else:
        print_result("\n".join(map(printable, _lines(store, summary))))
    if is_interrupted:
        if not as_json:
            print_result(f"nothing is lost; go on with:\n  {command}")
        raise SystemExit(EXIT_INTERRUPTED)


def import_command(asked: Mapping[str, Any], store_path: Path) -> str:
    """Return the command line of a request, given by the fields of `ImportRequest`."""
    command = ["rrl", "import", asked["format"], str(asked["path"])]
    for name in ("name", "task", "split", "temperature", "model", "dtype"):
        if asked[name] is not None:
            command += [f"--{name}", str(asked[name])]
    if asked["follow_s"] is not None:
        command += ["--follow", "--every-s", str(asked["follow_s"])]
    return shlex.join([*command, "--store", str(store_path)])


def _lines(store: Store, summary: "ImportSummary") -> list[str]:
    lines = [f"store {store.path}"]
    before = f"{summary.num_lines_before:,} lines were imported before"
    if summary.ended == "nothing to do":
        return [*lines, f"{summary.stream_id}: 0 rollouts added, nothing was written; {before}"]
    lines.append(
        f"{summary.stream_id} {summary.ended}: {summary.num_rollouts:,} rollouts from "
        f"{summary.num_lines:,} lines of {summary.num_files:,} files, {summary.elapsed_s:.1f} s; "
        f"{before}"
    )
    lines.append(
        f"{summary.num_scores:,} scores; {summary.num_token_rollouts:,} rollouts with token ids "
        f"and log-probs, the others are text; {summary.num_guessed_groups:,} groups are guessed"
    )
    if summary.num_failures:
        lines.append(f"warning: {summary.num_failures:,} lines were left out:")
        lines += [f"  {problem}" for problem in summary.problems]
    return lines
