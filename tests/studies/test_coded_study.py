"""The coded-transforms study: policy, learning, runs, resumption and reports."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.studies.coded.__main__ import main
from benchmarks.studies.coded.arms import ARMS, TUNING, Arm, named
from benchmarks.studies.coded.corpus import CorpusSettings
from benchmarks.studies.coded.evaluation import Evaluation, ExamSettings, Variety
from benchmarks.studies.coded.learning import Learner, Rollouts
from benchmarks.studies.coded.memory import Memory
from benchmarks.studies.coded.policy import Policy, Shape, picked, sample, token_logprobs
from benchmarks.studies.coded.report import (
    MARK,
    cells,
    control_cells,
    difference,
    more_cells,
    page,
    plot,
    sections,
    tables,
    write_page,
)
from benchmarks.studies.coded.results import Job, add_result, area, read_results
from benchmarks.studies.coded.training import Outcome, Run, Settings, train
from benchmarks.studies.coded.warm_start import WarmStart, num_steps, start_policy
from benchmarks.studies.coded.world import CLASSES, Problems, attempt_prompts, decode, encode

ROOT = Path(__file__).resolve().parents[2]
LOGPROB_TOLERANCE = 1e-5
EXACT = 1e-6  # float32

TINY = Settings(
    warm=WarmStart(
        shape=Shape(width=16, layers=2, heads=2),
        corpus=CorpusSettings(attempts=8, reviews=4, second_attempts=4),
        trunk_steps=2,
        seed_steps=2,
    ),
    exam=ExamSettings(
        rare_problems=8,
        common_problems=4,
        distilled_problems=4,
        varied_rare=4,
        varied_common=2,
        samples=8,
    ),
    budget=100,
    group_size=3,
    evaluate_every=40,
)


def tiny_policy(seed=0, width=16):
    torch.manual_seed(seed)
    return Policy(Shape(width=width, layers=2, heads=2))


def some_prompts(num=5, length=12):
    return np.random.default_rng(0).integers(58, size=(num, length))


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_log_probs_of_the_cache_are_those_of_a_full_pass():
    torch.manual_seed(0)
    policy = Policy(Shape())
    assert 330_000 < sum(p.numel() for p in policy.parameters()) < 370_000
    for parameter in policy.parameters():  # far from uniform, so that a wrong cache shows
        parameter.data.mul_(2.0)
    prompts = some_prompts()
    for temperature in (1.0, 1.3):
        ids, logprobs = sample(policy, prompts, 7, torch.Generator().manual_seed(0), temperature)
        whole = torch.from_numpy(np.concatenate([prompts, ids], axis=1))
        with torch.no_grad():
            full = picked(token_logprobs(policy, whole, temperature), whole[:, 1:])[:, -7:]
        assert np.abs(full.numpy() - logprobs).max() < LOGPROB_TOLERANCE
        assert np.ptp(logprobs) > 1


def test_samples_have_the_chances_of_the_policy():
    policy = tiny_policy()
    policy.head.weight.data.mul_(4.0)
    prompts = np.tile(some_prompts(1), (4000, 1))
    ids, _ = sample(policy, prompts, 1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        chances = policy(torch.from_numpy(prompts[:1]))[0, -1].softmax(0).numpy()
    counts = np.bincount(ids[:, 0], minlength=58) / 4000
    assert np.abs(counts - chances).max() < 4 * 0.5 / np.sqrt(4000)  # four standard errors


def rollouts(term, advantages, num_prompt=7, policy=None):
    num = len(advantages)
    prompts = some_prompts(num, num_prompt)
    ids, logprobs = sample(policy or tiny_policy(), prompts, 4, torch.Generator().manual_seed(1))
    return Rollouts(term, prompts, ids, logprobs, np.array(advantages, dtype=float))


def mean_logprobs(policy, part):
    ids = torch.from_numpy(np.concatenate([part.prompts, part.completions], axis=1))
    every_token = picked(token_logprobs(policy, ids), ids[:, 1:])
    return every_token[:, -part.completions.shape[1] :].mean(dim=1)


def gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_the_loss_is_the_formula_over_one_n():
    policy = tiny_policy()
    parts = [
        rollouts("attempt", [1.5, -0.5, 0.0], policy=policy),
        rollouts("review", [0.5, -0.5], num_prompt=27, policy=policy),
        rollouts("second_attempt", [0.5, -0.5], num_prompt=12, policy=policy),
        rollouts("distill", [0.0], policy=policy),
    ]
    got = gradient(policy, Learner(policy, tiny_policy(), Arm("", distill=0.7)).loss(parts))
    # On-policy, the gradient of -A u is -A grad log pi; at the reference that of KL is 0; N = 7.
    terms = [-(torch.from_numpy(p.advantages) * mean_logprobs(policy, p)).sum() for p in parts[:3]]
    expected = gradient(policy, (sum(terms) - 0.7 * mean_logprobs(policy, parts[3]).sum()) / 7)
    assert torch.allclose(got, expected.float(), atol=EXACT)


def test_the_loss_of_a_batch_is_that_of_its_parts():
    policy = tiny_policy()
    parts = [
        rollouts("attempt", [1.0, -1.0], policy=policy),
        rollouts("review", [1.0, -1.0], num_prompt=27, policy=policy),
    ]
    learner = Learner(policy, tiny_policy(1), Arm(""))
    apart = sum(learner.loss([part]).item() for part in parts) / 2
    assert learner.loss(parts).item() == pytest.approx(apart, abs=EXACT)


def test_raft_learns_from_the_better_and_distils_over_all():
    policy = tiny_policy()
    attempts = rollouts("attempt", [2.0, -1.0, 0.0], policy=policy)
    distilled = rollouts("distill", [0.0], policy=policy)
    learner = Learner(policy, tiny_policy(), Arm("", algorithm="raft"))
    got = learner.loss([attempts, distilled]).item()
    expected = -mean_logprobs(policy, attempts)[0] - mean_logprobs(policy, distilled)[0] / 3
    assert got == pytest.approx(expected.item(), abs=EXACT)
    assert learner.loss([attempts.take(np.array([1, 2]))]) is None


def test_a_replayed_trajectory_is_corrected_by_its_sampler():
    policy = tiny_policy()
    old = rollouts("trajectory", [1.0], policy=policy)
    learner = Learner(policy, tiny_policy(1), Arm(""))
    same = gradient(policy, learner.loss([old]))
    half = replace(old, sampler_logprobs=old.sampler_logprobs - np.float32(np.log(1.5)))
    capped = replace(old, sampler_logprobs=old.sampler_logprobs - np.float32(np.log(9.0)))
    assert torch.allclose(gradient(policy, learner.loss([half])), 1.5 * same, atol=EXACT)
    assert torch.allclose(gradient(policy, learner.loss([capped])), 2.0 * same, atol=EXACT)


def problems(*texts):
    class_B = np.array([CLASSES.index(text[0]) for text in texts])
    return Problems(class_B, np.stack([encode(text[1:]) for text in texts]))


def test_memory_shows_the_last_two_of_a_class_newest_last():
    memory = Memory()
    reviews = np.stack([encode(f"wA{rule};") for rule in "rlk"])
    asked = problems("A47291", "B47291", "A47291")
    assert [decode(row) for row in memory.slots(asked)] == ["________"] * 3
    memory.add(problems("A11111"), reviews[:1])
    assert [decode(row) for row in memory.slots(asked)] == ["____wAr;", "________", "____wAr;"]
    memory.add(problems("A22222", "A33333"), reviews[1:])
    assert decode(memory.slots(asked)[0]) == "wAl;wAk;"
    assert decode(memory.slots(problems("A33333"))[0]) == "wAr;wAl;"  # never its own


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def cheating(monkeypatch):
    """Every second answer succeeds, so that all that depends on success happens."""

    def some(world, problems, answers):
        return (np.arange(len(answers)) % 2 == 0) * 1.0

    monkeypatch.setattr("benchmarks.studies.coded.training.rewards", some)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_two_updates_of_every_arm_are_finite_and_repeatable(arm, starts, monkeypatch):
    cheating(monkeypatch)
    small = replace(arm, prompts=2)
    runs = [Run(TINY, small, 0, start_policy(TINY.warm, 0, 0.1, starts)) for _ in range(2)]
    num_updates = 3 if arm.algorithm == "ppo" else 2  # the critic learns alone before
    for run in runs:
        for _ in range(num_updates):
            run.iterate()
    states = [run.policy.state_dict() for run in runs]
    start = start_policy(TINY.warm, 0, 0.1, starts).state_dict()
    assert all(tensor.isfinite().all() for tensor in states[0].values())
    assert all(torch.equal(states[0][name], states[1][name]) for name in start)
    assert not all(torch.equal(states[0][name], start[name]) for name in start)
    # Of 2 x 3 attempts the odd ones fail: one of the first problem, two of the second.
    num_seconds = 0 if arm.second is None else 3 if arm.reviews is None else 2 * arm.reviews
    num_seconds *= 2 if arm.second == "review" else 1
    assert runs[0].sampler.num_sequences == num_updates * (6 + num_seconds)
    assert (runs[0].num_distilled > 0) == (arm.second is not None and arm.distill > 0)
    assert runs[0].evaluate(is_whole=True).num_sequences == runs[0].sampler.num_sequences


def test_arms_of_a_seed_meet_the_same_problems(starts, monkeypatch):
    met = []
    start = start_policy(TINY.warm, 0, 0.1, starts)
    for arm in (Arm("a", prompts=2), Arm("b", prompts=2, second="blank", reviews=1)):
        run, seen = Run(TINY, arm, 0, start), []
        monkeypatch.setattr(
            "benchmarks.studies.coded.training.attempt",
            lambda sampler, problems, seen=seen: (
                seen.append(problems.ids()),
                sampler("attempt", attempt_prompts(problems), 7),
            )[1],
        )
        run.iterate()
        run.iterate()
        met.append(np.concatenate(seen))
    assert (met[0] == met[1]).all()


def test_checkpoints_are_made_once_and_depend_on_their_settings(tmp_path):
    count = []
    first = start_policy(TINY.warm, 0, 0.1, tmp_path, lambda: count.append(1))
    assert len(count) == 4
    assert num_steps(TINY.warm, {(0, 0.1)}, tmp_path) == 0
    assert num_steps(TINY.warm, {(0, 0.1), (0, 0.3), (1, 0.1)}, tmp_path) == 4
    again = start_policy(TINY.warm, 0, 0.1, tmp_path, lambda: count.append(1))
    assert len(count) == 4
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert num_steps(replace(TINY.warm, seed_rate=1e-4), {(0, 0.1)}, tmp_path) == 4


def outcome(rare=(0.0, 0.5, 1.0), at=(0, 60, 100), num_ok=((1, 0, 2), (0, 0, 3), (1, 0, 0))):
    evaluations = [
        Evaluation(num, value, 0.5, {"retry": 0.25}, None, Variety(8, list(ok), 0.1, 0.5, 0.2, 0.3))
        for num, value, ok in zip(at, rare, num_ok, strict=True)
    ]
    return Outcome(evaluations, 5, at[-1], 700, 3, 1.0)


def test_area_by_hand():
    # (60 * 0.25 + 40 * 0.75) / 100
    assert area(outcome()) == pytest.approx(0.45)


def test_results_are_read_for_their_own_settings_and_a_torn_line_is_dropped(tmp_path):
    path, job = tmp_path / "results.jsonl", Job(TINY, ARMS[0], 0.1, 0)
    assert read_results(path) == {}
    row = add_result(path, job, outcome())
    with path.open("a") as file:
        file.write('{"digest": "half')
    assert read_results(path) == {job.digest(): json.loads(json.dumps(row))}
    other = Job(replace(TINY, budget=101), ARMS[0], 0.1, 0)
    add_result(path, other, outcome())
    assert set(read_results(path)) == {job.digest(), other.digest()}
    assert row["job"]["settings"] == json.loads(json.dumps(dataclasses.asdict(TINY)))
    path.write_text("not a result\n")
    with pytest.raises(ValueError, match="line 1: expected a result"):
        read_results(path)


def test_every_part_of_a_job_is_in_its_digest():
    job = Job(TINY, ARMS[0], 0.1, 0)
    others = [
        replace(job, seed=1),
        replace(job, eps=0.3),
        replace(job, arm=replace(ARMS[0], rate=1e-3)),
        replace(job, settings=replace(TINY, warm=replace(TINY.warm, trunk_steps=3))),
    ]
    assert len({each.digest() for each in [job, *others]}) == 5
    assert replace(job).digest() == job.digest()


def test_differences_are_between_the_same_seeds():
    rows = [{"seed": 1, "auc": 0.5}, {"seed": 2, "auc": 0.7}, {"seed": 9, "auc": 0.0}]
    baseline = [{"seed": 2, "auc": 0.4}, {"seed": 1, "auc": 0.3}]
    assert difference(rows, baseline, "auc") == pytest.approx([0.2, 0.3])


def test_the_page_has_a_line_an_arm_with_paired_differences_and_a_plot(tmp_path):
    path = tmp_path / "results.jsonl"
    for seed in (0, 1, 2):
        add_result(path, Job(TINY, ARMS[0], 0.1, seed), outcome())
        better = outcome(rare=(0.0, 0.6, 1.0 + seed / 10))
        add_result(path, Job(TINY, named(["srrl"])[0], 0.1, seed), better)
        if seed:
            add_result(path, Job(TINY, named(["raw-feedback"])[0], 0.1, seed), outcome())
    curves = sections(list(read_results(path).values()))
    by_arm = curves["eps 0.1, 100 sequences"]
    lines = [cells(name, rows, by_arm["grpo"]) for name, rows in by_arm.items()]
    # AUC 0.45, and (60 * 0.3 + 40 * (1.6 + seed / 10) / 2) / 100 = 0.50, 0.52 and 0.54
    assert lines[0][:5] == ["grpo", "3", "0.450 [0.450, 0.450]", "-", "1.000 [1.000, 1.000]"]
    assert lines[1][2:4] == ["0.520 [0.500, 0.540]", "0.070 [0.050, 0.090]"]
    assert lines[1][4:6] == ["1.100 [1.000, 1.200]", "0.100 [0.000, 0.200]"]
    assert lines[1][7:] == ["0.250, 0.250", "-", "-"]
    assert cells("grpo", by_arm["grpo"][:1], [])[2] == "0.450"
    # Of two problems ever solved one comes back and one is lost.
    varied = ["0.100, 0.100, 0.100", "0.500, 0.500, 0.500", "0.200, 0.200, 0.200"]
    entropy, lost = "0.300, 0.300, 0.300", "0.500 [0.500, 0.500]"
    rest = [lost, "1.0", "100", "700", "5", "1"]
    assert more_cells("srrl", by_arm["srrl"]) == ["srrl", *varied, entropy, *rest]
    beside = ["srrl - raw-feedback", "2", "0.080", "0.150"]  # AUC 0.52 and 0.54 against 0.45
    assert control_cells(by_arm) == [beside]
    text = page(curves, {"eps 0.1, 100 sequences": "plot.png"})
    assert text.count("\n| ") == 13
    assert "\n| srrl - raw-feedback | 2 | 0.080 | 0.150 |\n" in text
    assert all(len(line) == len(lines[0]) for lines in tables(by_arm) for line in lines)
    plot(by_arm, "eps 0.1", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_keeps_what_a_person_wrote(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("Mine.\n\n")
    write_page(path, "first\n")
    write_page(path, "second\n")
    assert path.read_text() == f"Mine.\n\n{MARK}\n\nsecond\n"


def test_arms_have_names_of_their_own():
    for arms in (ARMS, TUNING):
        assert len({arm.name for arm in arms}) == len(arms)
    with pytest.raises(ValueError, match="'gold'"):
        named(["gold"])


def test_a_run_ends_at_its_budget_with_an_evaluation(starts):
    start = start_policy(TINY.warm, 0, 0.1, starts)
    seen = []
    arm = Arm("", prompts=2, second="review", reviews=2)
    done, journal = train(TINY, arm, 0, start, seen.append)
    assert seen[-1] == TINY.budget <= done.num_sequences < TINY.budget + 14
    at = [e.num_sequences for e in done.evaluations]
    assert at[0] == 0
    assert at[-1] == done.num_sequences
    assert len(at) == 5  # start, 40, half, 80, end
    assert [bool(e.lifts) for e in done.evaluations] == [False, False, True, False, True]
    assert [e.variety is not None for e in done.evaluations] == [True, False, True, False, True]
    roles = Counter(row["role"] for row in journal.rows["rollouts"])
    assert roles["attempt"] + roles["review"] + roles["second_attempt"] == done.num_sequences
    assert roles["evaluation"] == 3 * 6 * TINY.exam.samples


def run(*options):
    command = [sys.executable, "-m", "benchmarks.studies.coded", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("options", [("--arms", "gold"), ("--eps", "2"), ("--budget", "0")])
def test_bad_options_are_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coded", *options])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        sys, "argv", ["coded", "--work", str(tmp_path), "--out", f"{tmp_path}/file"]
    )
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "file" in capsys.readouterr().err


@pytest.mark.soak  # the warm start alone takes minutes
def test_the_command_goes_on_where_it_was_and_writes_its_page(tmp_path):
    common = ("--seeds", 1, "--budget", 300, "--work", tmp_path)
    first = run("--arms", "grpo", *common)
    assert first.returncode == 0, first.stderr
    lines = (tmp_path / "results.jsonl").read_text()
    both = run("--arms", "grpo", "srrl", *common, "--out", tmp_path / "page")
    assert both.returncode == 0, both.stderr
    assert (tmp_path / "results.jsonl").read_text().startswith(lines)
    assert (tmp_path / "results.jsonl").read_text().count("\n") == 2
    page = (tmp_path / "page" / "coded-transforms.md").read_text()
    assert "| grpo | 1 |" in page
    assert "| srrl | 1 |" in page
    assert (tmp_path / "page" / "coded-transforms-eps0.1.png").stat().st_size > 1000
