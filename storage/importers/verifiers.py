"""verifiers: `results.jsonl` of an evaluation, in the shapes of several years.

The id is `example_id`, before that `id`, before that none. Prompt and completion are messages or
text. Metrics are top-level columns, in newer versions also the object `metrics`. With the state
column `trajectory`, each of its steps has tokens. An aborted run writes its lines as if they were
whole, with a completion of no messages at all: a placeholder.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from storage.importers import fields, tokens
from storage.importers.chat import joined, messages_of, response_text
from storage.importers.samples import Sample, Turn

_OWN = {
    "id", "example_id", "prompt", "completion", "answer", "reward", "task", "info", "metrics",
    "generation_ms", "scoring_ms", "total_ms", "timing", "token_usage", "tool_defs", "trajectory",
    "is_completed", "is_truncated", "stop_condition", "error", "error_chain", "long_error_chain",
}  # fmt: skip


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a line."""
    messages = messages_of(record.get("prompt"), "prompt")
    completion = response_text(record.get("completion"), "completion")
    is_truncated = record.get("is_truncated")
    example = record.get("example_id", record.get("id"))
    usage = fields.mapping(record.get("token_usage"))
    scores = {"reward": record["reward"]} if "reward" in record else {}
    scores |= fields.numeric_columns(fields.mapping(record.get("metrics")), ())
    scores |= fields.numeric_columns(record, _OWN)
    return [
        Sample(
            messages=messages,
            completion=completion,
            answer=fields.answer(record.get("answer")),
            scores=scores,
            step=step,
            task=None if example is None else str(example),
            turns=_turns(record.get("trajectory"), completion),
            finish_reason={True: "length", False: "stop"}.get(is_truncated)
            if isinstance(is_truncated, bool)
            else None,
            num_completion_tokens=fields.whole(usage.get("output_tokens")),
        )
    ]


def _turns(trajectory: Any, completion: str) -> Sequence[Turn]:
    """Return the turns of a trajectory; none when one of them lacks its tokens."""
    if not isinstance(trajectory, list):
        return ()
    turns = []
    for number, step in enumerate(trajectory, 1):
        given = fields.mapping(fields.mapping(step).get("tokens"))
        said = response_text(fields.mapping(step).get("completion"), "trajectory")
        prompt = joined(messages_of(fields.mapping(step).get("prompt"), "trajectory"))
        turn = tokens.turn(
            given.get("prompt_ids"),
            given.get("completion_ids"),
            given.get("completion_logprobs"),
            completion if number == len(trajectory) else said,
            (prompt, said),
        )
        if turn is None:
            return ()
        turns.append(turn)
    return turns
