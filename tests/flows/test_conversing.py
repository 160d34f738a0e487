"""Rollouts of several turns in training: masked, cut, continued, reviewed, resumed, audited."""

import json
from pathlib import Path

import pytest

import storage
from flows import generation
from flows.auditing import audit
from flows.cli import app
from flows.config import RunConfig, load_config
from flows.planned import planned_steps
from flows.progress import Progress
from flows.report.rollouts import _shown_logprobs
from flows.stepping import retake
from flows.train import train
from flows.translate import stored_messages
from flows.wiring import model_spec
from rrl_core.policy.fetch import ModelNotFoundError, find_model
from rrl_core.policy.model import Policy, load_policy_model
from rrl_core.policy.tiny import tiny_tokenizer
from rrl_core.sampling.fake import FakeSampler
from rrl_core.sampling.protocol import SamplerError
from rrl_core.spans import sampled_mask
from tests.flows.conftest import FINGERPRINTED, RUN_ID, fingerprint, run_here
from tests.flows.conversations import (
    asking_config,
    caller,
    replaying_tools_config,
    reviewing_tools_config,
    tools_config,
)
from tests.flows.scripted import run_script

TABLES = (*FINGERPRINTED, "turns")
EOS = 258
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> storage.Store:
    """A run whose policy calls the calculator, with states of its episodes replayed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        path = tmp_path_factory.mktemp("played") / "store"
        return run_script(path, replaying_tools_config(), caller, monkeypatch)


def of_rollouts(store: storage.Store, table: str) -> dict[str, dict]:
    return {row["rollout_id"]: row for row in store.read(table, run_id=RUN_ID)}


def walked_mask(ids: list[int], is_begun: bool = True) -> list[bool]:
    """Return which tokens the policy sampled, by walking along them.

    A turn ends with the end token; from there all is given up to and with `assistant: `.
    """
    mask, is_own, said = [], is_begun, ""
    for token in ids:
        mask.append(is_own)
        said = "" if is_own else said + chr(token)
        if is_own and token == EOS:
            is_own = False
        elif not is_own and said.endswith("\nassistant: "):
            is_own = True
    return mask


def test_an_episode_is_exported_with_its_turns(played: storage.Store, tmp_path: Path):
    path = tmp_path / "out.jsonl"
    query = "select event_id as rollout_id from rollouts where role = 'attempt'"
    arguments = ["export", "sft", "--query", query, "--output", str(path)]
    app([*arguments, "--store", str(played.path)], standalone_mode=False)
    said: dict[str, list[dict]] = {}
    for row in sorted(played.read("turns", run_id=RUN_ID), key=lambda row: int(row["turn"])):
        said.setdefault(row["rollout_id"], []).extend(json.loads(row["messages_json"]))
    rollouts = [r for r in played.read("rollouts", run_id=RUN_ID) if r["role"] == "attempt"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["turns"] for line in lines] == [
        said[i] for i in sorted(r["event_id"] for r in rollouts)
    ]
    assert {"assistant", "tool"} == {m["role"] for line in lines for m in line["turns"]}


def test_the_mask_of_every_rollout_is_right_token_by_token(played: storage.Store):
    tokens, num_several = of_rollouts(played, "rollout_tokens"), 0
    for rollout in played.read("rollouts", run_id=RUN_ID):
        held = tokens[rollout["event_id"]]
        ids, logprobs = held["completion_ids"], held["sampler_logprobs"]
        expected = walked_mask(ids)
        mask = sampled_mask(held["sampled_bounds"], len(ids)) or (True,) * len(ids)
        assert list(mask) == expected
        assert rollout["num_completion_tokens"] == sum(expected)
        if logprobs is not None:  # greedy evaluations have none
            assert [logprob != 0.0 for logprob in logprobs] == expected
        assert ids[-1] == EOS
        num_several += not all(expected)
    assert num_several > 20


def test_what_was_given_is_what_the_calculator_said(played: storage.Store):
    tokens = of_rollouts(played, "rollout_tokens")
    for turn in played.read("turns", run_id=RUN_ID):
        ids = tokens[turn["rollout_id"]]["completion_ids"]
        own = ids[turn["first_token"] : turn["first_token"] + turn["num_tokens"]]
        [message] = stored_messages(turn["messages_json"])
        if turn["role"] == "assistant":
            assert own[-1] == EOS
            assert message["content"].endswith(TOKENIZER.decode(own[:-1]))
        else:
            assert (turn["role"], turn["policy_version"]) == ("tool", None)
            assert TOKENIZER.decode(own) == f"\ntool: {message['content']}\nassistant: "
            assert message["content"].lstrip("-").isdigit()


def test_every_turn_names_the_policy_that_sampled_it(played: storage.Store):
    versions = {r["event_id"]: r["policy_version"] for r in played.read("rollouts", run_id=RUN_ID)}
    for turn in played.read("turns", run_id=RUN_ID):
        if turn["role"] == "assistant":
            assert turn["policy_version"] == versions[turn["rollout_id"]]


def test_the_learner_gets_the_mask_and_counts_sampled_tokens_alone(played: storage.Store):
    tokens = of_rollouts(played, "rollout_tokens")
    learned = {
        (row["iteration"], row["rollout_id"]): row["num_loss_tokens"]
        for row in played.read("learned_samples", run_id=RUN_ID)
    }
    num_prefixes = 0
    for iteration in range(1, 5):
        [(_, samples)] = planned_steps(played, RUN_ID, iteration)
        for sample in samples:
            ids = list(sample.completion_ids)
            assert ids == tokens[sample.rollout_id]["completion_ids"]
            assert list(sample.loss_mask or (True,) * len(ids)) == walked_mask(ids)
            num_trained = learned[iteration, sample.rollout_id]
            if sample.prefix_ids:
                num_prefixes += 1
                given = list(sample.prefix_ids)
                mask = list(sample.prefix_mask or (True,) * len(given))
                assert mask == walked_mask(given)
                num_credited = sum(mask) if sample.prefix_advantage else 0
                assert num_trained in (sum(walked_mask(ids)), sum(walked_mask(ids)) + num_credited)
            else:
                assert num_trained == sum(walked_mask(ids))
    assert num_prefixes > 4


def test_the_budget_counts_what_was_sampled(played: storage.Store):
    rollouts = played.read("rollouts", run_id=RUN_ID)
    rows = played.view("sampled_budget", run_id=RUN_ID)
    assert sum(row["num_tokens"] for row in rows) == sum(
        sum(walked_mask(held["completion_ids"]))
        for held in of_rollouts(played, "rollout_tokens").values()
    )
    assert {row["ending"] for row in rollouts} == {"answered"}
    assert {row["status"] for row in rollouts} == {"ok"}


def test_turns_are_cut_where_the_next_one_begins_and_never_within_a_reply(played: storage.Store):
    tokens = of_rollouts(played, "rollout_tokens")
    cuts = set()
    for state in played.read("states", run_id=RUN_ID):
        ids, given = tokens[state["rollout_id"]]["completion_ids"], state["prefix_tokens"]
        cuts.add(state["cut"])
        if given == 0:
            continue
        mask = walked_mask(ids)
        assert mask[given], "a state ends where the policy goes on"
        is_turn = not mask[given - 1]
        assert is_turn == (state["cut"] == "turn")
        if is_turn:
            assert TOKENIZER.decode(ids[:given]).endswith("\nassistant: ")
    assert cuts >= {"prompt", "line", "turn"}


def test_a_continuation_goes_on_with_its_turn_and_the_environment(played: storage.Store):
    rollouts = played.read("rollouts", run_id=RUN_ID)
    tokens, by_id = of_rollouts(played, "rollout_tokens"), {r["event_id"]: r for r in rollouts}
    states = {row["event_id"]: row for row in played.read("states", run_id=RUN_ID)}
    turns: dict[str, list[str]] = {}
    for turn in played.read("turns", run_id=RUN_ID):
        turns.setdefault(turn["rollout_id"], []).append(turn["role"])
    seen = set()
    for rollout in rollouts:
        if rollout["role"] != "continuation":
            continue
        state, held = states[rollout["parent_id"]], tokens[rollout["event_id"]]
        source = tokens[state["rollout_id"]]
        given = source["completion_ids"][: state["prefix_tokens"]]
        assert held["prompt_ids"] == source["prompt_ids"] + given
        assert rollout["prefix_tokens"] == len(given)
        whole = walked_mask(given + held["completion_ids"])
        mask = sampled_mask(held["sampled_bounds"], len(held["completion_ids"]))
        assert whole[len(given) :] == list(mask or (True,) * len(held["completion_ids"]))
        called = rollout["completion"].partition("</tool_call>")[0]
        assert called == by_id[state["rollout_id"]]["completion"].partition("</tool_call>")[0]
        assert "\ntool\n" in rollout["completion"]
        seen.add((state["cut"], *turns[rollout["event_id"]]))
    assert {cut for cut, *_ in seen} >= {"line", "turn"}  # a turn is gone on with, one is begun


def test_the_reward_is_that_of_the_last_turn(played: storage.Store):
    scores = {
        row["target_id"]: row["value"]
        for row in played.read("scores", run_id=RUN_ID)
        if row["scorer"] == "last_turn_final_number"
    }
    values = set()
    for rollout in played.read("rollouts", run_id=RUN_ID):
        said = rollout["completion"].rpartition("#### ")[2]
        result = rollout["completion"].partition("\ntool\n")[2].partition("\n")[0]
        assert scores[rollout["event_id"]] == float(said == result)
        values.add(scores[rollout["event_id"]])
    assert values == {0.0, 1.0}


def test_an_audit_finds_no_difference_and_a_step_is_taken_again(played: storage.Store):
    config = replaying_tools_config()
    audited = list(audit(played, RUN_ID, config))
    assert [str(d) for a in audited for d in a.differences] == []
    assert sum(a.num_picks for a in audited) > 0
    with Progress(quiet=True) as progress:
        assert retake(played, RUN_ID, config, 2, progress).is_same


def test_show_tells_the_turns_of_a_rollout(played: storage.Store):
    [rollout, *_] = [r for r in played.read("rollouts", run_id=RUN_ID) if r["role"] == "attempt"]
    told = storage.console.story(played, rollout["event_id"])["turns"]
    assert [row["role"] for row in told] == ["assistant", "tool", "assistant"]


def test_a_report_tells_no_log_prob_of_what_was_given():
    tokens = {"sampler_logprobs": [-1.0, 0.0, -0.5], "sampled_bounds": [0, 1, 2, 3]}
    assert _shown_logprobs(tokens, 3) == [-100, None, -50]
    assert _shown_logprobs(tokens, 2) == [-100, None]
    assert _shown_logprobs(tokens | {"sampled_bounds": None}, 3) == [-100, 0, -50]
    assert _shown_logprobs(tokens | {"sampler_logprobs": None}, 3) is None


def check_resumed(path: Path, config: RunConfig, whole: storage.Store) -> None:
    """Go on with the run at `path` and compare it with one that was not interrupted."""
    store = storage.open(path)
    with Progress(quiet=True) as progress:
        assert train(store, config, RUN_ID, "none", progress) == "finished"
    assert fingerprint(store, tables=TABLES) == fingerprint(whole, tables=TABLES)
    assert not storage.verify(store, deep=True)


def test_an_engine_that_fails_in_a_later_turn_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tools_config("run.iterations=1", "evaluation.every=off")
    whole = run_script(tmp_path / "whole", config, caller, monkeypatch)
    generate, calls = FakeSampler.generate, []

    def failing(self: FakeSampler, requests, params):
        calls.append(len(requests))
        if len(calls) in (4, 6):  # in the second turn of a batch, and of its second try
            raise SamplerError("the engine is gone")
        return generate(self, requests, params)

    monkeypatch.setattr(FakeSampler, "generate", failing)
    store = storage.open(tmp_path / "broken", create=True)
    with Progress(quiet=True) as progress, pytest.raises(SamplerError):
        train(store, config, RUN_ID, "none", progress)
    before = fingerprint(store, tables=TABLES)
    assert before["turns"]
    check_resumed(tmp_path / "broken", config, whole)


def test_interrupted_between_commits_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real policy, asked back in every episode: stopped after three batches, then resumed."""
    config = asking_config(tmp_path, 2)
    whole = run_here(tmp_path / "whole", config)
    turns = whole.read("turns", run_id=RUN_ID)
    assert {row["role"] for row in turns} == {"assistant", "environment"}
    generated, batches = generation._generate_batch, []

    def stopping(*arguments) -> None:
        if len(batches) == 3:
            raise KeyboardInterrupt
        batches.append(arguments)
        generated(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(generation, "_generate_batch", stopping)
        store = storage.open(tmp_path / "stopped", create=True)
        with Progress(quiet=True) as progress, pytest.raises(KeyboardInterrupt):
            train(store, config, RUN_ID, "none", progress)
    check_resumed(tmp_path / "stopped", config, whole)


def test_a_failed_episode_is_reviewed_and_tried_again_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = run_script(tmp_path / "store", reviewing_tools_config(), caller, monkeypatch)
    tokens, turns = of_rollouts(store, "rollout_tokens"), {}
    for row in store.read("turns", run_id=RUN_ID):
        turns.setdefault(row["rollout_id"], []).append(row["role"])
    rollouts = {row["event_id"]: row for row in store.read("rollouts", run_id=RUN_ID)}
    reviews = [row for row in rollouts.values() if row["role"] == "review"]
    seconds = [row for row in rollouts.values() if row["role"] == "second_attempt"]
    assert len(seconds) == len(reviews) > 0
    for review in reviews:  # a single completion, which was shown the whole transcript
        assert review["ending"] is None
        assert review["event_id"] not in turns
        assert tokens[review["event_id"]]["sampled_bounds"] is None
        failed = rollouts[review["parent_id"]]["completion"]
        assert failed.endswith("#### 7")
        assert failed in TOKENIZER.decode(tokens[review["event_id"]]["prompt_ids"])
    for second in seconds:  # an episode of its own, which was shown the review alone
        assert turns[second["event_id"]] == ["assistant", "tool", "assistant"]
        assert "tool: " not in TOKENIZER.decode(tokens[second["event_id"]]["prompt_ids"])
        assert second["ending"] == "answered"
    [(_, samples)] = planned_steps(store, RUN_ID, 1)
    terms = {sample.term for sample in samples}
    assert terms == {"attempt", "review", "second_attempt", "distill"}
    for sample in samples:
        ids = list(sample.completion_ids)
        assert list(sample.loss_mask or (True,) * len(ids)) == walked_mask(ids)
    learned = {r["rollout_id"]: r for r in store.read("learned_samples", run_id=RUN_ID)}
    for sample in samples:
        assert learned[sample.rollout_id]["num_loss_tokens"] == sum(
            walked_mask(list(sample.completion_ids))
        )
    audited = list(audit(store, RUN_ID, reviewing_tools_config()))
    assert [str(d) for a in audited for d in a.differences] == []


def check_real_turns(store: storage.Store, run_id: str, policy: Policy) -> int:
    """Check the tokens of every episode against the chat template; return those with several turns.

    What was sampled ends with an end token or at a limit; what was given is the template's.
    """
    held = {row["rollout_id"]: row for row in store.read("rollout_tokens", run_id=run_id)}
    turns: dict[str, list[dict]] = {}
    for row in sorted(store.read("turns", run_id=run_id), key=lambda row: int(row["turn"])):
        turns.setdefault(row["rollout_id"], []).append(row)
    for rollout in store.read("rollouts", run_id=run_id):
        ids, said = held[rollout["event_id"]]["completion_ids"], turns[rollout["event_id"]]
        assert [row["first_token"] for row in said] == [
            sum(row["num_tokens"] for row in said[:n]) for n in range(len(said))
        ]
        assert len(ids) == sum(row["num_tokens"] for row in said)
        for number, row in enumerate(said):
            own = ids[row["first_token"] : row["first_token"] + row["num_tokens"]]
            messages = stored_messages(row["messages_json"])
            if number % 2 == 0:
                assert row["role"] == "assistant"
                assert row["policy_version"] == rollout["policy_version"]
                assert policy.decode(own) == messages[0]["content"]
                assert (own[-1] in policy.eos_token_ids) == (row["status"] == "stop")
                continue
            expected = "".join(
                f"\n<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages
            )
            text = policy.tokenizer.decode(own)
            assert text == f"{expected}\n<|im_start|>assistant\n"
        mask = sampled_mask(held[rollout["event_id"]]["sampled_bounds"], len(ids))
        spoken = [n % 2 == 0 for n, row in enumerate(said) for _ in range(row["num_tokens"])]
        assert list(mask or (True,) * len(ids)) == spoken
        assert rollout["num_completion_tokens"] == sum(spoken)
    return sum(len(said) > 1 for said in turns.values())


@pytest.mark.vllm
def test_the_shipped_config_runs_on_the_real_model(tmp_path: Path):
    try:
        find_model("smollm2-135m")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    sizes = ("sampler.prompts=2", "evaluation.prompts=2", "tracking.mlflow=false")
    config = load_config(Path("tools-smollm2"), ["sampler.engine=vllm", *sizes])
    store = run_here(tmp_path / "store", config)
    assert [p["policy_version"] for p in store.read("policies", run_id=RUN_ID)] == [0, 1, 2]
    assert {row["engine"] for row in store.read("rollouts", run_id=RUN_ID)} == {"vllm"}
    policy = load_policy_model(model_spec(config), seed=0)
    assert check_real_turns(store, RUN_ID, policy)  # it seldom calls a tool, and is reminded to
