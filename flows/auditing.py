"""Audit: what each step learned from, derived again from the log and compared.

An iteration's pin names a commit and the texts of the views; buffer, picks, advantages, batches and
what became of old answers are functions of the log up to there, of the configuration and of the
seed. So they are derived once more and must be the same to the last bit; what is not is named.

Other code may decide otherwise. Where the views are not those pinned, or the code is not what wrote
the iteration, and buffer, plan or picks come out otherwise, this is said and no difference: they
are taken as stored, and what follows from them is derived all the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import storage
from flows.batching import replay_rows
from flows.config import RunConfig
from flows.lineage import lineage_of
from flows.machine import code_version
from flows.offline import Selection, select
from flows.offline import decide as decide_offline
from flows.planned import old_rows, picks_before_sampling
from flows.replaying import Pin, decide, value_version
from flows.retrying import old_rewards, retry_rows
from flows.reviewed import ReviewedGroup, distillation_rows, read_again, reviewed_groups
from flows.reviewing import UNREVIEWED_ARM, Source, asked_facts, gated
from flows.substituting import Past, Samples, samples_of, stored_samples
from flows.translate import Row, stored_prompt
from storage import Store

Reader = Callable[[str], list[dict[str, Any]]]
"""Reads the rows of a table that belong to an iteration, each table once."""


@dataclass(frozen=True)
class Difference:
    """Something that is not as derived: where, which column, what is stored, what was derived."""

    iteration: int
    what: str
    where: str
    stored: str
    derived: str

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration}, {self.what}, {self.where}: "
            f"stored {self.stored}, derived {self.derived}"
        )


@dataclass(frozen=True)
class Audited:
    """What an iteration planned and learned, and every difference that was found.

    `unlike` says what other code decided otherwise, which is no difference; "" where none did.
    """

    iteration: int
    num_picks: int
    num_planned: int
    num_learned: int
    differences: list[Difference]
    unlike: str


def audit(
    store: Store, run_id: str, config: RunConfig, iterations: Sequence[int] | None = None
) -> Iterator[Audited]:
    """Derive the iterations of a run again (None: all that learned) and compare.

    Raises:
        DamagedError: a commit or segment is missing or was changed; names it.
        StorageError: an iteration was never begun.
    """
    storage.require_whole(store)
    read = partial(store.read, "views_pinned", run_id=run_id)
    found = chain.from_iterable(read(iteration=i) for i in iterations) if iterations else read()
    pins = {row["iteration"]: row for row in found}
    selected = cache(partial(select, store, run_id, config))
    for iteration in iterations or sorted(i for i in pins if i > 0):
        if iteration not in pins:
            last = max((row["iteration"] for row in read()), default=0)
            raise storage.QueryError(
                f"expected an iteration that run {run_id} began, 1 to {last}; came {iteration}"
            )
        pin = pins[iteration]
        selection = selected(_judge(pin)) if config.run.mode == "offline" else None
        yield _audit_iteration(store, run_id, config, pin, selection)


def _audit_iteration(
    store: Store, run_id: str, config: RunConfig, pin: Row, selection: Selection | None
) -> Audited:
    iteration = pin["iteration"]
    read = cache(partial(store.read, run_id=run_id, iteration=iteration))
    replays, learned, policies = read("replays"), read("learned_samples"), read("policies")
    is_planned = bool(replays or policies or read("retries"))
    views, codes = list(_view_differences(pin)), _codes(store, run_id, pin, read)
    decisions: list[Difference] = []
    batch: Iterator[Difference] = iter(())
    if selection is not None:
        decisions = list(_offline_differences(config, iteration, selection, read))
    elif is_planned and iteration > lineage_of(store, run_id).first_iteration:
        samples, decisions = _decided(store, run_id, config, pin, read)
        if decisions and (views or codes):
            past = picks_before_sampling(store, run_id, iteration)
            old = old_rows(store, past, _judge(pin))
            samples = stored_samples(store, (run_id, iteration), _judge(pin), old)
        batch = _batch_differences(store, run_id, config, pin, samples, read)
    is_unlike = bool(codes and views) or bool((codes or views) and decisions)
    found = [
        *_pin_differences(store, pin),
        *([] if codes else views),
        *([] if is_unlike else decisions),
        *batch,
        *_learned_differences(iteration, replays, read("updates"), learned),
        *_untaken_differences(iteration, replays, read("updates"), policies),
    ]
    unlike = _unlike(views, codes) if is_unlike else ""
    return Audited(iteration, len(read("picks")), len(replays), len(learned), found, unlike)


def _pin_differences(store: Store, pin: Row) -> Iterator[Difference]:
    """Compare the pinned commit with the log."""
    commit = store.log.read(pin["as_of"])
    sha256 = "none" if commit is None else commit.sha256
    if sha256 != pin["as_of_sha256"]:
        where = f"commit {pin['as_of']}"
        yield Difference(pin["iteration"], "pin", where, pin["as_of_sha256"], sha256)


def _view_differences(pin: Row) -> Iterator[Difference]:
    """Compare the pinned views with those installed."""
    pinned: Mapping[str, str] = json.loads(pin["views_json"] or "{}")
    installed = storage.view_digests(*pinned)
    for name, digest in pinned.items():
        if installed.get(name) != digest:
            where = f"text of view {name}"
            yield Difference(pin["iteration"], "view", where, digest, installed.get(name, "none"))


def _codes(store: Store, run_id: str, pin: Row, read: Reader) -> list[str]:
    """Return the other versions of the code that wrote what an iteration decided."""
    epochs = {row["epoch"] for row in (pin, *read("replay_plans"), *read("replays"))}
    opened = [row for row in store.read("runs", run_id=run_id) if row["epoch"] in epochs]
    return sorted({row["code_version"] for row in opened} - {code_version()})


def _unlike(views: list[Difference], codes: list[str]) -> str:
    """Say why it is no difference that what was decided is derived otherwise than it is stored."""
    texts = "".join(f", with another {view.where}" for view in views)
    ours = code_version()
    return (
        f"written by code {', '.join(codes) or ours}, derived by {ours}{texts}: "
        "buffer, plan and picks are taken as they are stored"
    )


def _decided(
    store: Store, run_id: str, config: RunConfig, pin: Row, read: Reader
) -> tuple[Samples, list[Difference]]:
    """Derive what an iteration decided; return its samples, and what of plan and picks differs."""
    iteration, pinned, judge = pin["iteration"], Pin.of_row(pin), _judge(pin)
    past = Past(old_rows(store, picks_before_sampling(store, run_id, iteration), judge), None)
    if not (config.replay.units and pin["views_json"]):
        return samples_of(store, config, (run_id, iteration), judge, past), []
    found = []
    newest = value_version(store, run_id, pin["as_of"])
    if pinned.value_version != newest:
        found.append(Difference(iteration, "pin", "value model", pinned.value_version, newest))
    decided = decide(store, run_id, config, iteration, pinned)
    samples = samples_of(store, config, (run_id, iteration), judge, replace(past, decided=decided))
    picks = decided.picks + samples.substitutes
    found += _row_differences(iteration, "replay plan", read("replay_plans"), [decided.plan], ())
    found += _row_differences(iteration, "pick", read("picks"), picks, ("unit", "entry_id"))
    return samples, found


def _batch_differences(
    store: Store, run_id: str, config: RunConfig, pin: Row, samples: Samples, read: Reader
) -> Iterator[Difference]:
    """Derive the batch of an iteration, and what became of old answers, from its samples."""
    iteration, judge = pin["iteration"], _judge(pin)
    is_reviewing = config.review.gate is not None
    reviewed = reviewed_groups(store, run_id, iteration, judge) if is_reviewing else []
    derived = replay_rows(config, iteration, samples.scored, pin["views_json"] is None, reviewed)
    key = ("step", "rollout_id")
    yield from _row_differences(iteration, "replay", read("replays"), derived, key)
    if is_reviewing:
        yield from _review_differences(store, run_id, config, iteration, reviewed, read)
    if not pin["views_json"]:  # begun before old answers were compared
        return
    rewards = old_rewards(store, run_id, iteration, samples.old, judge)
    retries = retry_rows(iteration, samples, rewards)
    key = ("old_rollout_id", "new_rollout_id")
    yield from _row_differences(iteration, "retry", read("retries"), retries, key)


def _offline_differences(
    config: RunConfig, iteration: int, selection: Selection, read: Reader
) -> Iterator[Difference]:
    plans = read("replay_plans")
    if not plans:
        return
    derived = decide_offline(config, iteration, selection)
    yield from _row_differences(iteration, "replay plan", plans, [derived.plan], ())
    yield from _row_differences(
        iteration, "replay", read("replays"), derived.replays, ("step", "rollout_id")
    )


def _judge(pin: Row) -> tuple[str, str]:
    """Return name and version of the scorer whose value is the reward."""
    name, version = next(iter(json.loads(pin["scorer_versions_json"]).items()))
    return name, version


def _review_differences(
    store: Store,
    run_id: str,
    config: RunConfig,
    iteration: int,
    reviewed: Sequence[ReviewedGroup],
    read: Reader,
) -> Iterator[Difference]:
    """Read the reviews again, and choose again what of their answers is distilled."""
    chosen = distillation_rows(config, reviewed)
    key = ("rollout_id",)
    yield from _row_differences(iteration, "distillation", read("distillations"), chosen, key)
    reviews = read("reviews")
    yield from _asked_differences(store, run_id, config, iteration, read)
    derived = read_again(store, run_id, iteration, config.review.format)
    known = {row["rollout_id"] for row in derived}
    stored = [row for row in reviews if row["rollout_id"] in known]
    yield from _row_differences(iteration, "review", stored, derived, key)


def _asked_differences(
    store: Store, run_id: str, config: RunConfig, iteration: int, read: Reader
) -> Iterator[Difference]:
    """Choose again which attempts are reviewed, with what memory, and which control they get."""
    [pin] = read("views_pinned")
    rows = store.read("prompts", run_id=run_id)
    prompts = {row["prompt_id"]: stored_prompt(row) for row in rows}
    chosen = gated(Source(store, run_id, config, _judge(pin), prompts), iteration)
    of_attempt = {one.attempt["event_id"]: one for one in chosen}
    rollouts = read("rollouts")
    asked = {r["parent_id"] for r in rollouts if r["role"] == "review"}
    for attempt_id in sorted(asked ^ of_attempt.keys()):
        told = ("reviewed", "not reviewed")
        is_asked = attempt_id in asked
        yield Difference(iteration, "gate", attempt_id, told[not is_asked], told[is_asked])
    role = {r["event_id"]: r["role"] for r in rollouts}
    treated = [r for r in read("reviews") if role[r["rollout_id"]] == "review"]
    derived = [
        {"rollout_id": row["rollout_id"]} | asked_facts(of_attempt[row["attempt_id"]])
        for row in treated
        if row["attempt_id"] in of_attempt
    ]
    yield from _row_differences(iteration, "review", treated, derived, ("rollout_id",))
    arms = {one.prompt.prompt_id: one.arm for one in chosen}
    for rollout in rollouts:
        if rollout["role"] == "control" and rollout["arm"] != UNREVIEWED_ARM:
            arm = arms.get(rollout["prompt_id"])
            if arm != rollout["arm"]:
                where = rollout["event_id"]
                yield Difference(iteration, "control", where, rollout["arm"], str(arm))


def _learned_differences(
    iteration: int, replays: list[Row], updates: list[Row], learned: list[Row]
) -> Iterator[Difference]:
    """Compare what was planned into each step that was taken with what it says it learned from."""
    planned: dict[int, set[str]] = {}
    batches: dict[int, str] = {}
    for row in replays:
        planned.setdefault(row["step"], set()).add(row["rollout_id"])
        batches[row["step"]] = row["batch_id"]
    for update in updates:
        step = update["step"]
        if update["batch_id"] != batches.get(step):
            yield Difference(
                iteration, "update", f"batch of step {step}", update["batch_id"],
                batches.get(step, "none"),
            )  # fmt: skip
        entered = {row["rollout_id"] for row in learned if row["step"] == step}
        for rollout_id in sorted(entered ^ planned.get(step, set())):
            is_learned = rollout_id in entered
            yield Difference(
                iteration, "learned sample", f"{rollout_id} in step {step}",
                "learned" if is_learned else "not learned",
                "not planned" if is_learned else "planned",
            )  # fmt: skip


def _untaken_differences(
    iteration: int, replays: list[Row], updates: list[Row], policies: list[Row]
) -> Iterator[Difference]:
    """Name the planned steps of an iteration that published a policy without taking them."""
    taken = {row["step"] for row in updates}
    for step in sorted({row["step"] for row in replays} - taken if policies else ()):
        yield Difference(iteration, "update", f"step {step}", "not taken", "planned")


def _row_differences(
    iteration: int, what: str, stored: list[Row], derived: list[Row], key: tuple[str, ...]
) -> Iterator[Difference]:
    """Compare rows by their key, column by column; a derived row names every column it has."""

    def by_key(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
        return {tuple(row[name] for name in key): row for row in rows}

    old, new = by_key(stored), by_key(derived)
    for place in sorted(old.keys() | new.keys()):
        where = " ".join(map(str, place)) or "row"
        if place not in old or place not in new:
            present = ("present", "absent")
            yield Difference(
                iteration, what, where, present[place not in old], present[place not in new]
            )
            continue
        for name, value in new[place].items():
            if old[place][name] != value:
                yield Difference(
                    iteration, what, f"{where}, {name}", repr(old[place][name]), repr(value)
                )


def step_samples(store: Store, run_id: str, iteration: int) -> list[Row]:
    """Return every sample of an iteration's steps: where it is from, and what it was chosen under.

    Facts are read by place and by id, never by a scan, so it is as quick in a long history.
    """
    read = partial(store.read, run_id=run_id, iteration=iteration, check_hashes=False)
    replays = sorted(read("replays"), key=lambda row: (row["step"], row["position"]))
    rollouts = {row["event_id"]: row for row in read("rollouts")}
    scores = {row["event_id"]: row for row in read("scores")}
    picks = {row["event_id"]: row for row in read("picks")}
    learned = {(row["step"], row["rollout_id"]): row for row in read("learned_samples")}
    targets = {row["event_id"]: rollouts[row["rollout_id"]] for row in read("distillations")}
    rollouts |= targets  # a distilled sample is the second attempt it was made of
    taken = {row["step"] for row in read("updates") if not row["is_skipped"]}
    rollouts |= _by_id(store, "rollouts", {r["rollout_id"] for r in replays} - rollouts.keys())
    scores |= _by_id(store, "scores", {r["score_id"] for r in replays} - scores.keys())
    samples = []
    for row in replays:
        rollout, pick = rollouts[row["rollout_id"]], picks.get(row["pick_id"])
        stats = learned.get((row["step"], row["rollout_id"]), {})
        samples.append(
            row
            | {
                "state": "learned" if row["step"] in taken else "planned",
                "role": rollout["role"],
                "prompt_id": rollout["prompt_id"],
                "sampled_iteration": rollout["iteration"],
                "policy_version": rollout["policy_version"],
                "scorer": scores[row["score_id"]]["scorer"],
                "scorer_version": scores[row["score_id"]]["scorer_version"],
                "value": None if pick is None else pick["value"],
                "chosen_under": None if pick is None else pick["scorer_version"],
                "importance_mean": stats.get("importance_mean"),
                "num_loss_tokens": stats.get("num_loss_tokens"),
                "text": rollout["completion"],
            }
        )
    return samples


def _by_id(store: Store, table: str, event_ids: set[str]) -> dict[str, Row]:
    if not event_ids:
        return {}
    rows = store.read(table, event_ids=event_ids, check_hashes=False)
    return {row["event_id"]: row for row in rows}
