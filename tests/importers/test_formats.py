"""One file of each shape, written as its framework writes it, with the oddities that were seen."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.importers import (
    areal,
    nemo_gym,
    nemo_rl,
    open_instruct,
    prime_rl,
    skyrl,
    trl,
    verifiers,
    verl,
)
from storage.importers.formats import FORMATS, FileReader, find_files
from storage.importers.samples import RecordError, Sample

Row = dict[str, Any]
NAN = float("nan")


def only(samples: list[Sample]) -> Sample:
    [sample] = samples
    return sample


def test_verl_keeps_every_reward_key_and_groups_by_uid():
    line = {
        "input": "user\n1+1\n", "output": "", "gts": "2", "score": -40, "step": 3, "uid": "u-1",
        "request_id": "r-9", "acc": "True", "pred": "two", "format": 0.5,
    }  # fmt: skip
    sample = only(verl.samples(line, None))
    assert sample.completion == ""  # an empty response is one
    assert dict(sample.scores) == {"score": -40, "acc": "True", "pred": "two", "format": 0.5}
    assert (sample.step, sample.group, sample.answer) == (3, "u-1", "2")
    assert dict(sample.parts) == {"uid": "u-1", "request_id": "r-9"}


def test_a_step_may_come_from_the_name_of_the_file():
    line = {"input": "a", "output": "b", "score": 1}
    assert only(verl.samples(line, FORMATS["verl"].step_of(Path("x/17.jsonl")))).step == 17
    assert FORMATS["nemo-rl"].step_of(Path("train_data_step12.jsonl")) == 12
    assert FORMATS["trl"].step_of(Path("completions_00005.parquet")) == 5
    assert FORMATS["verl"].step_of(Path("other.jsonl")) is None


def test_trl_has_a_score_for_each_number(tmp_path: Path):
    """As `GRPOTrainer.log` writes it with pandas: a reward function that returned None is NaN."""
    path = tmp_path / "completions_00007.parquet"
    table = pa.table({
        "step": [7, 7], "prompt": ["1+1", "1+1"], "completion": ["2", "3"],
        "accuracy_reward": [1.0, NAN], "format_reward": [0.5, 0.25], "solution": ["2", "2"],
        "advantage": [0.7, -0.7], "image": [b"\x89PNG", b"\x89PNG"],
    })  # fmt: skip
    pq.write_table(table, path)
    records = list(FileReader(FORMATS["trl"], path))
    first, second = (only(list(record.samples)) for record in records)
    assert dict(first.scores) == {"accuracy_reward": 1.0, "format_reward": 0.5}
    assert list(second.scores) == ["accuracy_reward", "format_reward"]
    assert (first.answer, first.step, first.parts["advantage"]) == ("2", 7, 0.7)
    assert [record.number for record in records] == [1, 2]


def test_trl_prompts_may_be_messages():
    row = {
        "step": 1, "prompt": [{"role": "user", "content": "1+1"}],
        "completion": [{"role": "assistant", "content": "2"}], "reward_len": -3.0,
    }  # fmt: skip
    sample = only(trl.samples(row, None))
    assert (sample.messages, sample.completion) == ([{"role": "user", "content": "1+1"}], "2")


TODAY: Row = {
    "example_id": 4, "prompt": [{"role": "user", "content": "1+1"}],
    "completion": [{"role": "assistant", "content": "2"}], "reward": 1.0, "task": "default",
    "timing": {"total_ms": 3.0}, "is_completed": True, "is_truncated": False,
    "stop_condition": "max_turns_reached", "metrics": {"correct": 1.0}, "tool_defs": None,
    "token_usage": {"input_tokens": 9.0, "output_tokens": 2.0}, "info": {"a": 1}, "correct": 1.0,
    "error": None, "num_turns": 1,
}  # fmt: skip


def test_verifiers_of_today():
    sample = only(verifiers.samples(TODAY, None))
    assert dict(sample.scores) == {"reward": 1.0, "correct": 1.0, "num_turns": 1}
    assert (sample.task, sample.answer, sample.finish_reason) == ("4", None, "stop")
    assert (sample.num_completion_tokens, len(sample.turns)) == (2, 0)
    cut = only(verifiers.samples(TODAY | {"is_truncated": True}, None))
    assert cut.finish_reason == "length"


def test_verifiers_with_a_trajectory_has_turns():
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    step = {"prompt": TODAY["prompt"], "completion": TODAY["completion"], "tokens": tokens}
    [turn] = only(verifiers.samples(TODAY | {"trajectory": [step]}, None)).turns
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs) == ([1, 2], [3], [-0.5])
    without = only(verifiers.samples(TODAY | {"trajectory": [step | {"tokens": None}]}, None))
    assert not without.turns


@pytest.mark.parametrize("completion", [[], None])
def test_no_message_at_all_is_a_placeholder(completion: Any):
    with pytest.raises(RecordError) as caught:
        verifiers.samples(TODAY | {"completion": completion}, None)
    assert caught.value.kind == "placeholder"


def test_an_empty_message_is_a_response():
    line = TODAY | {"completion": [{"role": "assistant", "content": ""}]}
    assert only(verifiers.samples(line, None)).completion == ""


def node(role: str, parent: int | None, ids: list[int], **facts: Any) -> Row:
    """A node; its content is its role and its number of tokens."""
    made = {
        "message": {"role": role, "content": f"{role}{len(ids)}"}, "sampled": False,
        "token_ids": ids, "mask": [False] * len(ids), "logprobs": [],
    }  # fmt: skip
    return made | ({} if parent is None else {"parent": parent}) | facts


def test_prime_rl_concatenates_the_tokens_of_a_path():
    """Scaffold before the sampled tokens belongs to what was given, log-probs to sampled ones."""
    nodes = [
        node("user", None, [1, 2, 3]),
        node("assistant", 0, [4, 5, 6], sampled=True, mask=[False, True, True],
             logprobs=[-0.1, -0.2], finish_reason="stop"),
        node("tool", 1, [7, 8]),
        node("assistant", 2, [9, 10], sampled=True, mask=[False, True], logprobs=[-0.3]),
        node("assistant", 0, [11, 12], sampled=True, mask=[False, True], logprobs=[-0.4]),
    ]  # fmt: skip
    trace = {"nodes": nodes, "rewards": {"r": {"score": 0.5, "weight": 2.0}}, "metrics": {},
             "calls": [{"model": "m", "sampling": {"temperature": 0.7}}]}  # fmt: skip
    episode = {
        "group": {"id": "g1"}, "run": {"work": {"step": 5, "policy": {"start": 4, "end": 5}}},
        "traces": [trace],
    }  # fmt: skip
    first, second = prime_rl.samples(episode, None)
    turns = [(turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in first.turns]
    assert turns == [
        ([1, 2, 3, 4], [5, 6], [-0.1, -0.2]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10], [-0.3]),
    ]
    assert first.completion == "assistant3\ntool\ntool2\nassistant\nassistant2"
    assert [(t.prompt_ids, t.completion_ids) for t in second.turns] == [([1, 2, 3, 11], [12])]
    assert dict(first.scores) == {"reward": 1.0, "r": 0.5}
    assert (first.step, first.policy_version, first.group) == (5, 4, "g1")
    assert (first.model, first.temperature) == ("m", 0.7)


@pytest.mark.parametrize("parent", [7, -1, 1, "0", True])
def test_a_graph_with_a_wrong_parent_is_refused(parent: Any):
    nodes = [node("user", None, []), node("assistant", parent, [], sampled=True)]
    with pytest.raises(RecordError, match="expected the number of a node"):
        prime_rl.samples({"nodes": nodes}, None)


def nemo_rl_line(**facts: Any) -> Row:
    """As `log_batched_dict_as_jsonl` writes it: one element in each list, padded to 8."""
    return {
        "content": [["What is 1+1?", "2"]], "rewards": [1.0], "input_lengths": [6],
        "token_ids": [[1, 2, 3, 4, 5, 6, 0, 0]], "token_loss_mask": [[0, 0, 0, 0, 1, 1, 0, 0]],
        "sample_loss_mask": [1.0], "advantages": [[0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0]],
        "generation_logprobs": [[0.0, 0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0]],
        "prev_logprobs": [[0.0, 0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0]], "idx": 3,
    } | facts  # fmt: skip


def test_nemo_rl_is_unwrapped_and_cut_to_its_length():
    sample = only(nemo_rl.samples(nemo_rl_line(), 12))
    [turn] = sample.turns
    assert (turn.prompt_ids, turn.completion_ids) == ([1, 2, 3, 4], [5, 6])
    assert turn.logprobs == [-0.25, -0.5]
    assert (sample.messages, sample.completion) == (
        [{"role": "user", "content": "What is 1+1?"}], "2"
    )  # fmt: skip
    assert (dict(sample.scores), sample.step, sample.parts["advantage"]) == (
        {"rewards": 1.0}, 12, 0.5
    )  # fmt: skip


def test_nemo_rl_has_a_turn_for_each_stretch_of_the_mask():
    line = nemo_rl_line(
        content=[["Guess.", "3", "higher", "4"]], token_loss_mask=[[0, 0, 1, 0, 0, 1, 0, 0]]
    )
    sample = only(nemo_rl.samples(line, 1))
    assert [(t.prompt_ids, t.completion_ids) for t in sample.turns] == [
        ([1, 2], [3]), ([1, 2, 3, 4, 5], [6])
    ]  # fmt: skip
    assert [m["content"] for m in sample.messages] == ["Guess."]
    assert [turn.text for turn in sample.turns] == ["3", "3\nenvironment\nhigher\nassistant\n4"]


def test_open_instruct_is_ids_alone():
    line = {
        "step": 2, "sample_idx": 1, "prompt_idx": 0, "prompt_tokens": [5, 6],
        "response_tokens": [7, 8], "reward": 10.0, "advantage": -1.0, "finish_reason": "stop",
        "dataset": "gsm8k", "ground_truth": ["18"], "request_info": {"num_calls": 0},
        "logprobs": [-0.5, -0.25],
    }  # fmt: skip
    sample = only(open_instruct.samples(line, None))
    [turn] = sample.turns
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs) == ([5, 6], [7, 8], [-0.5, -0.25])
    assert (sample.task, sample.step, sample.answer, sample.finish_reason) == ("0", 2, "18", "stop")
    short = only(open_instruct.samples(line | {"logprobs": [-0.5]}, None)).turns[0]
    assert (short.logprobs, short.reason) == (None, "the file has 1 for 2 token ids")


def test_areal_has_versions_and_lengths():
    line = {
        "task_id": 42, "sample_idx": 0, "seqlen": 512, "prompt_len": 128, "head_version": 5,
        "tail_version": 6, "version_rle": [[5, 100], [6, 284]], "reward": 1.0,
        "prompt": "<|im_start|>user\n2+2?<|im_end|>", "completion": "4<|im_end|>",
    }  # fmt: skip
    sample = only(areal.samples(line, None))
    assert (sample.policy_version, sample.task) == (5, "42")
    assert (sample.num_prompt_tokens, sample.num_completion_tokens) == (128, 384)
    empty = only(areal.samples(line | dict.fromkeys(("seqlen", "head_version")), None))
    assert (empty.policy_version, empty.num_completion_tokens) == (None, None)


@pytest.mark.parametrize(("score", "total"), [(0.5, 0.5), ([0.0, 0.25, 1.0], 1.25)])
def test_skyrl_scores_are_numbers_or_one_for_each_token(score: Any, total: float):
    line = {
        "input_prompt": "p", "output_response": "r", "score": score, "stop_reason": "length",
        "env_class": "gsm8k", "env_extras": {"reward_spec": {"ground_truth": "7"}},
        "data_source": "gsm8k",
    }  # fmt: skip
    sample = only(skyrl.samples(line, None))
    assert dict(sample.scores) == {"score": total}
    assert (sample.answer, sample.finish_reason) == ("7", "length")


def test_what_the_engine_was_asked_for_is_kept_of_nemo_gym():
    item = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "status": "completed"}
    answer = {"type": "function_call_output", "output": "2"}
    line = {
        "responses_create_params": {"input": "1+1", "temperature": 0.6, "top_p": 0.9,
                                    "max_output_tokens": 64, "instructions": "Add."},
        "response": {"model": "m", "output": [item, answer],
                     "incomplete_details": {"reason": "max_output_tokens"},
                     "usage": {"input_tokens": 8, "output_tokens": 64}},
        "reward": 0.0, "_ng_task_index": 7, "_ng_rollout_index": 1,
    }  # fmt: skip
    sample = only(nemo_gym.samples(line, None))
    assert [m["role"] for m in sample.messages] == ["system", "user"]
    assert sample.completion == '{"name": "add", "arguments": "{\\"a\\": 1}"}\ntool\n2'
    assert (sample.temperature, sample.top_p, sample.max_tokens) == (0.6, 0.9, 64)
    assert (sample.finish_reason, sample.task, sample.model) == ("length", "7", "m")
    assert (sample.num_prompt_tokens, sample.num_completion_tokens) == (8, 64)


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_another_format_says_what_was_expected(name: str):
    with pytest.raises(RecordError, match="expected"):
        FORMATS[name].samples({"foo": 1, "bar": []}, None)


@pytest.mark.parametrize(
    ("name", "found", "passed_over"),
    [
        ("verl", ["2.jsonl", "10.jsonl"], ["metrics.jsonl"]),
        ("trl", ["completions/completions_00001.parquet"], ["other.parquet"]),
        ("prime-rl", ["step_1/traces.jsonl", "step_10/traces.jsonl"], ["step_1/log.jsonl"]),
        (
            "nemo-rl",
            ["train_data_step2.jsonl", "train_data_step10.jsonl"],
            ["val_data_step2.jsonl"],
        ),
        ("open-instruct", ["r_rollouts_000000.jsonl"], ["r_metadata.jsonl"]),
        ("areal", ["5/42.jsonl", "10/3.jsonl"], ["5/42.json"]),
        ("skyrl", ["gsm8k.jsonl"], ["aggregated_results.jsonl"]),
    ],
)
def test_a_folder_is_searched_for_the_names_of_the_format(
    name: str, found: list[str], passed_over: list[str], tmp_path: Path
):
    for file in (*found, *passed_over):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({}))
    assert [str(p.relative_to(tmp_path)) for p in find_files(FORMATS[name], tmp_path)] == found
