"""Imported history is judged again, searched, gone back to as states and trajectories."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import storage
from flows.auditing import audit
from flows.config import ConfigError
from flows.progress import Progress
from flows.rescoring import RescoreRequest, rescore
from flows.wiring import model_spec
from rrl_core.policy.model import Policy, load_policy_model
from tests.flows.conftest import RUN_ID, replay_config, run_here
from tests.flows.test_rescore_value import make_model, publish, write_run
from tests.importers.imported import ask, import_here, write_lines

IMPORT = "outside"
REWARD = "rrl_core.tasks.dense:contains_digit"
CONFIG = (f"replay.imports=['{IMPORT}']", "run.iterations=3", "evaluation.every=off")
DECLARED = {"name": IMPORT, "task": "arithmetic", "model": "tiny", "temperature": 1.0}
Row = dict[str, Any]


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    return storage.open(tmp_path / "store", create=True)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy_model(model_spec(replay_config()), seed=0)


def episodes(policy: Policy, text: str, num: int = 2, with_tokens: bool = True) -> list[Row]:
    """`num` responses to each prompt of the smoke task, as verifiers writes them.

    Log-probs of -0.5 a token stand for those of another sampler.
    """
    from rrl_core.tasks.registry import build_task

    task = build_task("arithmetic", {"reward": REWARD, "num_train": 12, "num_eval": 6})
    lines = []
    for prompt in task.prompts("train"):
        asked = [dict(m) for m in prompt.messages]
        for n in range(num):
            said = [{"role": "assistant", "content": f"{text}{n}"}]
            ids = policy.tokenizer.encode(f"{text}{n}", add_special_tokens=False)
            tokens = {
                "prompt_ids": policy.encode(prompt.messages), "completion_ids": ids,
                "completion_logprobs": [-0.5] * len(ids),
            }  # fmt: skip
            step = {"prompt": asked, "completion": said, "tokens": tokens if with_tokens else None}
            lines.append({
                "example_id": prompt.prompt_id, "prompt": asked, "completion": said,
                "answer": prompt.answer, "reward": 1.0, "is_truncated": False,
                "trajectory": [step],
            })  # fmt: skip
    return lines


def import_episodes(store: storage.Store, folder: Path, lines: list[Row], **facts: Any) -> None:
    path = write_lines(folder / "results.jsonl", lines)
    import_here(store, "verifiers", path, **DECLARED | facts)


def rescore_import(store: storage.Store, scorer: str = REWARD) -> Any:
    with Progress(quiet=True) as progress:
        return rescore(store, RescoreRequest(scorer, run_id=IMPORT), progress)


def differences(store: storage.Store, config: Any) -> list[str]:
    return [str(d) for audited in audit(store, RUN_ID, config) for d in audited.differences]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> storage.Store:
    """A run that goes back to an import as well; its responses have lines to be cut after."""
    path = tmp_path_factory.mktemp("hybrid")
    store = storage.open(path / "store", create=True)
    import_episodes(store, path, episodes(policy, "no idea.\nor is it\n"))
    assert rescore_import(store).scores == {"ok": 24}
    config = replay_config(*CONFIG, 'replay.units=["state"]')
    return run_here(path / "store", config)


def test_the_states_of_an_import_are_continued_by_the_policy(hybrid: storage.Store):
    states = [s for s in hybrid.read("states", run_id=RUN_ID) if s["source_run_id"] == IMPORT]
    assert {s["prompt_id"] for s in states} <= {
        r["prompt_id"] for r in hybrid.read("rollouts", run_id=RUN_ID) if r["role"] == "attempt"
    }
    assert max(Counter((s["rollout_id"], s["prefix_tokens"]) for s in states).values()) == 1
    picks = {
        p["entry_id"]: p for p in hybrid.read("picks", run_id=RUN_ID)
        if p["source_run_id"] == IMPORT
    }  # fmt: skip
    continued = [r for r in hybrid.read("rollouts") if r["parent_id"] in picks]
    assert {r["role"] for r in continued} == {"continuation"}
    assert len(continued) >= 4
    assert not storage.verify(hybrid, deep=True)


def test_a_run_that_goes_back_to_an_import_is_derived_again(hybrid: storage.Store):
    assert differences(hybrid, replay_config(*CONFIG, 'replay.units=["state"]')) == []


@pytest.mark.slow
def test_the_successes_of_an_import_join_fresh_groups_and_teach_by_their_logprobs(
    tmp_path: Path, policy: Policy
):
    store = storage.open(tmp_path / "store", create=True)
    import_episodes(store, tmp_path, episodes(policy, "seven it is "))
    reward = "tests.flows.rewards:known_words"
    rescore_import(store, reward)
    config = replay_config(
        *CONFIG, "run.iterations=11", 'replay.units=["trajectory"]', "value.every=off",
        "sampler.engine=fake", f"task.reward={reward}",
    )  # fmt: skip
    store = run_here(tmp_path / "store", config)
    replays = store.read("replays", run_id=RUN_ID)
    joined = [row for row in replays if row["source_run_id"] == IMPORT]
    assert {row["unit"] for row in joined} == {"trajectory"}
    assert {row["reward"] for row in joined} == {1.0}
    learned = {
        (row["iteration"], row["rollout_id"]): row
        for row in store.read("learned_samples", run_id=RUN_ID)
    }
    for row in joined:
        group = [r for r in replays if r["group_id"] == row["group_id"]]
        assert {r["reward"] for r in group} == {0.0, 1.0}  # alone among the policy's failures
        assert row["advantage"] > 0
        taught = learned[row["iteration"], row["rollout_id"]]
        assert taught["num_loss_tokens"] > 0
        assert taught["importance_mean"] != 1.0  # against -0.5 a token, not the policy's own
    assert differences(store, config) == []


def test_the_responses_of_an_import_are_judged_by_a_value_model(
    store: storage.Store, tmp_path: Path, policy: Policy
):
    """24 responses, cut after their first line (and those of each prompt once as a whole)."""
    write_run(store, 4)
    publish(store, make_model(policy, 1), "v1")
    import_episodes(store, tmp_path, episodes(policy, "no idea.\nor is it\n"))
    done = rescore_import(store, "value:v1")
    assert done.skipped == {}
    states = [s for s in store.read("states") if s["source_run_id"] == IMPORT]
    assert Counter(s["prefix_tokens"] == 0 for s in states)[True] == 12
    assert done.scores == {"ok": len(states)}
    [(num_found,)] = ask(
        store,
        f"""select count(*) from states as state
        join latest_scores as score on score.target_id = state.event_id
        where state.source_run_id = '{IMPORT}' and score.value between 0 and 1""",
    )
    assert num_found == len(states)


@pytest.mark.parametrize(
    ("with_tokens", "model", "reason"),
    [
        (True, None, "its run has another base model, or names none"),
        (False, "tiny", "no token ids are stored"),
    ],
)
def test_what_the_value_model_cannot_read_of_an_import_is_told(
    store: storage.Store,
    tmp_path: Path,
    policy: Policy,
    with_tokens: bool,
    model: str | None,
    reason: str,
):
    write_run(store, 4)
    publish(store, make_model(policy, 1), "v1")
    import_episodes(store, tmp_path, episodes(policy, "7", 1, with_tokens), model=model)
    assert rescore_import(store, "value:v1").skipped == {reason: 12}


def test_an_imported_response_is_found_by_its_words_and_shown(
    store: storage.Store, tmp_path: Path, policy: Policy
):
    import_episodes(store, tmp_path, episodes(policy, "a lucky 7", 1, with_tokens=False))
    found = ask(store, "select event_id from rollouts where completion like '%lucky 7%'")
    assert len(found) == 12
    story = storage.console.story(store, found[0][0])
    assert {"rollouts", "scores"} <= story.keys()


def test_the_prompts_of_an_import_are_a_task(store: storage.Store, tmp_path: Path, policy: Policy):
    from rrl_core.tasks.registry import build_task
    from storage.export_rollouts import export_rollouts

    import_episodes(store, tmp_path, episodes(policy, "7", 2, with_tokens=False), task="jsonl")
    assert list(export_rollouts(store, "jsonl", tmp_path / "out.jsonl"))
    task = build_task(
        "jsonl", {"path": str(tmp_path / "out.jsonl"), "reward": REWARD, "eval_fraction": 0}
    )
    imported = {row["prompt_id"] for row in store.read("prompts")}
    assert {prompt.prompt_id for prompt in task.prompts("train")} == imported
    assert len(imported) == 12


def test_a_name_that_is_no_import_is_refused(tmp_path: Path):
    with pytest.raises(storage.QueryError, match="which has none; came 'outside'"):
        run_here(tmp_path / "store", replay_config(*CONFIG))
    assert storage.open(tmp_path / "store").read("runs") == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replay.units=['prompt']", "come back as states or trajectories"),
        ("replay.credit='corrected'", "no correction holds"),
    ],
)
def test_imports_that_nothing_would_come_of_are_refused(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        replay_config(*CONFIG, override)
