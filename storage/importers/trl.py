"""TRL: `completions/completions_<step>.parquet`, one row a rollout.

Columns: step, prompt, completion, one for each reward function, extras, advantage. Prompt and
completion are text or messages. Which numbers are rewards and which are extras the file does not
say: each is a score of its own. Text only.
"""

from collections.abc import Mapping
from typing import Any

from storage.importers import fields
from storage.importers.chat import messages_of, response_text
from storage.importers.samples import RecordError, Sample

_OWN = {"step", "prompt", "completion", "advantage"}
_ANSWERS = ("answer", "ground_truth", "solution")


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a row; `step` is that of the file's name."""
    if not {"prompt", "completion"} <= record.keys():
        came = ", ".join(record)
        raise RecordError("unexpected", f"expected columns prompt and completion, came {came}")
    given = fields.whole(record.get("step"))
    answers = [name for name in _ANSWERS if fields.answer(record.get(name)) is not None]
    advantage = fields.number(record.get("advantage"))
    return [
        Sample(
            messages=messages_of(record["prompt"], "prompt"),
            completion=response_text(record["completion"], "completion"),
            answer=fields.answer(record[answers[0]]) if answers else None,
            scores={
                name: value
                for name, value in record.items()
                if name not in _OWN
                and name not in answers
                and isinstance(value, str | int | float | None)
            },
            parts={} if advantage is None else {"advantage": advantage},
            step=step if given is None else given,
        )
    ]
