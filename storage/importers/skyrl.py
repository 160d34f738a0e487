"""SkyRL: `<data source>.jsonl` of an evaluation dump, one line a rollout.

Fields: input_prompt, output_response, score (a number, or one for each token, whose sum counts),
stop_reason, env_class, env_extras, data_source. `aggregated_results.jsonl` beside them holds means
and is passed over. Text only.
"""

from collections.abc import Mapping
from typing import Any

from storage.importers import fields
from storage.importers.samples import Sample


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a line."""
    extras = fields.mapping(record.get("env_extras"))
    spec = fields.mapping(extras.get("reward_spec") or extras.get("reward_model"))
    score = record.get("score")
    if isinstance(score, list):
        score = sum(fields.number(part) or 0.0 for part in score)
    return [
        Sample(
            messages=[{"role": "user", "content": fields.text(record, "input_prompt")}],
            completion=fields.text(record, "output_response"),
            answer=fields.answer(spec.get("ground_truth")),
            scores={"score": score} if "score" in record else {},
            step=step,
            finish_reason=fields.stop_or_length(record.get("stop_reason")),
        )
    ]
