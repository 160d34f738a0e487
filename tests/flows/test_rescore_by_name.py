"""History judged again by scorers with names and parameters, in killable processes."""

import json
from typing import Any

import pytest

import storage
from flows.rescoring import RescoreRequest
from flows.translate import prompt_row
from rrl_core.tasks.code import OWN_PROBLEMS
from rrl_core.tasks.protocol import Prompt
from rrl_core.tasks.registry import SCORERS, build_task
from rrl_core.tasks.scorers import score_all
from tests.flows import histories
from tests.flows.histories import rescore_here, write_history
from tests.flows.test_rescore import rrl, scores_of, store  # noqa: F401 - fixtures
from tests.storage.conftest import memory_path  # noqa: F401 - a fixture
from tests.storage.rows import OPENED, rollout

# ruff: noqa: F811 - fixtures are arguments

TASKS: dict[str, dict[str, Any]] = {
    "code": {"eval_fraction": 0},
    "math": {"eval_fraction": 0},
    "reasoning_gym": {"kind": "chain_sum", "num_train": 3, "num_eval": 0},
}
NAMES = {"code": "code_tests", "math": "math_verify", "reasoning_gym": "reasoning_gym"}


def write_run(store: storage.Store, name: str, **params: Any) -> tuple[Any, list[str]]:
    """Append a run of the task with a right and a wrong answer to its first three prompts."""
    given = {**TASKS[name], **params}
    task = build_task(name, given)
    prompts = task.prompts("train")[:3]
    config = {"task": {"name": name, **given}}
    writer = store.open_stream(f"run-of-{name.replace('_', '-')}",
                               OPENED | {"config_json": json.dumps(config)})  # fmt: skip
    answers = [right(name, *one) for one in enumerate(prompts)]
    rows = [
        rollout(prompt.prompt_id, number, completion=text)
        for prompt, answer in zip(prompts, answers, strict=True)
        for number, text in enumerate((answer, "no idea"))
    ]
    writer.append({"rollouts": rows, "prompts": [prompt_row(p) for p in prompts]}, "b")
    return task, [row["completion"] for row in rows]


def right(name: str, number: int, prompt: Prompt) -> str:
    if name == "code":
        rows = OWN_PROBLEMS.read_text().split("\n")
        return str(json.loads(rows[number])["code"])
    if name == "math":
        return f"\\boxed{{{prompt.answer}}}"
    return f"<answer>{prompt.answer}</answer>"


@pytest.mark.parametrize("name", TASKS)
def test_history_is_judged_by_name_as_its_task_judged_it(store: storage.Store, name: str):
    task, completions = write_run(store, name, num_children=1)
    prompts = [prompt for prompt in task.prompts("train")[:3] for _ in range(2)]
    expected = score_all(task.scorers[0], prompts, completions)
    assert [score.value for score in expected] == [1.0, 0.0] * 3
    done = rescore_here(store, NAMES[name], where="iteration = 1")
    assert (done.scorer, done.scorer_version) == (NAMES[name], task.scorers[0].version)
    rows = scores_of(store, done.stream_id)
    assert [(row["value"], row["feedback"]) for row in rows] == [
        (score.value, score.feedback) for score in expected
    ]


def test_parameters_are_those_of_the_run_or_of_the_request(store: storage.Store, rrl: Any):
    write_run(store, "code", time_limit_s=3.0, num_children=1, partial=True)

    def versions(*arguments: str) -> str:
        code, shown, _ = rrl(*arguments, "--json")
        assert code == 0
        return json.loads(shown)["scorer_version"]

    run = ("--run", "run-of-code")
    assert versions("--scorer", "code_tests") == "1-4s-256mb"
    assert versions("--scorer", "code_tests", *run) == "1-3s-256mb"
    setting = ("--set", "task.memory_mb=300")
    assert versions("--scorer", "code_tests", *run, *setting) == "1-3s-300mb"
    assert versions("--scorer", "code_tests_share", *run) == "1-3s-256mb"
    assert {row["scorer"] for row in store.read("scores")} == {"code_tests", "code_tests_share"}
    # What they mean in one task says nothing in another.
    assert versions("--scorer", "math_verify", *run).endswith("-5s")


def test_a_slice_without_tests_is_unscorable_by_code_tests(store: storage.Store):
    write_history(store, 8)
    assert rescore_here(store, "code_tests").scores == {"unscorable": 8}


def test_who_hangs_or_ends_its_process_costs_its_own_scores_and_is_tried_again(
    store: storage.Store,
):
    write_history(store, 16)  # prompts 0 to 3
    scorer, limit = "tests.flows.rewards:stubborn", ("task.reward_time_limit_s=1",)
    done = rescore_here(store, scorer, settings=limit, shard_rollouts=10)
    assert (done.ended, done.scores) == ("finished", {"ok": 8, "timeout": 4, "scorer_error": 4})
    feedback = {row["status"]: row["feedback"] for row in scores_of(store, done.stream_id)}
    assert feedback["timeout"] == "no answer within 1 s"
    assert feedback["scorer_error"] == "no score: the checker's process ended"
    again = rescore_here(store, scorer, settings=limit)
    assert again.scores == {"timeout": 4, "scorer_error": 4}


def test_the_limit_of_a_reward_is_that_of_the_run_or_of_the_request(store: storage.Store):
    reward = "tests.tasks.tiny_reward:obey"
    config = {"task": {"name": "jsonl", "reward": reward, "reward_time_limit_s": 0.3}}
    writer = store.open_stream("limited", OPENED | {"config_json": json.dumps(config)})
    prompt = histories.prompt_row(0)
    rows = [rollout(prompt["prompt_id"], completion="hang")]
    writer.append({"rollouts": rows, "prompts": [prompt]}, "b")
    for settings, limit_s in (((), "0.3"), (("task.reward_time_limit_s=0.2",), "0.2")):
        done = rescore_here(store, reward, run_id="limited", settings=settings)
        [row] = scores_of(store, done.stream_id)
        assert (row["status"], row["feedback"]) == ("timeout", f"no answer within {limit_s} s")


def test_a_request_without_settings_finds_the_stream_it_always_had():
    plain = RescoreRequest("final_number", shard_rollouts=64).to_json()
    assert plain == (
        '{"as_of": null, "run_id": null, "scorer": "final_number", "shard_rollouts": 64, '
        '"where": null}'
    )
    assert RescoreRequest("code_tests", settings=("task.memory_mb=300",)).to_json() != plain


def test_every_scorer_of_a_task_has_a_name():
    for name, params in TASKS.items():
        assert {scorer.name for scorer in build_task(name, params).scorers} <= set(SCORERS)
