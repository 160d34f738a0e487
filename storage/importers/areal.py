"""AReaL: `<rollout>/<version>/<task_id>.jsonl` of `dump_to_file`, one line a sample.

Fields: task_id, sample_idx, seqlen, prompt_len, head_version and tail_version (policy versions of
its first and last token), reward, prompt, completion; original_reward where rewards were shaped.
Text only.
"""

from collections.abc import Mapping
from typing import Any

from storage.importers import fields
from storage.importers.samples import Sample


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the sample of a line."""
    length, num_prompt = (fields.whole(record.get(name)) for name in ("seqlen", "prompt_len"))
    task = record.get("task_id")
    return [
        Sample(
            messages=[{"role": "user", "content": fields.text(record, "prompt")}],
            completion=fields.text(record, "completion"),
            scores={name: record[name] for name in ("reward", "original_reward") if name in record},
            parts={name: record[name] for name in ("tail_version",) if name in record},
            policy_version=fields.whole(record.get("head_version")),
            task=None if task is None else str(task),
            num_prompt_tokens=num_prompt,
            num_completion_tokens=None
            if length is None or num_prompt is None
            else max(0, length - num_prompt),
        )
    ]
