"""Four questions to the same rollouts: in the log, and in JSONL read by DuckDB and by Polars.

A JSONL line is a rollout with its scores (and its tokens) inside, so it needs no join; both readers
are told the types of just the fields a question needs. Every answer is brought into one form and
compared, so that nobody wins by another answer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import storage

Answer = list[tuple[Any, ...]]
Ask = Callable[[], Answer]

LATEST, TOP, REWARD, STORY = (
    "latest score by policy version", "top scores per prompt", "reward by iteration",
    "story of one rollout",
)  # fmt: skip
_TYPES = {
    "id": "varchar", "iteration": "integer", "policy_version": "integer", "prompt_id": "varchar",
    "scores": "struct(scorer varchar, attempt integer, value double)[]",
}  # fmt: skip
_TOKEN_TYPES = {
    "prompt_ids": "integer[]", "completion_ids": "integer[]", "sampler_logprobs": "float[]",
}  # fmt: skip

LOG_SQL = {
    LATEST: """
        select rollout.policy_version, count(score.value), avg(score.value)
        from latest_scores as score join rollouts as rollout on rollout.event_id = score.target_id
        where score.scorer = 'exact'
        group by rollout.policy_version order by rollout.policy_version""",
    TOP: """
        select rollout.prompt_id, max(score.value, 3)
        from latest_scores as score join rollouts as rollout on rollout.event_id = score.target_id
        where score.scorer = 'exact'
        group by rollout.prompt_id order by rollout.prompt_id""",
    REWARD: """
        select score.iteration, count(score.value), avg(score.value)
        from latest_scores as score where score.scorer = 'exact'
        group by score.iteration order by score.iteration""",
}
_EXACT = "list_filter(scores, lambda score: score.scorer = 'exact')[-1].value"
_GROUPED = "select {key}, count(value), avg(value) from latest group by {key} order by {key}"
_JSONL_SQL = {
    LATEST: _GROUPED.format(key="policy_version"),
    TOP: "select prompt_id, max(value, 3) from latest group by prompt_id order by prompt_id",
    REWARD: _GROUPED.format(key="iteration"),
}
_KEYS = {LATEST: "policy_version", TOP: "prompt_id", REWARD: "iteration"}


def ask_log(store: storage.Store, event_id: str) -> dict[str, Ask]:
    """Return the questions, put to a store; the story is what `rrl show` tells."""

    def tell() -> Answer:
        from storage.stories import story

        rows = story(store, event_id)
        [tokens], scores = rows["rollout_tokens"], rows["scores"]
        return [(event_id, len(tokens["completion_ids"]), len(scores))]

    asks: dict[str, Ask] = {
        name: lambda query=query: store.sql(query).fetchall() for name, query in LOG_SQL.items()
    }
    return asks | {STORY: tell}


def ask_duckdb(path: Path, event_id: str, with_tokens: bool) -> dict[str, Ask]:
    """Return the questions, put to a JSONL file by DuckDB."""
    import duckdb

    connection = duckdb.connect(":memory:")

    def source(names: list[str], types: dict[str, str]) -> str:
        fields = ", ".join(f"{name}: '{types[name]}'" for name in names)
        return f"read_json('{path}', format = 'newline_delimited', columns = {{{fields}}})"

    def grouped(name: str) -> Answer:
        key = _KEYS[name]
        lines = source([key, "scores"], _TYPES)
        latest = f"select {key}, {_EXACT} as value from {lines}"  # noqa: S608 - our own names
        query = f"with latest as ({latest}) {_JSONL_SQL[name]}"
        return connection.sql(query).fetchall()

    def tell() -> Answer:
        types = {"num_completion_tokens": "integer", **_TYPES}
        names = ["id", "num_completion_tokens", "iteration", "prompt_id", "scores"]
        if with_tokens:
            types |= _TOKEN_TYPES
            names += _TOKEN_TYPES
        query = f"select * from {source(names, types)} where id = $id"  # noqa: S608
        [row] = connection.sql(query, params={"id": event_id}).fetchall()
        return [(row[0], row[1], len(row[4]))]

    return {name: lambda name=name: grouped(name) for name in _KEYS} | {STORY: tell}


def ask_polars(path: Path, event_id: str, with_tokens: bool) -> dict[str, Ask]:
    """Return the questions, put to a JSONL file by Polars."""
    import polars as pl

    score = pl.Struct({"scorer": pl.String, "attempt": pl.Int32, "value": pl.Float64})
    types: dict[str, Any] = {
        "id": pl.String, "iteration": pl.Int32, "policy_version": pl.Int32,
        "prompt_id": pl.String, "num_completion_tokens": pl.Int32, "scores": pl.List(score),
    }  # fmt: skip
    token_types: dict[str, Any] = {
        "prompt_ids": pl.List(pl.Int32), "completion_ids": pl.List(pl.Int32),
        "sampler_logprobs": pl.List(pl.Float32),
    }  # fmt: skip
    element = pl.element().struct
    exact = pl.element().filter(element.field("scorer") == "exact").struct.field("value")
    latest = pl.col("scores").list.eval(exact).list.last().alias("value")
    measures = [pl.col("value").count().alias("num"), pl.col("value").mean().alias("mean")]

    def scan(schema: dict[str, Any]) -> Any:
        return pl.scan_ndjson(path, schema=schema)

    def grouped(name: str) -> Answer:
        key = _KEYS[name]
        wanted = [pl.col("value").top_k(3)] if name == TOP else measures
        lines = scan({key: types[key], "scores": types["scores"]})
        found = lines.select(key, latest).group_by(key).agg(wanted).sort(key).collect()
        if name == TOP:
            return [(k, sorted(v for v in values if v is not None)) for k, values in found.rows()]
        return found.rows()

    def tell() -> Answer:
        lines = scan(types | (token_types if with_tokens else {}))
        [row] = lines.filter(pl.col("id") == event_id).collect().to_dicts()
        return [(row["id"], row["num_completion_tokens"], len(row["scores"]))]

    return {name: lambda name=name: grouped(name) for name in _KEYS} | {STORY: tell}


def comparable(answer: Answer) -> Answer:
    """Return an answer with floats rounded and lists sorted: readers add in another order."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return sorted(plain(item) for item in value)
        return round(value, 9) if isinstance(value, float) else value

    return [tuple(plain(value) for value in row) for row in answer]
