"""States of history are judged by a value model: cut once, judged once per version."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from flows.cli import main
from flows.translate import value_row
from flows.wiring import model_spec, opened_row
from rrl_core.policy.model import Policy, load_policy_model
from rrl_core.value.cuts import cut_points
from rrl_core.value.features import StateSequence, backbone_digest, state_features
from rrl_core.value.model import ValueModel, ValueModelError
from tests.flows.conftest import smoke_config
from tests.flows.histories import prompt_row, rescore_here, write_history
from tests.storage.conftest import memory_path  # noqa: F401 - a fixture
from tests.storage.rows import OPENED, rollout, tokens

WIDTH = 64  # of the tiny model
TOLERANCE = 1e-6  # a state's features depend on what it is packed with, up to rounding
RUN_ID = "trained"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy_model(model_spec(smoke_config()), seed=0)


@pytest.fixture
def store(memory_path: Path) -> storage.Store:  # noqa: F811
    return storage.open(memory_path / "store", create=True)


def make_model(policy: Policy, seed: int) -> ValueModel:
    draw = np.random.default_rng(seed)
    weights = draw.normal(0, 0.3, (2, WIDTH))
    return ValueModel(weights, draw.normal(0, 0.3, 2), backbone_digest(policy))


def write_run(store: storage.Store, num: int, **facts: Any) -> list[str]:
    opened = opened_row(smoke_config(), "digest") | {"kind": "train"}
    return write_history(store, num, RUN_ID, **opened | facts)


def publish(
    store: storage.Store, model: ValueModel, version: str, run_id: str = RUN_ID, **facts: Any
) -> str:
    """Append a value model as a refit would; return its artifact."""
    artifact = store.artifacts.put(model.to_bytes(), "value_model")
    row = {
        "iteration": 900 + int(version[1:]), "scorer": "value", "scorer_version": version,
        "as_of": 1, "artifact": artifact, "backbone_digest": model.backbone_digest,
        "num_states": 10, "num_prompts": 5, "num_mixed_prompts": 2, "mean_target": 0.5,
        "verdict": "healthy", "metrics_json": "{}", "fit_s": 0.1,
    }  # fmt: skip
    opened = store.read("runs", run_id=run_id)[0]
    kept = {k: opened[k] for k in (*OPENED, "kind", "parent_run_id")}
    store.open_stream(run_id, kept).append({"value_models": [row | facts]}, f"model-{version}")
    return artifact


def expected_values(
    store: storage.Store, policy: Policy, model: ValueModel
) -> dict[tuple[str, int], float]:
    """V by (rollout, prefix), each state run by itself."""
    found = {}
    prompts = {row["event_id"]: row["prompt_id"] for row in store.read("rollouts")}
    for row in store.read("rollout_tokens"):
        cuts = cut_points(
            row["completion_ids"], policy.decode, 4, turn_token_ids=policy.eos_token_ids
        )
        for prefix in (0, *(cut.prefix_tokens for cut in cuts)):
            ids = tuple(row["prompt_ids"]), tuple(row["completion_ids"]), (prefix,)
            features = state_features(policy, [StateSequence(*ids)], 512)
            [value] = model.predict(features, [prompts[row["rollout_id"]]])
            found[row["rollout_id"], prefix] = float(value)
    return found


def judged(store: storage.Store, version: str) -> dict[tuple[str, int], float]:
    """The values of a version by (rollout, prefix); no state may have two verdicts."""
    states = {row["event_id"]: row for row in store.read("states")}
    found = [row for row in store.read("scores") if row["scorer_version"] == version]
    assert len({row["target_id"] for row in found}) == len(found)
    rows = [row for row in found if row["status"] != "unscorable"]
    assert {(r["scorer"], r["kind"], r["target_kind"], r["status"]) for r in rows} == {
        ("value", "value", "state", "ok")
    }
    targets = [(states[row["target_id"]], row["value"]) for row in rows]
    return {(s["rollout_id"], s["prefix_tokens"]): value for s, value in targets}


def state_of(rollout_id: str, run_id: str, prefix: int) -> dict[str, Any]:
    return {
        "iteration": 1, "rollout_id": rollout_id, "prefix_tokens": prefix, "cut": "line",
        "source_run_id": run_id, "prompt_id": "p00000", "prefix_sha256": f"{prefix}",
    }  # fmt: skip


def test_every_response_is_cut_and_every_state_judged_once(store: storage.Store, policy: Policy):
    ids = write_run(store, 32)  # 8 prompts of 4 responses, in shards of 6
    model = make_model(policy, 1)
    publish(store, model, "v1")
    done = rescore_here(store, "value", shard_rollouts=6)
    expected = expected_values(store, policy, model)
    first = {event_id for n, event_id in enumerate(ids) if n % 4 == 0}
    wanted = {key for key in expected if key[1] > 0 or key[0] in first}
    found = judged(store, "v1")
    assert found.keys() == wanted
    assert found == pytest.approx({key: expected[key] for key in wanted}, abs=TOLERANCE)
    states = store.read("states", run_id=done.stream_id)
    assert Counter(s["cut"] for s in states) == {"prompt": 8, "line": 64}
    assert {s["source_run_id"] for s in states} == {RUN_ID}
    assert (done.num_states, done.scores) == (len(states), {"ok": len(states)})
    assert not storage.verify(store, deep=True)


def test_a_second_time_nothing_is_cut_or_judged(store: storage.Store, policy: Policy):
    write_run(store, 16)
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value", shard_rollouts=6)
    head = store.head()
    again = rescore_here(store, "value", shard_rollouts=5)
    assert (again.ended, again.num_judged_before, store.head()) == ("nothing to do", 16, head)


def test_a_newer_model_judges_the_same_states_and_old_scores_stay(
    store: storage.Store, policy: Policy
):
    write_run(store, 16)
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value", shard_rollouts=6)
    before, states = judged(store, "v1"), store.read("states")
    publish(store, make_model(policy, 2), "v2")
    done = rescore_here(store, "value", shard_rollouts=6)
    assert (done.scorer_version, done.num_states) == ("v2", 0)
    assert store.read("states") == states
    assert judged(store, "v1") == before
    after = judged(store, "v2")
    assert after.keys() == before.keys()
    assert after != before
    assert rescore_here(store, "value:v1").ended == "nothing to do"


def test_a_prompt_known_from_elsewhere_is_judged_by_its_first_state(
    store: storage.Store, policy: Policy
):
    ids = write_run(store, 8)
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value", where="iteration = 0 and sample_index = 0")
    prompts = {s["prompt_id"]: s for s in store.read("states") if s["prefix_tokens"] == 0}
    publish(store, make_model(policy, 2), "v2")
    # The responses that were cut are left out; their prompts' states are judged all the same.
    done = rescore_here(store, "value", where="sample_index <> 0")
    assert {s["cut"] for s in store.read("states", run_id=done.stream_id)} == {"line"}
    found = judged(store, "v2")
    assert {key for key in found if key[1] == 0} == {
        (prompts[p]["rollout_id"], 0) for p in ("p00000", "p00001")
    }
    rescore_here(store, "value")
    assert {rollout_id for rollout_id, _ in judged(store, "v2")} == set(ids)


def test_a_prompt_whose_state_comes_later_in_the_slice_is_judged_once(
    store: storage.Store, policy: Policy
):
    ids = write_run(store, 4)  # of one prompt
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value", where="sample_index = 2")
    publish(store, make_model(policy, 2), "v2")
    rescore_here(store, "value", shard_rollouts=1)
    assert [key for key in judged(store, "v2") if key[1] == 0] == [(ids[2], 0)]


def test_runs_that_share_a_prompt_have_every_state_of_it_judged(
    store: storage.Store, policy: Policy
):
    firsts = {run: write_history(store, 4, run)[0] for run in ("early", "late")}
    write_run(store, 0)
    publish(store, make_model(policy, 1), "v1")
    for run, rollout_id in firsts.items():  # as training cuts them: the prompt once in each run
        writer, state = store.open_stream(run, OPENED), state_of(rollout_id, run, 0)
        writer.append({"states": [state]}, "states")
    row = value_row(1, writer.event_id_of("states", state), "v1", 0.5)
    writer.append({"scores": [row]}, "values")  # the later run judged its own
    rescore_here(store, "value", shard_rollouts=3)
    assert {key for key in judged(store, "v1") if key[1] == 0} == {(i, 0) for i in firsts.values()}
    assert len(store.read("states")) == len(store.read("scores"))
    assert rescore_here(store, "value").ended == "nothing to do"


def test_a_response_too_short_to_cut_is_known_by_the_state_of_its_prompt(
    store: storage.Store, policy: Policy
):
    write_run(store, 1)
    writer = store.open_stream("terse", OPENED)
    rows = [rollout("p00000", i, completion="7") for i in range(3)]
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    short = [tokens(i, prompt_ids=[65], completion_ids=[55]) for i in ids]
    writer.append({"rollouts": rows, "rollout_tokens": short, "prompts": [prompt_row(0)]}, "b")
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value:v1", run_id="terse", shard_rollouts=2)
    assert judged(store, "v1").keys() == {(i, 0) for i in ids}
    assert rescore_here(store, "value:v1", run_id="terse").ended == "nothing to do"


def test_an_unfinished_stream_keeps_its_model_although_a_newer_one_came(
    store: storage.Store, policy: Policy, monkeypatch: pytest.MonkeyPatch
):
    write_run(store, 16)
    publish(store, make_model(policy, 1), "v1")
    predict, calls = ValueModel.predict, []

    def fail_later(self: ValueModel, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("the machine is full")
        return predict(self, *arguments)

    monkeypatch.setattr(ValueModel, "predict", fail_later)
    with pytest.raises(MemoryError):
        rescore_here(store, "value", shard_rollouts=4)
    monkeypatch.undo()
    publish(store, make_model(policy, 2), "v2")
    done = rescore_here(store, "value", shard_rollouts=4)
    assert (done.scorer_version, done.num_shards_before, done.num_shards_judged) == ("v1", 2, 2)
    what = [row["what"] for row in store.read("runs", run_id=done.stream_id)]
    assert what == ["opened", "failed", "opened", "finished"]
    assert rescore_here(store, "value", shard_rollouts=4).scorer_version == "v2"


def test_what_the_backbone_cannot_read_is_skipped_with_its_reason(
    store: storage.Store, policy: Policy
):
    write_run(store, 4)
    writer = store.open_stream("imported", OPENED)
    rows = [
        rollout("p0", 0),
        rollout("p0", 1),
        rollout("p0", 2),
        rollout("p0", 3, role="evaluation"),
        rollout("p0", 4),
    ]
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    context = policy.context_tokens
    writer.append(
        {
            "rollouts": rows,
            "rollout_tokens": [
                tokens(ids[1], completion_ids=[300, 1]),  # the tiny model knows 259 ids
                tokens(ids[2], prompt_ids=[1] * (context + 1)),
                tokens(ids[3]),
                tokens(ids[4], prompt_ids=[]),
            ],
        },
        "b",
    )
    publish(store, make_model(policy, 1), "v1")
    done = rescore_here(store, "value")
    assert done.skipped == {
        "no token ids are stored": 1,
        "its token ids are not those of the base model": 1,
        "its prompt fills the model's context": 1,
        "only attempts, retries and imported responses are cut into states": 1,
        "the token ids of its prompt are not stored": 1,
    }
    assert len({rollout_id for rollout_id, _ in judged(store, "v1")}) == 4
    verdicts = [row for row in store.read("scores") if row["status"] == "unscorable"]
    assert {row["feedback"] for row in verdicts} == {
        "its token ids are not those of the base model",
        "its prompt fills the model's context",
        "the token ids of its prompt are not stored",
    }
    assert [row["value"] for row in verdicts] == [None, None, None]
    again = rescore_here(store, "value")
    assert (again.ended, again.scores) == ("nothing to do", {})
    assert not storage.verify(store, deep=True)


def test_a_state_that_became_too_long_is_judged_once_and_never_again(
    store: storage.Store, policy: Policy
):
    [event_id] = write_run(store, 1)
    row = rollout("p00000", 5)
    writer = store.open_stream("long", OPENED)
    long_id = writer.event_id_of("rollouts", row)
    context = policy.context_tokens
    states = [state_of(long_id, "long", prefix) for prefix in (1, context)]
    ids = tokens(long_id, prompt_ids=[65] * 9, completion_ids=[66] * (context + 9))
    writer.append({"rollouts": [row], "rollout_tokens": [ids], "states": states}, "b")
    publish(store, make_model(policy, 1), "v1")
    done = rescore_here(store, "value")
    assert done.skipped == {"a state is longer than the model's context": 1}
    assert (long_id, 1) in judged(store, "v1")
    assert (event_id, 0) in judged(store, "v1")
    assert rescore_here(store, "value").ended == "nothing to do"


def test_a_prompt_first_met_in_what_nobody_can_read_is_judged_by_a_later_response(
    store: storage.Store, policy: Policy
):
    writer = store.open_stream("odd", OPENED)
    row = rollout("p00000", 7)
    odd_id = writer.event_id_of("rollouts", row)
    writer.append(
        {"rollouts": [row], "rollout_tokens": [tokens(odd_id, completion_ids=[300, 1])]}, "b"
    )
    first = write_run(store, 2)[0]
    publish(store, make_model(policy, 1), "v1")
    rescore_here(store, "value:v1", run_id="odd")
    assert {row["status"] for row in store.read("scores")} == {"unscorable"}
    rescore_here(store, "value")
    assert (first, 0) in judged(store, "v1")


@pytest.mark.parametrize("iteration", [0, 3])  # a fork publishes none in iteration 0
def test_runs_of_another_base_model_are_skipped_and_share_no_prompt_with_the_others(
    store: storage.Store, policy: Policy, iteration: int
):
    other = {"policy_version": 0, "iteration": iteration, "adapter_digest": "", "policy_digest": "",
             "adapter_artifact": "a"}  # fmt: skip
    write_history(store, 4, "other")
    row = other | {"base_digest": "of another model"}
    store.open_stream("other", OPENED).append({"policies": [row]}, "p")
    ids = write_run(store, 4)  # the same prompt, met later
    row = other | {"base_digest": policy.base_digest}
    opened = {k: store.read("runs", run_id=RUN_ID)[0][k] for k in (*OPENED, "kind")}
    store.open_stream(RUN_ID, opened).append({"policies": [row]}, "p")
    publish(store, make_model(policy, 1), "v1")
    done = rescore_here(store, "value")
    assert done.skipped == {"its run has another base model, or names none": 4}
    found = judged(store, "v1")
    assert (ids[0], 0) in found
    assert {rollout_id for rollout_id, _ in found} == set(ids)


def test_a_model_fitted_by_a_refit_stream_is_found_by_its_run(store: storage.Store, policy: Policy):
    write_run(store, 4)
    store.open_stream("refit-1", OPENED | {"kind": "refit", "parent_run_id": RUN_ID})
    publish(store, make_model(policy, 1), "v1")
    publish(store, make_model(policy, 2), "v2", "refit-1")
    assert rescore_here(store, "value", run_id=RUN_ID).scorer_version == "v2"


def test_an_unhealthy_model_is_allowed_with_a_notice(
    store: storage.Store,
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_run(store, 4)
    publish(store, make_model(policy, 1), "v1", verdict="insufficient_data")
    command = ["rrl", "rescore", "--scorer", "value", "--store", str(store.path), "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr()
    assert end.value.code == 0
    assert "v1 is insufficient_data" in output.err
    assert "v1 is insufficient_data" in json.loads(output.out)["notices"][0]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (Path.unlink, storage.StorageError, "artifact `value_model-"),
        (lambda p: p.write_bytes(b"x"), storage.DamagedError, "was changed"),
    ],
)
def test_a_model_without_its_artifact_is_refused_and_nothing_is_written(
    spoil: Callable[[Path], Any],
    error: type[Exception],
    message: str,
    store: storage.Store,
    policy: Policy,
):
    write_run(store, 4)
    publish(store, make_model(policy, 1), "v1")
    [path] = [p for p in (store.path / "artifacts").rglob("*") if p.is_file()]
    path.chmod(0o644)
    spoil(path)
    head = store.head()
    with pytest.raises(error, match=message):
        rescore_here(store, "value")
    assert store.head() == head


def test_a_model_of_another_backbone_is_refused(store: storage.Store, policy: Policy):
    write_run(store, 4)
    model = make_model(policy, 1)
    publish(store, ValueModel(model.weights_KD, model.bias_K, "elsewhere"), "v1")
    with pytest.raises(ValueModelError, match="elsewhere"):
        rescore_here(store, "value")
