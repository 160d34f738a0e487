"""NeMo Gym: `*rollouts*.jsonl`, one line a rollout, in the order of completion.

Fields: responses_create_params (what was asked), response (what came, as items), reward and further
numbers, _ng_task_index and _ng_rollout_index. The last item of a turn holds prompt_token_ids,
generation_token_ids and generation_log_probs where the engine gave them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from storage.importers import fields, tokens
from storage.importers.chat import content_text, messages_of, prompt_text
from storage.importers.samples import Message, RecordError, Sample, Turn

_OWN = {
    "responses_create_params", "response", "reward", "truncated", "terminated", "info",
    "_ng_task_index", "_ng_rollout_index", "agent_ref", "finished_naturally",
}  # fmt: skip
_ANSWERS = ("expected_answer", "answer", "ground_truth")


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the rollout of a line."""
    asked = record.get("responses_create_params")
    response = record.get("response")
    if not isinstance(asked, dict) or not isinstance(response, dict):
        raise RecordError(
            "unexpected",
            "expected objects `responses_create_params` and `response`, came "
            + ", ".join(sorted(map(repr, record))[:12]),
        )
    messages = _messages(asked)
    items = response.get("output")
    if not isinstance(items, list) or not items:
        raise RecordError("placeholder", "expected items in `response.output`, came none at all")
    texts = _texts(items)
    usage, task = fields.mapping(response.get("usage")), record.get("_ng_task_index")
    answers = [a for a in (fields.answer(record.get(name)) for name in _ANSWERS) if a is not None]
    scores = {"reward": record["reward"]} if "reward" in record else {}
    return [
        Sample(
            messages=messages,
            completion=texts[-1],
            answer=answers[0] if answers else None,
            scores=scores | fields.numeric_columns(record, {*_OWN, *_ANSWERS}),
            step=step,
            task=None if task is None else str(task),
            turns=_turns(items, texts, prompt_text(messages)),
            model=_model(response),
            temperature=fields.number(asked.get("temperature")),
            top_p=fields.number(asked.get("top_p")),
            max_tokens=fields.whole(asked.get("max_output_tokens")),
            finish_reason=_finish_reason(response, items),
            num_prompt_tokens=fields.whole(usage.get("input_tokens")),
            num_completion_tokens=fields.whole(usage.get("output_tokens")),
        )
    ]


def _messages(asked: Mapping[str, Any]) -> list[Message]:
    messages = messages_of(asked.get("input"), "responses_create_params.input")
    system = asked.get("instructions")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _texts(items: Sequence[Any]) -> list[str]:
    """Return the text of the response up to and including each item."""
    texts: list[str] = []
    text, is_assistant = "", True
    for item in items:
        said, role = _said(fields.mapping(item))
        opens = texts and not (is_assistant and role == "assistant")
        text += f"\n{role}\n{said}" if opens else f"\n{said}" if texts else said
        is_assistant = role == "assistant"
        texts.append(text)
    return texts


def _said(item: Mapping[str, Any]) -> tuple[str, str]:
    """Return what an item says, and who."""
    kind = item.get("type", "message")
    if kind == "message":
        return content_text(item.get("content")), str(item.get("role", "assistant"))
    if kind == "reasoning":
        return f"<think>{content_text(item.get('summary'))}</think>", "assistant"
    if kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        return json.dumps(call, ensure_ascii=False), "assistant"
    if kind == "function_call_output":
        output = item.get("output")
        return output if isinstance(output, str) else json.dumps(output), "tool"
    return f"[{kind}]", "assistant"


def _turns(items: Sequence[Any], texts: Sequence[str], prompt: str) -> Sequence[Turn]:
    """Return the turns of a response; none when the ids of one are a stub."""
    turns = []
    for item, text in zip(items, texts, strict=True):
        if not (isinstance(item, dict) and item.get("generation_token_ids")):
            continue
        said = _said(item)[0] if item.get("type") == "message" else ""
        turn = tokens.turn(
            item.get("prompt_token_ids"), item["generation_token_ids"],
            item.get("generation_log_probs"), text, (prompt, said),
        )  # fmt: skip
        if turn is None:
            return ()
        turns.append(turn)
    return turns


def _model(response: Mapping[str, Any]) -> str | None:
    model = response.get("model")
    return model if isinstance(model, str) else None


def _finish_reason(response: Mapping[str, Any], items: Sequence[Any]) -> str | None:
    incomplete = fields.mapping(response.get("incomplete_details")).get("reason")
    if incomplete is not None:
        return fields.stop_or_length(incomplete)
    is_completed = fields.mapping(items[-1]).get("status") == "completed"
    return "stop" if is_completed else None
