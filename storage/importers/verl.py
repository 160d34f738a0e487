"""verl: `<rollout_data_dir>/<step>.jsonl`, one line a rollout.

Fields: input, output, score, step; gts in newer versions; uid and request_id where they are logged;
any other key is a reward of its own, whose value may be text such as "True". Text only.
"""

from collections.abc import Mapping
from typing import Any

from storage.importers import fields
from storage.importers.samples import Sample

_OWN = {"input", "output", "score", "step", "gts", "uid", "request_id"}


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a line; `step` is that of the file's name."""
    given = fields.whole(record.get("step"))
    scores = {"score": record["score"]} if "score" in record else {}
    if not record.keys() <= _OWN:
        scores |= {name: value for name, value in record.items() if name not in _OWN}
    uid = record.get("uid")
    return [
        Sample(
            messages=[{"role": "user", "content": fields.text(record, "input")}],
            completion=fields.text(record, "output"),
            answer=fields.answer(record.get("gts")),
            scores=scores,
            parts={name: record[name] for name in ("uid", "request_id") if name in record},
            step=step if given is None else given,
            group=None if uid is None else str(uid),
        )
    ]
