"""The coded-transforms study as a whole: its log, its halves, and a study that was killed."""

import json
import sys
from dataclasses import asdict, replace

import pytest
import torch

import storage
from benchmarks.studies.coded import __main__ as command
from benchmarks.studies.coded.arms import ARMS, TUNING, TUNING_SEEDS, named
from benchmarks.studies.coded.results import Job, add_result, forgotten, read_results
from benchmarks.studies.coded.training import train
from benchmarks.studies.coded.warm_start import start_policy
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.prefix_credit import PREFIX_CREDITS
from tests.studies.test_coded_study import TINY

TASK = "benchmarks.studies.coded"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def lucky(monkeypatch):
    """Answers succeed now and then, so that there is something to lose and to replay."""

    def some(world, problems, answers):
        return (answers.sum(1) % 3 == 0) * 1.0

    for module in ("training", "evaluation"):
        monkeypatch.setattr(f"{TASK}.{module}.rewards", some)


def logged(arm, path, seed=0):
    job = Job(TINY, replace(named([arm])[0], prompts=2), 0.1, seed)
    start = start_policy(TINY.warm, seed, 0.1, path / "checkpoints")
    outcome, journal = train(TINY, job.arm, seed, start, run_id=job.run_id)
    journal.write(path / "store", asdict(job), seed)
    return outcome, journal


def test_the_views_of_the_log_say_what_the_results_say(tmp_path, lucky):
    arms = ("grpo", "srrl", "rrl-state", "rrl-prompt")
    done = {arm: logged(arm, tmp_path) for arm in arms}
    store = storage.open(tmp_path / "store")
    assert list(storage.verify(store)) == []
    for arm, (outcome, journal) in done.items():
        lost, again = store.sql(
            "select count(*) filter (where not is_solved_again), "
            "count(*) filter (where is_solved_again) from lost_prompts "
            "where run_id = $run and role = 'evaluation'",
            {"run": journal.run_id},
        ).fetchall()[0]
        told = forgotten(outcome.evaluations)
        ever = sum(map(any, zip(*_counts(outcome), strict=True)))
        assert told["recovered"] == again, arm
        assert told["lost_rate"] == pytest.approx(lost / ever), arm
        num, tokens = store.sql(
            "select count(*), sum(num_completion_tokens) from rollouts "
            "where run_id = $run and role <> 'evaluation'",
            {"run": journal.run_id},
        ).fetchall()[0]
        assert (num, tokens) == (outcome.num_sequences, outcome.num_tokens)
        iterations = store.sql(
            "select count(*) from training_history where run_id = $run and iteration > 0",
            {"run": journal.run_id},
        ).fetchall()[0]
        assert iterations == (outcome.num_iterations,)
    units = store.sql("select distinct unit from retries order by unit").fetchall()
    assert units == [("prompt",), ("state",)]


def _counts(outcome):
    return [e.variety.num_ok for e in outcome.evaluations if e.variety is not None]


def test_a_run_that_was_logged_but_not_noted_is_logged_once(tmp_path, lucky):
    _, journal = logged("rrl-state", tmp_path)
    _, again = logged("rrl-state", tmp_path)
    assert journal.rows == again.rows
    store = storage.open(tmp_path / "store")
    counted = store.sql("select count(*) from rollouts").fetchall()[0]
    assert counted == (len(journal.rows["rollouts"]),)


def options(*more):
    return command._parser().parse_args(list(more))


def test_all_is_the_grid_and_every_arm_at_every_difficulty():
    jobs = command._jobs(options("--all"))
    compared = [job for job in jobs if job.seed not in TUNING_SEEDS]
    seeds = {eps: {job.seed for job in compared if job.eps == eps} for eps in (0.1, 0.3, 1.0)}
    assert [len(seeds[eps]) for eps in (0.1, 0.3, 1.0)] == [8, 4, 4]
    assert len(compared) == 16 * len(ARMS)
    assert len(jobs) - len(compared) == len(TUNING_SEEDS) * len(TUNING)
    assert len({job.digest() for job in jobs}) == len({job.run_id for job in jobs}) == len(jobs)
    halves = [command.own_part(jobs, (part, 2)) for part in (1, 2)]
    assert {job.digest() for half in halves for job in half} == {job.digest() for job in jobs}
    assert sum(map(len, halves)) == len(jobs)
    starts = [{(job.eps, job.seed) for job in half} for half in halves]
    assert not starts[0] & starts[1]  # no start policy is made twice
    with pytest.raises(SystemExit):
        options("--half", "3/2")


def test_the_arms_are_those_of_the_design_and_well_formed():
    design = """grpo grpo-temperature grpo-entropy ppo raft rrl-state rrl-trajectory rrl-prompt
        uniform stale srrl srrl-no-memory srrl-no-distil srrl-no-feedback blank retry raw-feedback
        random-review rrl+srrl"""
    assert {arm.name for arm in named(design.split())} == set(design.split())
    assert all(arm.prompts == 4 for arm in ARMS if not arm.name.endswith("-p8"))
    grid = {(arm.prompts, arm.rate) for arm in TUNING if arm.second is None}
    assert grid == {(prompts, rate) for prompts in (4, 8) for rate in (1.5e-4, 3e-4, 6e-4)}
    for arm in (*ARMS, *TUNING):
        assert arm.algorithm in ALGORITHMS
        assert arm.credit in PREFIX_CREDITS
        assert arm.unit is None or not ALGORITHMS[arm.algorithm].has_critic


def study(monkeypatch, *more):
    monkeypatch.setattr(
        f"{TASK}.__main__.Settings", lambda budget: replace(TINY, budget=budget, group_size=3)
    )
    monkeypatch.setattr(sys, "argv", ["coded", "--budget", "30", *map(str, more)])
    command.main()


def test_a_killed_study_goes_on_with_what_is_left(tmp_path, monkeypatch):
    common = ("--arms", "grpo", "rrl-state", "retry", "--seeds", 1, "--work", tmp_path)
    trained = []

    def killed(settings, arm, *rest):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(arm.name)
        return train(settings, arm, *rest)

    monkeypatch.setattr(f"{TASK}.__main__.train", killed)
    with pytest.raises(SystemExit, match="goes on"):
        study(monkeypatch, *common)
    before = (tmp_path / "results.jsonl").read_text()
    trained.pop()
    study(monkeypatch, *common)
    assert trained == ["grpo", "retry"]
    assert (tmp_path / "results.jsonl").read_text().startswith(before)
    page = (tmp_path / "coded-transforms.md").read_text()
    assert [page.count(f"| {arm} |") for arm in ("grpo", "rrl-state", "retry")] == [2, 2, 2]


def test_halves_make_the_page_of_the_whole(tmp_path, monkeypatch, capsys):
    common = ("--arms", "grpo", "blank", "--seeds", 2, "--work")
    for half in ("1/2", "2/2"):
        study(monkeypatch, *common, tmp_path / "halves", "--half", half)
    study(monkeypatch, *common, tmp_path / "whole")
    rows = [
        {r["run_id"]: [e["rare"] for e in r["evaluations"]] for r in read_results(p).values()}
        for p in (tmp_path / "halves" / "results.jsonl", tmp_path / "whole" / "results.jsonl")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
    store = storage.open(tmp_path / "halves" / "store")
    assert store.sql("select count(distinct run_id) from rollouts").fetchall()[0] == (4,)
    assert "| blank | 2 |" in (tmp_path / "halves" / "coded-transforms.md").read_text()


def test_a_result_has_what_was_lost(tmp_path, lucky):
    job = Job(TINY, replace(named(["grpo"])[0], prompts=2), 0.1, 0)
    start = start_policy(TINY.warm, 0, 0.1, tmp_path)
    outcome, _ = train(TINY, job.arm, 0, start)
    row = json.loads(json.dumps(add_result(tmp_path / "results.jsonl", job, outcome)))
    assert row["lost_rate"] == forgotten(outcome.evaluations)["lost_rate"]
    assert 0 <= row["lost_rate"] <= 1
