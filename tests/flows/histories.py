"""Histories to be judged again, and what judges them: quick to write, the same every time."""

from pathlib import Path
from typing import Any

import storage
from flows.progress import Progress
from flows.rescoring import RescoreRequest, RescoreSummary, rescore
from tests.storage.rows import OPENED, rollout, tokens

Row = dict[str, Any]
GROUP_SIZE = 4
IN_PROCESS = ("task.reward_time_limit_s=off",)


def prompt_row(number: int) -> Row:
    return {
        "prompt_id": f"p{number:05d}", "task": "sums", "split": "train",
        "messages_json": f'[{{"role": "user", "content": "{number} + 1 ="}}]',
        "answer": str(number + 1), "difficulty": "easy", "meta_json": "{}",
    }  # fmt: skip


def completion(number: int, sample: int) -> str:
    """Every other sample is right."""
    return f"Let me add.\nIt is {number + 1}.\n#### {number + 1 + sample % 2}"


def write_history(
    store: storage.Store,
    num: int,
    run_id: str = "history",
    per_commit: int = 64,
    first: int = 0,
    **opened: Any,
) -> list[str]:
    """Append `num` rollouts with prompts and tokens from number `first` on; return their ids."""
    writer = store.open_stream(run_id, OPENED | opened)
    ids: list[str] = []
    for start in range(first, first + num, per_commit):
        numbers = range(start, min(start + per_commit, first + num))
        rows = [
            rollout(
                f"p{n // GROUP_SIZE:05d}", n % GROUP_SIZE, start // per_commit,
                completion=completion(n // GROUP_SIZE, n % GROUP_SIZE),
            )
            for n in numbers
        ]  # fmt: skip
        new = [writer.event_id_of("rollouts", row) for row in rows]
        texts = [f"{n // GROUP_SIZE} + 1 =" for n in numbers]
        writer.append(
            {
                "rollouts": rows,
                "rollout_tokens": [
                    tokens(
                        event_id, row["iteration"], prompt_ids=list(text.encode()),
                        completion_ids=list(row["completion"].encode()),
                        sampler_logprobs=None, logprobs_reason="made up",
                    )
                    for event_id, row, text in zip(new, rows, texts, strict=True)
                ],
                "prompts": [prompt_row(n) for n in sorted({n // GROUP_SIZE for n in numbers})],
            },
            f"b{start}",
        )  # fmt: skip
        ids += new
    return ids


def rescore_here(store: storage.Store, scorer: str, **facts: Any) -> RescoreSummary:
    with Progress(quiet=True) as progress:
        return rescore(store, RescoreRequest(scorer, **facts), progress)


def rescore_inside(store: storage.Store, scorer: str, **facts: Any) -> RescoreSummary:
    """As `rescore_here`, a reward function in this process too."""
    return rescore_here(store, scorer, settings=IN_PROCESS, **facts)


def rescore_in_child(path: Path, scorer: str, shard_rollouts: int) -> None:
    rescore_here(storage.open(path), scorer, shard_rollouts=shard_rollouts)


def check_judged_once(store: storage.Store, ids: list[str], scorer: str) -> None:
    """Every target has one final score, no event stands twice, and the store is whole."""
    rows = [row for row in store.read("scores") if row["scorer"] == scorer]
    assert sorted(row["target_id"] for row in rows) == sorted(ids)
    assert not storage.verify(store, deep=True)
