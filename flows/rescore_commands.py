"""What `rrl rescore` does: judge history again, and say what came of it."""

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
    from flows.rescoring import RescoreRequest, RescoreSummary


def rescore(request: "RescoreRequest", store_path: Path, as_json: bool) -> None:
    """Judge a slice of history; print the summary, and after Ctrl-C how to go on."""
    from flows.rescoring import rescore as rescore_history

    store = storage.open(store_path)
    with Progress() as progress:
        summary = rescore_history(store, request, progress)
    is_interrupted = summary.ended == "interrupted"
    command = rescore_command(asdict(request), store_path)
    if as_json:
        facts: dict[str, Any] = {"store": str(store.path), **asdict(summary)}
        print_result(json.dumps(facts | ({"resume": command} if is_interrupted else {})))
    else:
        print_result("\n".join(map(printable, _lines(store, summary))))
    if is_interrupted:
        if not as_json:
            print_result(f"nothing is lost; go on with:\n  {command}")
        raise SystemExit(EXIT_INTERRUPTED)


def rescore_command(request: Mapping[str, Any], store_path: Path) -> str:
    """Return the command line of a request, given by the fields of `RescoreRequest`."""
    options = ("where", "run_id", "as_of", "shard_rollouts")
    command = ["rrl", "rescore", "--scorer", request["scorer"]]
    for name in options:
        if request[name] is not None:
            option = "run" if name == "run_id" else name.replace("_", "-")
            command += [f"--{option}", str(request[name])]
    for setting in request.get("settings", ()):
        command += ["--set", setting]
    return shlex.join([*command, "--store", str(store_path)])


def _lines(store: Store, summary: "RescoreSummary") -> list[str]:
    judge = f"{summary.scorer} (version {summary.scorer_version})"
    lines = [f"store {store.path}, as of commit {summary.as_of}"]
    if summary.num_rollouts == 0:
        return [*lines, "the slice holds no rollout: nothing to judge, nothing was written"]
    before = f"{summary.num_judged_before:,} were judged before by {judge}"
    lines.append(f"{summary.num_rollouts:,} rollouts in the slice, {before}")
    if summary.ended == "nothing to do":
        lines.append("0 scores added: nothing is missing, nothing was written")
    else:
        shards = summary.num_shards_before + summary.num_shards_judged
        lines.append(
            f"{summary.stream_id} {summary.ended}: {shards} of {summary.num_shards} shards, "
            f"{summary.num_shards_before} of them before, {summary.elapsed_s:.1f} s"
        )
        statuses = ", ".join(f"{n:,} {status}" for status, n in sorted(summary.scores.items()))
        lines.append(f"{sum(summary.scores.values()):,} scores added: {statuses or 'none'}")
    if summary.num_states:
        lines.append(f"{summary.num_states:,} states cut")
    lines += [
        f"{number:,} rollouts skipped: {why}" for why, number in sorted(summary.skipped.items())
    ]
    return lines
