"""What of an import a run may replay: the view itself refuses what no correction holds for."""

import json
from typing import Any

import pytest

import storage
from tests.storage.replay_rows import Run, policy
from tests.storage.rows import rollout, score, tokens

TOLD = json.dumps({"replay": {"imports": ["outside"]}})
NO_LOGPROBS = {"sampler_logprobs": None, "logprobs_reason": "the file has none"}


@pytest.fixture
def run(store: storage.Store) -> Run:
    """A run that failed p1 four times: p_hat is 0.5 / 6."""
    return begun(store, "r1", TOLD)


def begun(store: storage.Store, run_id: str, config_json: str) -> Run:
    started = Run(store, run_id, "train", config_json=config_json)
    started.append(policies=[policy(0), policy(1)])
    started.pin(1)
    started.sample([0.0] * 4)
    return started


def import_success(
    store: storage.Store, index: int, held: dict[str, Any] | None, base: str = "b0", **facts: Any
) -> str:
    """An imported response that a rescoring found right; `held` None is text alone."""
    outside = Run(store, "outside", "import")
    given = {"role": "imported", "policy_version": 70, "seed": -1, "top_k": -1, "top_p": -1.0}
    row = rollout("p1", index, index) | given | facts
    rollout_id = outside.writer.event_id_of("rollouts", row)
    part = {
        "iteration": index, "number": 0, "path": "f", "format": "nemo-rl", "sha256": "",
        "position": 0, "first_line": 1, "num_lines": 1, "num_failures": 0, "num_rollouts": 1,
        "num_token_rollouts": 1, "num_guessed_groups": 0, "base_digest": base,
    }  # fmt: skip
    with_tokens = {} if held is None else {"rollout_tokens": [tokens(rollout_id, index, **held)]}
    outside.append(rollouts=[row], imports=[part], **with_tokens)
    Run(store, f"rescore-{index}", "rescore").append(scores=[score(rollout_id, 1.0, index)])
    return rollout_id


def test_an_imported_success_with_log_probs_is_eligible(run: Run):
    entry = run.entry(import_success(run.store, 1, {}))
    assert (entry["unit"], entry["source_run_id"]) == ("trajectory", "outside")
    assert entry["eligibility_reason"] == "eligible"
    assert entry["value"] == 1.0
    assert entry["age"] == 1  # as old as the run: versions of another policy count nothing
    assert (entry["prompt_tries"], entry["prompt_ok"]) == (4, 0)  # it is no attempt


@pytest.mark.parametrize("held", [None, NO_LOGPROBS])
def test_text_is_refused_for_corrected_replay(run: Run, held: dict[str, Any] | None):
    assert run.reason(import_success(run.store, 1, held)) == "no_logprobs"


@pytest.mark.parametrize(
    "facts",
    [{"base": "b1"}, {"temperature": -1.0}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}],
)
def test_log_probs_that_no_correction_holds_for_are_refused(run: Run, facts: dict[str, Any]):
    assert run.reason(import_success(run.store, 1, {}, **facts)) == "unfit_import"


def test_two_imported_successes_are_two_entries(run: Run):
    found = {import_success(run.store, n, {}) for n in (1, 2)}
    keys = [run.entry(rollout_id)["entry_key"] for rollout_id in found]
    assert len(set(keys)) == 2


@pytest.mark.parametrize(
    "facts",
    [{"finish_reason": "length"}, {"prefix_tokens": 2}, {"role": "imported_turn"},
     {"prompt_id": "p9"}],
)  # fmt: skip
def test_what_is_not_whole_or_was_never_tried_is_no_entry(run: Run, facts: dict[str, Any]):
    rollout_id = import_success(run.store, 1, {}, **facts)
    assert [row for row in run.buffer() if row["entry_id"] == rollout_id] == []


def test_a_response_whose_end_is_not_told_is_one(run: Run):
    assert run.reason(import_success(run.store, 1, {}, finish_reason="unknown")) == "eligible"


def test_a_run_that_was_told_of_no_import_has_none(run: Run):
    other = begun(run.store, "r2", "{}")
    rollout_id = import_success(run.store, 1, {})
    assert {row["source_run_id"] for row in other.buffer(run="r2")} == {"r2"}
    assert {row["run_id"] for row in run.buffer() if row["entry_id"] == rollout_id} == {"r1"}


def test_another_run_is_no_import(run: Run):
    told = begun(run.store, "r3", json.dumps({"replay": {"imports": ["r1"]}}))
    assert {row["source_run_id"] for row in told.buffer(run="r3")} == {"r3"}


def test_a_state_of_an_import_is_one_of_the_run_that_cut_it(run: Run):
    rollout_id = import_success(run.store, 1, {})
    state_id = run.cut(rollout_id, source_run_id="outside")
    run.fit("v1")
    run.judge("v1", {state_id: 0.5})
    entry = run.entry(state_id)
    assert (entry["unit"], entry["source_run_id"], entry["value"]) == ("state", "outside", 0.5)
    assert entry["eligibility_reason"] == "eligible"
