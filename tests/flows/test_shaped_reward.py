"""A shaped reward in a run: its parts follow from the log, whoever asks for them again."""

import json
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.auditing import audit
from flows.commands import TrainRequest
from flows.commands import train as train_command
from flows.config import ConfigError, RunConfig, load_config
from flows.judged import configured_task
from rrl_core.exploration import novelty
from rrl_core.sampling.protocol import SampleRequest
from tests.flows.conftest import RUN_ID, run_here
from tests.flows.histories import rescore_here
from tests.flows.scripted import script, scripted_config

Row = dict[str, Any]
FORK_ID = "fork-run"
SCORER = "shaped:tests.flows.rewards:early_seven"
TEXTS = (
    "7 walking along the water in the evening",
    "7 walking along the water in the morning",
    "7 bread and coffee for everybody",
    "7 snow fell on a quiet harbour",
    "sunlight fell on a quiet harbour",
    "#### 7",
)
SHAPING = ("reward.format=answer_line", "reward.overlong_tokens=12", "reward.novelty_weight=0.5")


def seeded(version: int, request: SampleRequest) -> str:
    return TEXTS[request.seed % len(TEXTS)]


def shaped_config(*overrides: str) -> RunConfig:
    return scripted_config(
        *SHAPING, "run.iterations=3", "sampler.prompts=2", "sampler.group_size=4",
        "task.num_train=2", "sampler.max_tokens=32", "sampler.context_tokens=256",
        "tracking.keep_optimizer=all", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run of three iterations, and its fork at the first."""
    path = tmp_path_factory.mktemp("shaped") / "store"
    with pytest.MonkeyPatch.context() as patch:
        script(seeded, patch)
        run_here(path, shaped_config())
        request = TrainRequest(None, (), None, FORK_ID, "none", False, f"{RUN_ID}@1")
        train_command(request, path, True)
    return storage.open(path)


def rewards(store: storage.Store, run_id: str = RUN_ID) -> dict[str, Row]:
    """Return the shaped scores of a run's attempts, by rollout."""
    rows = store.read("scores", run_id=run_id)
    return {row["target_id"]: row for row in rows if row["scorer"] == SCORER}


def attempts(store: storage.Store, run_id: str = RUN_ID) -> list[Row]:
    rows = store.read("rollouts", run_id=run_id)
    return [row for row in rows if row["role"] == "attempt"]


def test_every_part_follows_from_the_log(trained: storage.Store):
    found, rollouts = rewards(trained), attempts(trained)
    assert len(rollouts) == 3 * 2 * 4
    kinds = set()
    for row in rollouts:
        others = [
            other["completion"]
            for other in rollouts
            if other["prompt_id"] == row["prompt_id"]
            and other["event_id"] != row["event_id"]
            and other["iteration"] <= row["iteration"]
        ]  # fmt: skip - at most 11: nothing is too old
        outcome = float("7" in row["completion"][:3])
        format_part = float(row["completion"] == "#### 7")
        new = novelty(row["completion"], others)
        late = max(0.0, (row["num_completion_tokens"] - 20) / 12)
        score = found[row["event_id"]]
        assert json.loads(score["components_json"]) == {
            "outcome": outcome, "format": format_part, "novelty": new, "overlong": late,
        }  # fmt: skip
        bonus = 0.1 * format_part + 0.5 * new * outcome
        assert score["value"] == pytest.approx(outcome + bonus - 0.5 * late, abs=1e-12)
        kinds.add((outcome, format_part, new > 0, late > 0))
    assert len(kinds) >= 5  # the parts do differ


def test_the_batch_is_made_of_shaped_rewards_and_the_outcome_stands_beside_them(
    trained: storage.Store,
):
    found = rewards(trained)
    replays = trained.read("replays", run_id=RUN_ID)
    fresh = [row for row in replays if row["unit"] == "fresh"]
    assert fresh
    assert all(row["reward"] == found[row["rollout_id"]]["value"] for row in fresh)
    outcomes = {
        row["target_id"]: row["value"]
        for row in trained.read("scores", run_id=RUN_ID)
        if row["scorer"] == "tests.flows.rewards:early_seven"
    }
    assert {row["event_id"] for row in attempts(trained)} <= outcomes.keys()
    assert [d for a in audit(trained, RUN_ID, shaped_config()) for d in a.differences] == []


def test_a_fork_compares_with_its_parents_history(trained: storage.Store):
    def by_place(run_id: str) -> dict[tuple[Any, ...], tuple[float, str]]:
        found = rewards(trained, run_id)
        return {
            (r["iteration"], r["prompt_id"], r["sample_index"]): (
                found[r["event_id"]]["value"],
                found[r["event_id"]]["components_json"],
            )
            for r in attempts(trained, run_id)
        }

    parent, fork = by_place(RUN_ID), by_place(FORK_ID)
    assert {place[0] for place in fork} == {2, 3}
    assert fork == {place: parent[place] for place in fork}


def test_history_is_judged_again_by_another_weighing(trained: storage.Store, tmp_path: Path):
    config = tmp_path / "other.toml"
    config.write_text(
        '[task]\nname = "arithmetic"\nreward = "tests.flows.rewards:early_seven"\n'
        '[reward]\nformat = "answer_line"\nformat_weight = 0.3\noverlong_tokens = 12\n'
        "overlong_weight = 0.2\nnovelty_weight = 0.4\n"
    )
    where = "role = 'attempt'"
    done = rescore_here(trained, f"config:{config}", where=where, run_id=RUN_ID, shard_rollouts=10)
    before, after = rewards(trained), rewards(trained, str(done.stream_id))
    assert done.scores == {"ok": len(after)} == {"ok": 24}
    for rollout_id, row in after.items():
        parts = json.loads(row["components_json"])
        assert parts == json.loads(before[rollout_id]["components_json"])
        bonus = 0.3 * parts["format"] + 0.4 * parts["novelty"] * parts["outcome"]
        value = parts["outcome"] + bonus - 0.2 * parts["overlong"]
        assert row["value"] == pytest.approx(value, abs=1e-12)
        assert row["scorer_version"] != before[rollout_id]["scorer_version"]
    again = rescore_here(trained, f"config:{config}", where=where, run_id=RUN_ID)
    assert again.ended == "nothing to do"
    # The run's own weighing has judged everything already.
    config.write_text(
        '[task]\nname = "arithmetic"\nreward = "tests.flows.rewards:early_seven"\n'
        '[reward]\nformat = "answer_line"\noverlong_tokens = 12\nnovelty_weight = 0.5\n'
    )
    assert rescore_here(trained, f"config:{config}", run_id=RUN_ID).ended == "nothing to do"


def test_by_default_the_reward_is_the_outcome_alone():
    config = scripted_config()
    assert [s.name for s in configured_task(config).scorers] == ["tests.flows.rewards:early_seven"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward.format=answer_line", "reward.format_weight=0.6", "reward.overlong_tokens=4"],
            r"`reward.format_weight` = 0.6 and `reward.overlong_weight` = 0.5 add up",
        ),
        (["reward.overlong_tokens=400"], r"`reward.overlong_tokens` = 400 .*`sampler.max_tokens`"),
        (["reward.format=poem"], r"`reward.format` = 'poem'"),
        (['reward.components={"outcome" = -1}'], r"`reward.components.outcome` = -1"),
    ],
)
def test_what_could_not_be_a_reward_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(Path("smoke"), overrides)
