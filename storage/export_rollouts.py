"""Rollouts as files for others: JSON lines, Parquet, a Hugging Face dataset, verl, TRL.

    jsonl     a line each, also a file of problems for the task `jsonl`
    parquet   the same as columns
    hf        a folder that `datasets.load_dataset` opens: Parquet by split, and a card
    verl      `<step>.jsonl`, as its `rollout_data_dir`
    trl       `completions/completions_<step>.parquet`, as its `log_completions`

What verl wrote and this log imported is written with the same fields again. A prompt of one message
by the user is that message's text; where others speak too, each has a line with its role. The step
of what was imported is the file's, else the iteration.

Invariant: a completion goes out as the text it is, and nothing is read beyond the commit that was
asked about. A target appears whole or not at all. In memory are the ids, and the rows of a chunk;
for TRL those of a step.
"""

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.answers import printable
from storage.console import selected_ids
from storage.errors import QueryError
from storage.identity import event_id
from storage.importers.chat import prompt_text
from storage.importers.rows import AS_WRITTEN, ENGINE, TURN_ROLE
from storage.store import Store

COLUMN = "rollout_id"
_ROWS_AT_ONCE = 1_024
_FINAL = ("ok", "unscorable")
_NAMES = ("uid", "request_id")  # that verl gives to groups and rollouts
_VERL, _TRL = ("input", "output", "gts", "score", "step"), ("step", "prompt", "completion")

Row = dict[str, Any]
Written = Iterator[tuple[float, int]]  # fraction done and rollouts written so far


@dataclass(frozen=True)
class Example:
    """A rollout with its prompt, its token ids and, by scorer, the judgement that counts.

    `main` is the scorer whose value is its reward.
    """

    rollout: Row
    prompt: Row
    tokens: Row | None
    scores: Mapping[str, Row]
    main: str | None

    @property
    def reward(self) -> float | None:
        """The value of the scorer that is the reward of its run."""
        score = self.scores.get(self.main or "")
        return None if score is None else score["value"]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt."""
        messages: list[dict[str, str]] = json.loads(self.prompt["messages_json"])
        return messages

    @property
    def step(self) -> int:
        """The step of what was imported where it is known, else the iteration."""
        is_known = self.rollout["engine"] == ENGINE and self.rollout["policy_version"] >= 0
        return int(self.rollout["policy_version" if is_known else "iteration"])


Chunks = Iterator[tuple[float, list[Example]]]


def export_rollouts(
    store: Store, shape: str, output: Path, query: str | None = None, as_of: int | None = None
) -> Written:
    """Write the rollouts that a query names; yield how far it is.

    Args:
        store: the store.
        shape: jsonl, parquet, hf, verl or trl.
        output: a file or folder that does not exist yet.
        query: one SELECT with the one column rollout_id; None: all that have a completion, of a
            conversation its last turn.
        as_of: commit number; None is the newest.

    Raises:
        QueryError: the query is wrong, or names what is no rollout with a completion; the output
            exists, or its folder does not.
        DamagedError: a segment it reads is missing or was changed.
    """
    output = output.absolute()
    if output.exists() or output.is_symlink():
        raise QueryError(f"--output: expected a new path, but `{output}` exists; name another")
    if not output.parent.is_dir():
        raise QueryError(f"--output: expected a path in an existing folder, came `{output}`")
    number = store.number(as_of)
    ids = _ids(store, query, number, by_step=shape in ("verl", "trl"))
    partial = output.with_name(f".{output.name}.{secrets.token_hex(8)}")
    try:
        yield from SHAPES[shape](_chunks(store, ids, number), partial)
        partial.rename(output)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def _ids(store: Store, query: str | None, number: int, by_step: bool) -> list[str]:
    """Return the ids of the rollouts, in the order they were committed, or by step before that."""
    named = None if query is None else set(selected_ids(store, query, COLUMN, as_of=number))
    steps = f"if(engine = '{ENGINE}' and policy_version >= 0, policy_version, iteration), "
    order = f"{steps if by_step else ''}_commit, _row"
    found: list[str] = []
    for batch in store.batches(
        f"select event_id, role from rollouts where status = 'ok' order by {order}",  # noqa: S608
        as_of=number,
    ):
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        found += [i for i, role in rows if (role != TURN_ROLE if named is None else i in named)]
    if not found and not named:
        raise QueryError("expected rollouts to export, there are none: name others with --query")
    if named is not None and len(found) < len(named):
        unknown = printable(min(named - set(found)))
        raise QueryError(
            f"the query names {len(named) - len(found)} ids that are no rollouts with a completion "
            f"as of commit {number}, the first `{unknown}`; name `event_id` of `rollouts` whose "
            f"status is ok, as {COLUMN}"
        )
    return found


def _chunks(store: Store, ids: Sequence[str], number: int) -> Chunks:
    judges = {
        run_id: (scorer, version)
        for run_id, scorer, version in store.sql(
            "select run_id, arg_max(scorer, iteration), arg_max(scorer_version, iteration) "
            "from reward_scorers group by run_id",
            as_of=number,
        ).fetchall()
    }
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        chunk = ids[first : first + _ROWS_AT_ONCE]
        rollouts = {r["event_id"]: r for r in store.read("rollouts", event_ids=chunk, as_of=number)}
        prompts = _rows_at(store, "prompts", rollouts.values(), number)
        places = [
            {"run_id": r["run_id"], "iteration": r["iteration"], "rollout_id": r["event_id"]}
            for r in rollouts.values()
        ]
        tokens = _rows_at(store, "rollout_tokens", places, number)
        scores = _scores(store, chunk, number)
        yield (
            (first + len(chunk)) / len(ids),
            [_example(rollouts[i], prompts, tokens, scores.get(i, []), judges) for i in chunk],
        )


def _rows_at(store: Store, table: str, places: Iterable[Row], number: int) -> dict[str, Row]:
    ids = {event_id(table, place) for place in places}
    return {row["event_id"]: row for row in store.read(table, event_ids=ids, as_of=number)}


def _scores(store: Store, ids: Sequence[str], number: int) -> dict[str, list[Row]]:
    """Return the judgements of rollouts, by rollout, in the order they were committed."""
    relation = store.sql(
        "select target_id, scorer, scorer_version, attempt, status, value, components_json "
        "from scores where target_id in (select unnest($ids::varchar[])) order by _commit, _row",
        {"ids": list(ids)},
        as_of=number,
    )
    found: dict[str, list[Row]] = {}
    for values in relation.fetchall():
        row = dict(zip(relation.columns, values, strict=True))
        found.setdefault(row["target_id"], []).append(row)
    return found


def _example(
    rollout: Row,
    prompts: Mapping[str, Row],
    tokens: Mapping[str, Row],
    scores: Sequence[Row],
    judges: Mapping[str, tuple[str, str]],
) -> Example:
    scorer, version = judges.get(rollout["run_id"], (None, None))
    kept: dict[str, Row] = {}
    for row in scores:  # a scorer's newest version, but of the reward's scorer the one that counts
        before = kept.get(row["scorer"])
        if row["scorer"] == scorer and row["scorer_version"] != version:
            continue
        is_other = before is None or before["scorer_version"] != row["scorer_version"]
        if before is None or is_other or _rank(row) < _rank(before):
            kept[row["scorer"]] = row
    place = {"run_id": rollout["run_id"], "iteration": rollout["iteration"]}
    return Example(
        rollout,
        prompts[event_id("prompts", rollout)],
        tokens.get(event_id("rollout_tokens", {**place, "rollout_id": rollout["event_id"]})),
        kept,
        scorer,
    )


def _rank(score: Row) -> tuple[bool, int]:
    return score["status"] not in _FINAL, -score["attempt"]


_SCHEMA = pa.schema(
    [
        (COLUMN, pa.string()), ("run_id", pa.string()), ("iteration", pa.int32()),
        ("role", pa.string()), ("prompt_id", pa.string()), ("group_id", pa.string()),
        ("sample_index", pa.int32()), ("policy_version", pa.int32()), ("task", pa.string()),
        ("split", pa.string()),
        ("messages", pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))),
        ("answer", pa.string()), ("completion", pa.string()), ("finish_reason", pa.string()),
        ("temperature", pa.float64()), ("reward", pa.float64()), ("rewards_json", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())), ("completion_ids", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())), ("sampled_bounds", pa.list_(pa.int32())),
    ]
)  # fmt: skip


def _plain(example: Example) -> Row:
    """Return the columns of an example."""
    rewards = {name: score["value"] for name, score in example.scores.items()}
    own = {
        COLUMN: example.rollout["event_id"],
        "messages": example.messages,
        "reward": example.reward,
        "rewards_json": json.dumps(rewards, ensure_ascii=False),
    }
    rows = (own, example.rollout, example.prompt, example.tokens or {})
    return {name: next((r[name] for r in rows if name in r), None) for name in _SCHEMA.names}


def _write_jsonl(chunks: Chunks, path: Path) -> Written:
    num_lines = 0
    with path.open("x", encoding="utf-8") as file:
        for done_frac, examples in chunks:
            for example in examples:
                line = _plain(example)
                line["rewards"] = json.loads(line.pop("rewards_json"))
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            num_lines += len(examples)
            yield done_frac, num_lines


def _write_parquet(chunks: Chunks, path: Path) -> Written:
    num_rows = 0
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for done_frac, examples in chunks:
            writer.write_table(pa.Table.from_pylist(list(map(_plain, examples)), _SCHEMA))
            num_rows += len(examples)
            yield done_frac, num_rows


def _write_hf(chunks: Chunks, folder: Path) -> Written:
    """Write a Parquet file for each split, and a card that names them."""
    (folder / "data").mkdir(parents=True)
    writers: dict[str, pq.ParquetWriter] = {}
    num_rows = 0
    with ExitStack() as stack:
        for done_frac, examples in chunks:
            by_split: dict[str, list[Row]] = {}
            for row in map(_plain, examples):
                by_split.setdefault(row["split"], []).append(row)
            for split, rows in by_split.items():
                if split not in writers:
                    path = folder / "data" / f"{split}.parquet"
                    writer = pq.ParquetWriter(path, _SCHEMA, compression="zstd")
                    writers[split] = stack.enter_context(writer)
                writers[split].write_table(pa.Table.from_pylist(rows, _SCHEMA))
            num_rows += len(examples)
            yield done_frac, num_rows
    files = "".join(
        f"  - split: {split}\n    path: data/{split}.parquet\n" for split in sorted(writers)
    )
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n\n# Rollouts\n\n"
    (folder / "README.md").write_text(card + f"{num_rows} rollouts, exported by `rrl export hf`.\n")


def _write_verl(chunks: Chunks, folder: Path) -> Written:
    folder.mkdir()
    num_lines = 0
    for done_frac, examples in chunks:
        for step, of_step in groupby(examples, lambda example: example.step):
            with (folder / f"{step}.jsonl").open("a", encoding="utf-8") as file:
                for example in of_step:
                    file.write(json.dumps(_verl_line(example), ensure_ascii=False) + "\n")
                    num_lines += 1
        yield done_frac, num_lines


def _verl_line(example: Example) -> Row:
    main = example.scores.get(example.main or "")
    components = {} if main is None else json.loads(main["components_json"])
    names = {name: components[name] for name in _NAMES if name in components}
    if example.rollout["engine"] != ENGINE:
        names = {"uid": example.rollout["group_id"]}
    answer = example.prompt["answer"]
    others = {
        name: _written(score)
        for name, score in example.scores.items()
        if name != example.main and name not in _VERL
    }
    return {
        "input": prompt_text(example.messages),
        "output": example.rollout["completion"],
        **({} if answer is None else {"gts": answer}),
        **({} if main is None else {"score": _written(main)}),
        "step": example.step,
        **others,
        **names,
    }


def _written(score: Row) -> Any:
    """Return a judgement as it was written where it was imported from, else its value."""
    return json.loads(score["components_json"]).get(AS_WRITTEN, score["value"])


def _write_trl(chunks: Chunks, folder: Path) -> Written:
    (folder / "completions").mkdir(parents=True)
    done = [0.0]

    def examples() -> Iterator[Example]:
        for done_frac, chunk in chunks:
            yield from chunk
            done[0] = done_frac

    num_rows = 0
    for step, of_step in groupby(examples(), lambda example: example.step):
        rows = [_trl_row(example) for example in of_step]
        names = list(dict.fromkeys(name for row in rows for name in row))
        names.append(names.pop(names.index("advantage")))
        columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
        path = folder / "completions" / f"completions_{step:05d}.parquet"
        pq.write_table(pa.table(columns), path)
        num_rows += len(rows)
        yield done[0], num_rows


def _trl_row(example: Example) -> Row:
    main = example.scores.get(example.main or "")
    components = {} if main is None else json.loads(main["components_json"])
    advantage = components.get("advantage")
    values = {n: math.nan if s["value"] is None else s["value"] for n, s in example.scores.items()}
    return {
        "step": example.step,
        "prompt": prompt_text(example.messages),
        "completion": example.rollout["completion"],
        **{name: value for name, value in values.items() if name not in _TRL},
        "advantage": math.nan if advantage is None else float(advantage),
    }


SHAPES: dict[str, Callable[[Chunks, Path], Written]] = {
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "hf": _write_hf,
    "verl": _write_verl,
    "trl": _write_trl,
}
