"""A study trains its arms at one budget, goes on where it stopped, and compares pairs."""

import json
from pathlib import Path

import pytest

import storage
from flows.config import CONFIGS_DIR, ConfigError
from flows.progress import Progress
from flows.study import Study, load_study, run_study
from flows.study_results import Curve, curves, table_rows, write_results
from rrl_core.intervals import bootstrap_interval, paired_interval


def tiny_study(**overrides: object) -> Study:
    section = {
        "name": "tiny", "base": "smoke", "seeds": [0], "budget_tokens": 250, "baseline": "plain",
        "set": ["tracking.mlflow=false", "sampler.engine=fake", "run.iterations=9",
                "evaluation.every=1", "evaluation.prompts=4"],
    }  # fmt: skip
    arms = {"plain": [], "wide": ["sampler.group_size=6"]}
    return Study.model_validate({"study": section | overrides, "arms": arms})


@pytest.mark.parametrize("path", sorted(CONFIGS_DIR.glob("study-*.toml")), ids=lambda p: p.stem)
def test_every_arm_of_a_shipped_study_is_a_configuration(path: Path):
    runs = load_study(path).runs()
    assert len({run.run_id for run in runs}) == len(runs) >= 2


@pytest.mark.slow
def test_a_run_ends_with_the_iteration_that_spends_its_budget(tmp_path: Path):
    study = tiny_study()
    store = storage.open(tmp_path / "store", create=True)
    with Progress(quiet=True) as progress:
        run_study(store, study, "none", progress)
        commits = store.head().number
        run_study(store, study, "none", progress)  # finished: nothing is trained again
    assert store.head().number == commits
    for run_id in (run.run_id for run in study.runs()):
        costs = [r for r in store.view("run_costs") if r["run_id"] == run_id]
        assert costs[-1]["num_tokens"] >= 250 > costs[-2]["num_tokens"]
        rollouts = store.read("rollouts", run_id=run_id)
        trained = [r for r in rollouts if r["role"] != "evaluation"]
        assert costs[-1]["num_tokens"] == sum(r["num_completion_tokens"] for r in trained)
        assert costs[-1]["num_rollouts"] == costs[-1]["num_attempts"] == len(trained)
        evaluated = store.read("evaluations", run_id=run_id)
        assert max(r["iteration"] for r in evaluated) == costs[-1]["iteration"]
    found = curves(store, study)
    assert [row[0] for row in table_rows(study, found[""])] == ["plain", "wide"]
    page, picture = write_results(study, found, tmp_path / "out", "rrl study tiny")
    assert "rrl study tiny" in page.read_text()
    [code] = {row["code_version"] for row in store.read("runs")}
    assert f"code of the runs {code};" in page.read_text()
    page.write_text("Told by a person.\n" + page.read_text())
    write_results(study, found, tmp_path / "out", "rrl study again")
    assert page.read_text().startswith("Told by a person.\n")
    assert "rrl study tiny" not in page.read_text()
    assert picture.stat().st_size > 5_000


def test_the_area_is_the_mean_score_over_the_budget():
    # 0.0 to 0.4 over the first 100 of 200 tokens, then 0.4: (20 + 40) / 200
    assert Curve([0.0, 100.0], [0.0, 0.4], {}).area(200) == pytest.approx(0.3)
    # what was sampled beyond the budget does not count: 0.2 over 100, then the last score
    assert Curve([0.0, 100.0, 300.0], [0.2, 0.2, 0.6], {}).area(200) == pytest.approx(0.3)


def test_pairs_are_compared_by_seed():
    mean, interval = paired_interval([0.3, 0.5, 0.7], [0.2, 0.4, 0.6])
    assert mean == pytest.approx(0.1)
    assert interval == pytest.approx((0.1, 0.1))  # every pair differs by the same
    assert bootstrap_interval([0.1, 0.2]) is None
    low, high = bootstrap_interval([0.1, 0.2, 0.6]) or (0.0, 0.0)
    assert low < 0.3 < high
    assert bootstrap_interval([0.5] * 4) == (0.5, 0.5)


def test_tasks_are_seen_by_every_arm_of_every_seed():
    study = Study.model_validate(
        tiny_study(seeds=[0, 1]).model_dump()
        | {"tasks": {"sums": [], "long": ["task.max_terms=4"]}}
    )
    runs = study.runs()
    assert [run.run_id for run in runs[:5]] == [
        "tiny-sums-plain-0", "tiny-sums-wide-0", "tiny-sums-plain-1", "tiny-sums-wide-1",
        "tiny-long-plain-0",
    ]  # fmt: skip
    assert [run.config.task.params.get("max_terms") for run in runs[3:5]] == [None, 4]


@pytest.mark.slow
def test_a_run_of_another_configuration_is_not_taken_for_the_arm(tmp_path: Path):
    store = storage.open(tmp_path / "store", create=True)
    with Progress(quiet=True) as progress:
        run_study(store, tiny_study(), "none", progress)
        with pytest.raises(ConfigError, match=r"tiny-plain-0 .* another configuration"):
            run_study(store, tiny_study(budget_tokens=300), "none", progress)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[study]\nname = 'x'\n", r"`study.base`"),
        ("x =", r"not valid TOML"),
        (json.dumps({}), r"not valid TOML"),
    ],
)
def test_a_malformed_study_says_what_is_missing(tmp_path: Path, content: str, message: str):
    path = tmp_path / "study-x.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_an_arm_that_is_no_configuration_is_named_before_anything_is_trained():
    study = Study.model_validate(
        {
            "study": tiny_study().study.model_dump(),
            "arms": {"plain": [], "broken": ["learner.lr=1"]},
        }
    )
    with pytest.raises(ConfigError, match=r"arm broken: .*learner.lr"):
        study.runs()
