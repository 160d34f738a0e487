"""open-instruct: `<run>_rollouts_<shard>.jsonl` of `--save_traces`, one line a rollout.

Fields: step, sample_idx, prompt_idx (within the step), prompt_tokens, response_tokens, logprobs,
reward, advantage, finish_reason, dataset, ground_truth. There is no text: the ids are all there is.
"""

from collections.abc import Mapping
from typing import Any

from storage.importers import fields, tokens
from storage.importers.samples import RecordError, Sample


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a line."""
    prompt_ids, completion_ids = record.get("prompt_tokens"), record.get("response_tokens")
    if not isinstance(prompt_ids, list) or not isinstance(completion_ids, list):
        raise RecordError(
            "unexpected",
            "expected lists `prompt_tokens` and `response_tokens`, came "
            + ", ".join(sorted(map(repr, record))[:12]),
        )
    turn = tokens.turn(prompt_ids, completion_ids, record.get("logprobs"), "", ("", ""))
    if turn is None:
        raise RecordError("placeholder", "expected token ids of prompt and response, came none")
    advantage = fields.number(record.get("advantage"))
    prompt = record.get("prompt_idx")
    return [
        Sample(
            messages=[],
            completion="",
            answer=fields.answer(record.get("ground_truth")),
            scores={"reward": record["reward"]} if "reward" in record else {},
            parts={} if advantage is None else {"advantage": advantage},
            step=fields.whole(record.get("step")),
            task=None if prompt is None else str(prompt),
            turns=[turn],
            finish_reason=fields.stop_or_length(record.get("finish_reason")),
        )
    ]
