"""What TRL trained on is what the log says, and a log that fails costs nothing silently."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import storage
from flows.integrations.trl import RecordingError, record
from flows.integrations.trl_rows import Judge, MicroBatch, Sample, Step, score_rows, update_row
from flows.integrations.trl_watch import SAMPLE
from rrl_core.policy.tiny import tiny_model
from tests.integrations.trl_runs import GROUP, PROMPTS, Watching, chance, length, make_trainer

EXACT = 1e-6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def logged_sequences(store: storage.Store) -> list[tuple[Any, ...]]:
    query = (
        "select r.iteration, t.prompt_ids, t.completion_ids, r.advantage from replays as r "
        "join rollout_tokens as t on t.rollout_id = r.rollout_id"
    )
    return sorted((i, tuple(p), tuple(c), a) for i, p, c, a in store.sql(query).fetchall())


def recorded(tmp_path: Path, **facts: Any) -> tuple[Watching, storage.Store, Any]:
    trainer = make_trainer(tmp_path / "trl", kind=Watching, **facts)
    recorder = record(trainer, tmp_path / "store")
    trainer.train()
    return trainer, storage.open(tmp_path / "store"), recorder


CHATS = tuple([{"role": "user", "content": prompt}] for prompt in PROMPTS)


@pytest.mark.parametrize("prompts", [PROMPTS, pytest.param(CHATS, marks=pytest.mark.slow)])
def test_the_log_holds_the_token_ids_and_advantages_of_every_step(tmp_path: Path, prompts: Any):
    trainer, store, _ = recorded(tmp_path, prompts=prompts)
    assert len(trainer.sequences()) == 3 * 2 * GROUP
    assert logged_sequences(store) == trainer.sequences()


@pytest.mark.slow
def test_sequences_that_several_steps_learn_from_are_of_each(tmp_path: Path):
    settings = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 5}
    trainer, store, _ = recorded(tmp_path, prompts=PROMPTS * 2, **settings)
    # 4 micro-batches of 4 at two a step are two steps, taken twice: a new generation in step 5
    assert logged_sequences(store) == trainer.sequences()
    sampled = store.sql("select distinct iteration from rollouts order by all").fetchall()
    assert sampled == [(1,), (5,)]
    groups = store.sql("select count(*) from rollouts group by group_id").fetchall()
    assert groups == [(GROUP,)] * 8  # a prompt that comes twice in a batch has two groups
    ages = store.sql("select iteration, min(age), max(age) from replays group by all order by all")
    assert ages.fetchall() == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 3, 3), (5, 0, 0)]


def test_the_log_holds_what_each_reward_function_returned(tmp_path: Path):
    trainer, store, _ = recorded(
        tmp_path, reward=[chance, length], reward_weights=[1.0, 0.5], max_steps=2
    )
    query = (
        "select t.completion_ids, s.scorer, s.value from scores as s "
        "join rollout_tokens as t on t.rollout_id = s.target_id"
    )
    found: dict[str, list[Any]] = {}
    for ids, scorer, value in store.sql(query).fetchall():
        found.setdefault(scorer, []).append((ids, value))
    for column, name in enumerate(("chance", "length")):
        returned = [
            (ids, None if value.isnan() else float(value))
            for completions, values in trainer.judged
            for ids, value in zip(completions, values[:, column], strict=True)
        ]
        assert sorted(found[name], key=str) == sorted(returned, key=str)
    sums = [
        (ids, float(a) + 0.5 * (0.0 if b.isnan() else float(b)))  # chance never returns None
        for completions, values in trainer.judged
        for ids, (a, b) in zip(completions, values, strict=True)
    ]
    for (ids, value), (expected_ids, expected) in zip(
        sorted(found["weighted_sum"]), sorted(sums), strict=True
    ):
        assert (ids, value) == (expected_ids, pytest.approx(expected, abs=EXACT))


@pytest.mark.slow
def test_stored_logprobs_are_those_of_the_policy_that_sampled(tmp_path: Path):
    _, store, _ = recorded(tmp_path, max_steps=1, temperature=0.7)
    start = tiny_model(torch.float32)
    rows = store.read("rollout_tokens")
    assert len(rows) == 2 * GROUP
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = start(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].double() / 0.7
        expected = logits.log_softmax(-1).gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]
        stored = torch.tensor(row["sampler_logprobs"], dtype=torch.float64)
        assert torch.allclose(stored, expected, atol=1e-4)


@pytest.mark.slow
def test_a_cut_distribution_has_no_logprobs_and_says_why(tmp_path: Path):
    _, store, _ = recorded(tmp_path, max_steps=1, top_k=5)
    for row in store.read("rollout_tokens"):
        assert row["sampler_logprobs"] is None
        assert row["logprobs_reason"].startswith("top_k")


def test_views_take_it_for_a_run(tmp_path: Path):
    trainer, store, recorder = recorded(tmp_path)
    history = store.view("training_history", run_id=recorder.run_id)
    means = [float(values.mean()) for _, values in trainer.judged]
    assert [row["iteration"] for row in history] == [1, 2, 3]
    assert [row["mean_reward"] for row in history] == pytest.approx(means)
    assert [row["num_learned_samples"] for row in history] == [8, 8, 8]
    assert all(row["grad_norm"] > 0 for row in history)
    prompts = store.view("prompt_history", run_id=recorder.run_id)
    assert len(prompts) == 3 * 2
    judged = store.view("judged_rollouts", run_id=recorder.run_id)
    assert len(judged) == 3 * 8
    assert all(row["num_logprobs"] == row["num_completion_ids"] for row in judged)
    buffer = store.view("replay_buffer", run_id=recorder.run_id)
    ok = [r for r in judged if r["reward"] >= 0.999 and r["finish_reason"] == "stop"]
    assert ok
    assert {r["entry_id"] for r in buffer if r["unit"] == "trajectory"} == {
        r["rollout_id"] for r in ok
    }
    [run] = store.view("run_overview", run_id=recorder.run_id)
    assert (run["kind"], run["state"], run["last_learned_iteration"]) == ("recorded", "finished", 3)


@pytest.mark.slow
def test_the_loss_is_the_one_without_the_recorder(tmp_path: Path):
    def weights(name: str, should_record: bool) -> list[torch.Tensor]:
        trainer = make_trainer(tmp_path / name)
        if should_record:
            record(trainer, tmp_path / "store")
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters()]

    pairs = zip(weights("a", True), weights("b", False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_losses_norms_and_rates_are_those_that_trl_reports(tmp_path: Path):
    start = tiny_model(torch.float32)
    start.save_pretrained(tmp_path / "model")  # TRL loads the reference model from there
    trainer, store, _ = recorded(
        tmp_path,
        model=tmp_path / "model",
        beta=0.5,
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="linear",
        eval_strategy="steps",  # evaluations are not training: nothing of them is written
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    updates = store.read("updates")
    assert len(store.read("rollouts")) == 3 * 2 * GROUP
    assert len(logs) == len(updates) == 3
    for log, row in zip(logs, updates, strict=True):
        assert row["loss"] == pytest.approx(log["loss"], abs=EXACT)
        assert row["kl_loss"] == pytest.approx(0.5 * log["kl"], abs=EXACT)
        assert row["policy_loss"] + row["kl_loss"] == pytest.approx(row["loss"])
        assert row["grad_norm"] == pytest.approx(log["grad_norm"], rel=EXACT)
        assert row["learning_rate"] == pytest.approx(log["learning_rate"], rel=EXACT)
    assert updates[-1]["kl_loss"] > 0


def test_numbers_that_are_not_finite_end_no_training():
    step = Step(batches=[MicroBatch([], {"completion_mask": torch.ones(1, 2)}, loss=0.5)])
    step.grad_norm = float("inf")  # as mixed precision has it now and then
    row = update_row(1, step, "grpo", 0.0)
    assert (row["loss"], row["grad_norm"]) == (0.5, 0.0)
    assert json.loads(row["metrics_json"]) == {"not_finite": {"grad_norm": "inf"}}
    place = {"run_id": "r", "iteration": 1, "role": "attempt", "prompt_id": "p"}
    sample = Sample(place | {"sample_index": 0, "parent_id": "", "attempt": 0}, "g", [1], [2], None)
    values = {Judge("a", "1"): float("inf"), Judge("b", "1"): float("nan")}
    found = [(row["value"], row["status"]) for row in score_rows(1, sample, values, 0.0)]
    assert found == [(None, "scorer_error"), (None, "unscorable")]


@pytest.mark.slow
def test_a_log_that_fails_ends_training_with_a_checkpoint_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(tmp_path / "trl", max_steps=5)
    recorder = record(trainer, tmp_path / "store")
    append = storage.StreamWriter.append

    def full(self: Any, rows: Any, batch_key: str, **facts: Any) -> Any:
        if batch_key == "i000002-step":
            raise storage.DiskFullError("no room")
        return append(self, rows, batch_key, **facts)

    monkeypatch.setattr(storage.StreamWriter, "append", full)
    with pytest.raises(RecordingError, match=r"ends before step 2.*no room.*checkpoint"):
        trainer.train()
    assert (tmp_path / "trl" / "checkpoint-2").is_dir()
    monkeypatch.undo()
    store = storage.open(tmp_path / "store")
    assert {row["iteration"] for row in store.read("updates")} == {1}
    again = make_trainer(tmp_path / "trl", max_steps=5)
    record(again, store, run_id=recorder.run_id)
    again.train(resume_from_checkpoint=True)
    assert {row["iteration"] for row in store.read("updates")} == {1, 3, 4, 5}


@pytest.mark.slow
def test_steps_in_the_log_are_not_written_twice(tmp_path: Path):
    for expected in (None, "steps up to 1 in the log, TRL begins after step 0"):
        trainer = make_trainer(tmp_path / "trl", max_steps=1)
        record(trainer, tmp_path / "store", run_id="mine")
        if expected is None:
            trainer.train()
        else:
            with pytest.raises(RecordingError, match=expected):
                trainer.train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t, "_calculate_rewards", None), "trl 1.16; .*no method _calculate"),
        (lambda t: setattr(t, "compute_loss", lambda batch: 0), r"no method compute_loss\(model"),
        (lambda t: record(t, t.args.output_dir + "/s"), "recorded already"),
    ],
)
def test_an_unknown_trainer_is_refused(tmp_path: Path, change: Callable[[Any], Any], message: str):
    trainer = make_trainer(tmp_path / "trl")
    change(trainer)
    with pytest.raises(RecordingError, match=message):
        record(trainer, tmp_path / "store")


def test_a_loss_that_is_not_seen_is_an_error(tmp_path: Path):
    trainer = make_trainer(tmp_path / "trl", max_steps=1)
    record(trainer, tmp_path / "store")
    prepare = trainer._prepare_inputs
    trainer._prepare_inputs = lambda batch: {k: v for k, v in prepare(batch).items() if k != SAMPLE}
    with pytest.raises(RecordingError, match="without a loss that was seen"):
        trainer.train()


@pytest.mark.slow
def test_the_run_says_what_it_was_trained_with(tmp_path: Path):
    _, store, recorder = recorded(tmp_path, max_steps=1)
    opened = store.read("runs", run_id=recorder.run_id)[0]
    assert json.loads(opened["config_json"])["args"]["num_generations"] == GROUP
    assert "trl" in json.loads(opened["packages_json"])
    assert {row["prompt_id"] for row in store.read("prompts")} == {
        row["prompt_id"] for row in store.read("rollouts")
    }
