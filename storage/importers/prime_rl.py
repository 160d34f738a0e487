"""prime-rl: `traces.jsonl`, one line an episode of one or more traces (or a trace by itself).

A trace is a graph of messages, each with the tokens it adds: token_ids, mask (true for sampled
ones) and logprobs (of the sampled ones). The root has no `parent`. Each message that was sampled
and has no sampled one behind it ends a branch: a sample of its own, whose earlier turns are the
sampled messages before it. Rewards are {score, weight} by name; their weighted sum is `reward`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from storage.importers import fields, tokens
from storage.importers.chat import joined, messages_of
from storage.importers.samples import RecordError, Sample, Turn

Node = Mapping[str, Any]


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the branches of the traces of a line."""
    traces = record.get("traces", [record])
    if not isinstance(traces, list) or not all(
        isinstance(trace, dict) and isinstance(trace.get("nodes"), list) for trace in traces
    ):
        raise RecordError("unexpected", "expected `traces` with `nodes`, or `nodes`")
    work = fields.mapping(fields.mapping(record.get("run")).get("work"))
    policy = fields.mapping(work.get("policy")).get("start")
    group = fields.mapping(record.get("group")).get("id")
    made = []
    for trace in traces:
        for sample in _branches(trace):
            sample.step = fields.whole(work.get("step"))
            sample.policy_version = fields.whole(policy)
            sample.group = None if group is None else str(group)
            made.append(sample)
    if not made:
        raise RecordError("placeholder", "expected a sampled message, came none at all")
    return made


def _branches(trace: Mapping[str, Any]) -> list[Sample]:
    nodes = [fields.mapping(node) for node in trace["nodes"]]
    paths = [_path(nodes, number) for number, node in enumerate(nodes) if node.get("sampled")]
    inner = {number for path in paths for number in path[:-1]}
    info, call = fields.mapping(trace.get("info")), _last_call(trace)
    sampling = fields.mapping(call.get("sampling"))
    advantage = fields.number(info.get("advantage"))
    answer = fields.mapping(fields.mapping(trace.get("task")).get("data")).get("answer")
    made = []
    for path in paths:
        if path[-1] in inner:
            continue
        branch = [nodes[number] for number in path]
        first = next(n for n, node in enumerate(branch) if node.get("sampled"))
        messages = messages_of([node.get("message") for node in branch], "nodes")
        reason = branch[-1].get("finish_reason") or call.get("finish_reason")
        model = call.get("model")
        made.append(
            Sample(
                messages=messages[:first],
                completion=joined(messages[first:]),
                answer=fields.answer(answer),
                scores=_scores(trace),
                parts={} if advantage is None else {"advantage": advantage},
                turns=_turns(branch, messages, first),
                model=model if isinstance(model, str) else None,
                temperature=fields.number(sampling.get("temperature")),
                top_p=fields.number(sampling.get("top_p")),
                max_tokens=fields.whole(sampling.get("max_tokens")),
                finish_reason=fields.stop_or_length(reason or trace.get("stop_condition")),
            )
        )
    return made


def _path(nodes: Sequence[Node], last: int) -> list[int]:
    """Return the numbers of the nodes from the root to `last`."""
    path: list[int] = []
    number: Any = last
    while number is not None:
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if not is_number or not 0 <= number < len(nodes) or len(path) >= len(nodes):
            raise RecordError("unexpected", f"expected the number of a node, came {number!r}")
        path.append(number)
        number = nodes[number].get("parent")
    return path[::-1]


def _turns(branch: Sequence[Node], messages: Sequence[dict[str, str]], first: int) -> list[Turn]:
    """Return a turn for each sampled message; none when one lacks its tokens."""
    turns: list[Turn] = []
    given: list[int] = []
    for number, node in enumerate(branch):
        ids, mask = node.get("token_ids") or [], node.get("mask") or []
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            return []
        if node.get("sampled"):
            start = next((n for n, is_sampled in enumerate(mask) if is_sampled), len(mask))
            stop = start + sum(map(bool, mask))
            if not all(mask[start:stop]):
                return []
            prompt = "".join(message["content"] for message in messages[:first])
            turn = tokens.turn(
                given + ids[:start], ids[start:stop], node.get("logprobs"),
                joined(messages[first : number + 1]), (prompt, messages[number]["content"]),
            )  # fmt: skip
            if turn is None:
                return []
            turns.append(turn)
        given = given + ids
    return turns


def _scores(trace: Mapping[str, Any]) -> dict[str, Any]:
    rewards = fields.mapping(trace.get("rewards"))
    weighted = []
    scores: dict[str, Any] = {}
    for name, reward in rewards.items():
        is_object = isinstance(reward, dict)
        scores[name] = reward.get("score") if is_object else reward
        value = fields.number(scores[name])
        weight = fields.number(reward.get("weight", 1.0)) if is_object else 1.0
        if value is not None and weight is not None:
            weighted.append(value * weight)
    total = {"reward": sum(weighted)} if weighted else {}
    metrics = fields.mapping(trace.get("metrics"))
    return total | scores | {n: v for n, v in metrics.items() if n not in scores}


def _last_call(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = trace.get("calls")
    return fields.mapping(calls[-1]) if isinstance(calls, list) and calls else {}
