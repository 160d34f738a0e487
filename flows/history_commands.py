"""What looks at history by today's standard: `rrl audit` and `rrl materialize`."""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import storage
from flows.auditing import Audited, audit, step_samples
from flows.cli import EXIT_FAILED, EXIT_UNCHECKED, print_result
from flows.materializing import SHOWN, Change, Moment, compare_moments, materialize
from flows.progress import Progress
from flows.replaying import NO_MODEL, value_version
from flows.wiring import stored_config
from storage import Store
from storage.answers import printable, table_text

_SAMPLE_COLUMNS = (
    "step", "position", "state", "unit", "rollout_id", "source_run_id", "sampled_iteration",
    "policy_version", "age", "reward", "scorer_version", "value", "chosen_under", "advantage",
    "priority", "probability", "pick_kind", "text",
)  # fmt: skip
_TEXT_CHARACTERS = 60


@dataclass(frozen=True)
class MaterializeRequest:
    """What the command line asked for."""

    run_id: str
    as_of: int | None
    version: str | None
    diff: bool
    limit: int


def run_audit(run_id: str, iteration: int | None, store_path: Path, as_json: bool) -> None:
    """Derive a run's steps again; list the samples of one.

    Exits with 1 when something differs, else with 5 when other code decided otherwise.
    """
    store = storage.open(store_path)
    config = stored_config(store, run_id)
    done: list[Audited] = []
    iterations = None if iteration is None else [iteration]
    with Progress() as progress:
        for audited in audit(store, run_id, config, iterations):
            done.append(audited)
            progress.note(_audited_line(audited))
    samples = [] if iteration is None else step_samples(store, run_id, iteration)
    differences = [d for audited in done for d in audited.differences]
    unlike = [f"iteration {a.iteration}: {a.unlike}" for a in done if a.unlike]
    if as_json:
        facts = {"iterations": [asdict(a) for a in done], "samples": samples}
        print_result(json.dumps(facts, default=_plain))
    else:
        if samples:
            print_result(_table(_SAMPLE_COLUMNS, [_with_text(row) for row in samples]))
        for difference in differences:
            print_result(printable(str(difference)))
        for line in unlike:
            print_result(printable(line))
        verdict = f"{len(differences)} differences" if differences else "everything as derived"
        if unlike:
            verdict += f", but what other code decided in {len(unlike)} iterations"
        print_result(f"{store.path}: {run_id}, {len(done)} iterations: {verdict}")
    if differences or unlike:
        sys.exit(EXIT_FAILED if differences else EXIT_UNCHECKED)


def run_replay_step(run_id: str, iteration: int, store_path: Path, as_json: bool) -> None:
    """Take an iteration's steps again; exit 1 when a loss or the adapter is another one."""
    from flows.stepping import retake

    store = storage.open(store_path)
    with Progress() as progress:
        retaken = retake(store, run_id, stored_config(store, run_id), iteration, progress)
    if as_json:
        print_result(json.dumps(asdict(retaken) | {"is_same": retaken.is_same}))
    else:
        for step in retaken.steps:
            print_result(
                f"step {step.step}: {step.num_samples} samples, loss {step.recorded_loss:.9g} "
                f"recorded, {step.loss:.9g} now"
            )
        print_result(
            f"adapter {retaken.recorded_digest[:16]} recorded, {retaken.digest[:16]} now: "
            + ("the same" if retaken.is_same else "NOT THE SAME")
        )
    if not retaken.is_same:
        sys.exit(EXIT_FAILED)


def run_materialize(request: MaterializeRequest, store_path: Path, as_json: bool) -> None:
    """Print the entries a run may replay, or what another moment or judge changes about them."""
    store = storage.open(store_path)
    storage.require_whole(store)
    config = stored_config(store, request.run_id)
    as_of = store.number(request.as_of)
    now = Moment(as_of, _known_version(store, request, as_of))
    if request.diff:
        head = store.head().number
        today = Moment(head, value_version(store, request.run_id, head))
        changes = compare_moments(store, request.run_id, config, now, today)
        _print_changes(changes, request.limit, as_json)
        return
    found = materialize(store, request.run_id, config, now, request.limit)
    reasons = {f"{unit}: {reason}": n for (unit, reason), n in sorted(found.reasons.items())}
    if as_json:
        facts = {"as_of": now.as_of, "version": now.version, "reasons": reasons}
        print_result(json.dumps(facts | {"entries": found.best}, default=_plain))
        return
    print_result(f"store {store.path} · run {request.run_id} · as of {now.as_of}")
    if found.best:
        print_result(_table(SHOWN, found.best))
    else:
        print_result("nothing eligible")
    print_result("\n".join(f"{number:>9,}  {reason}" for reason, number in reasons.items()))


def _known_version(store: Store, request: MaterializeRequest, as_of: int) -> str:
    """Return the version asked for, or what the run judged by; refuse one that no model has."""
    if request.version is None:
        return value_version(store, request.run_id, as_of)
    if request.version == NO_MODEL:
        return request.version
    versions = [row["scorer_version"] for row in store.read("value_models")]
    if request.version not in versions:
        raise storage.QueryError(
            f"--scorer {request.version}: expected `none` or a value model's version; there are "
            f"{', '.join(versions) or 'none in this store: fit one with `value.every`'}"
        )
    return request.version


def _print_changes(changes: list[Change], limit: int, as_json: bool) -> None:
    if as_json:
        print_result(json.dumps([asdict(change) for change in changes[:limit]], default=_plain))
        return
    rows = []
    for change in changes[:limit]:
        row = change.after or change.before
        assert row is not None
        rows.append(
            {"change": change.kind, "rise": change.rise, "unit": row["unit"],
             "entry_id": row["entry_id"], "prompt_id": row["prompt_id"], "why": change.why}
        )  # fmt: skip
    if rows:
        print_result(_table(tuple(rows[0]), rows))
    print_result(
        f"{len(changes)} entries changed" + (f", {limit} shown" if len(changes) > limit else "")
    )


def _audited_line(audited: Audited) -> str:
    verdict = f"{len(audited.differences)} DIFFERENCES" if audited.differences else "as derived"
    verdict += ", decided by other code" if audited.unlike else ""
    return (
        f"iteration {audited.iteration}: {audited.num_picks} picks, {audited.num_planned} planned, "
        f"{audited.num_learned} learned, {verdict}"
    )


def _with_text(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"text": " ".join((row["text"] or "").split())[:_TEXT_CHARACTERS]}


def _table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    return table_text(columns, [tuple(row[c] for c in columns) for row in rows]).rstrip()


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
