"""A fork goes on as its parent did, with the parent's history, and copies nothing."""

import shutil
from pathlib import Path

import pytest

import storage
from flows.auditing import audit
from flows.commands import TrainRequest
from flows.commands import train as train_command
from flows.config import ConfigError
from flows.forking import parse_fork, plan_fork
from flows.lineage import Lineage, Stretch, lineage_of
from tests.flows.conftest import RUN_ID, replay_config, run_here, smoke_config

FORK_ID = "fork-run"


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory, replayed: storage.Store) -> storage.Store:
    """The replaying smoke run, and a fork of it at iteration 3 with unchanged configuration."""
    path = tmp_path_factory.mktemp("forked") / "store"
    shutil.copytree(replayed.path, path)
    train_command(TrainRequest(None, (), None, FORK_ID, "none", False, f"{RUN_ID}@3"), path, True)
    return storage.open(path)


def test_an_unchanged_fork_equals_its_parents_continuation(forked: storage.Store):
    def adapters(run_id: str) -> dict[int, str]:
        rows = forked.read("policies", run_id=run_id)
        return {row["policy_version"]: row["adapter_digest"] for row in rows}

    parent, fork = adapters(RUN_ID), adapters(FORK_ID)
    assert sorted(fork) == [3, 4, 5, 6]
    assert fork == {version: parent[version] for version in fork}


def test_a_fork_picks_what_its_parent_picked(forked: storage.Store):
    def picked(run_id: str, iteration: int) -> list[tuple[str, ...]]:
        rows = forked.read("picks", run_id=run_id, iteration=iteration)
        rows.sort(key=lambda row: row["position"])
        return [(r["unit"], r["prompt_id"], r["prefix_tokens"], r["base"]) for r in rows]

    for iteration in (4, 5, 6):
        assert picked(FORK_ID, iteration) == picked(RUN_ID, iteration)
    assert any(picked(FORK_ID, iteration) for iteration in (4, 5, 6))


def test_a_fork_copies_no_rollouts(forked: storage.Store):
    rows = forked.read("rollouts", run_id=FORK_ID)
    assert {r["iteration"] for r in rows if r["role"] != "evaluation"} == {4, 5, 6}


def test_a_fork_is_derived_from_the_iteration_after_its_parents(forked: storage.Store):
    audited = list(audit(forked, FORK_ID, replay_config()))
    assert [a.iteration for a in audited] == [3, 4, 5, 6]
    assert [d for a in audited for d in a.differences] == []


def test_the_lineage_says_whose_iteration_it_is(forked: storage.Store):
    lineage = lineage_of(forked, FORK_ID)
    [pin] = forked.read("views_pinned", run_id=RUN_ID, iteration=4)
    assert lineage == Lineage((Stretch(FORK_ID, None), Stretch(RUN_ID, 3, pin["as_of"])))
    assert lineage.first_iteration == 3
    assert [lineage.run_of(i) for i in (1, 3, 4, 9)] == [RUN_ID, RUN_ID, FORK_ID, FORK_ID]
    models = lineage.read(forked, "value_models")
    assert [(row["run_id"], row["iteration"]) for row in models] == [
        (RUN_ID, 1), (RUN_ID, 2), (RUN_ID, 3), (FORK_ID, 4), (FORK_ID, 5), (FORK_ID, 6),
    ]  # fmt: skip


def test_lineage_of_a_fork_of_a_fork():
    # c forked at 9 of b, which was forked at 4 of a: a to 4, b to 9, then c
    lineage = Lineage((Stretch("c", None), Stretch("b", 9), Stretch("a", 4)))
    assert [lineage.run_of(i) for i in (4, 5, 9, 10)] == ["a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("nonsense", (), "expected RUN@ITERATION"),
        (f"{RUN_ID}@99", ("run.iterations=120",), "published no policy at iteration 99"),
        (f"{RUN_ID}@3", ("run.seed=7",), "inherits its parent's"),
        (f"{RUN_ID}@6", (), "raise it with --set run.iterations"),
        (f"{RUN_ID}@3", ("value.every=2",), "`value.every` = 2: a fork keeps its parent's, 1"),
        (f"{RUN_ID}@3", ("model.dtype=bfloat16",), "`model.dtype` = bfloat16: a fork keeps"),
        (
            f"{RUN_ID}@3",
            ("task.num_train=11",),
            "1 of the 12 train prompts of smoke-run are missing",
        ),
        ("nobody@1", (), "no run 'nobody'"),
    ],
)
def test_what_cannot_be_forked_is_refused(
    forked: storage.Store, text: str, overrides: tuple[str, ...], message: str
):
    head = forked.head()
    with pytest.raises((ConfigError, storage.StorageError), match=message):
        plan_fork(forked, text, None, overrides)
    assert forked.head() == head


def test_a_fork_is_written_run_at_iteration():
    assert parse_fork("demo-20261130-abcd@12") == ("demo-20261130-abcd", 12)


def test_a_policy_whose_optimizer_state_is_gone_cannot_be_forked(tmp_path: Path):
    store = run_here(tmp_path / "store", smoke_config("tracking.keep_optimizer=last2"))
    with pytest.raises(storage.StorageError, match="no longer kept"):
        plan_fork(store, f"{RUN_ID}@1", None, ())


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (('replay.units=["trajectory"]',), True),
        (('replay.units=["state"]', "replay.credit=corrected"), True),
        (('replay.units=["state"]',), False),  # direct credit reads no log-probs of the sampler
        (('replay.units=["trajectory"]', "learner.correction=none"), False),
        (("replay.units=[]",), False),
    ],
)
def test_no_correction_holds_for_what_an_ancestor_sampled_from_a_cut_distribution(
    cut: storage.Store, overrides: tuple[str, ...], is_refused: bool
):
    whole = ("run.iterations=3", "sampler.top_p=1", "learner.correction=token_truncate")
    if not is_refused:
        config, _ = plan_fork(cut, f"{RUN_ID}@1", None, (*whole, *overrides))
        assert config.sampler.top_p == 1
        return
    with pytest.raises(ConfigError, match=rf"`sampler.top_p` = 0.9 of {RUN_ID}"):
        plan_fork(cut, f"{RUN_ID}@1", None, (*whole, *overrides))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run that samples from nine tenths of the distribution, without a correction."""
    config = smoke_config(
        "run.iterations=1", "sampler.engine=fake", "evaluation.every=off", "sampler.top_p=0.9",
        "learner.correction=none",
    )  # fmt: skip
    return run_here(tmp_path_factory.mktemp("cut") / "store", config)
