"""NeMo-RL: `train_data_step<N>.jsonl`, one line a sample; the step is in the name.

Every value but idx is a list of one element: content (the texts of the messages, or one text),
rewards, input_lengths, token_ids, token_loss_mask, generation_logprobs, advantages and others.
Sequences are padded to the longest of their batch. Each stretch of ones in the mask is a turn.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from storage.importers import fields, tokens
from storage.importers.samples import Message, RecordError, Sample, Turn

_SEQUENCES = ("token_ids", "token_loss_mask", "generation_logprobs")


def samples(record: Mapping[str, Any], step: int | None) -> list[Sample]:
    """Return the sample of a line; `step` is that of the file's name."""
    if "content" not in record and "token_ids" not in record:
        came = ", ".join(sorted(map(repr, record))[:12])
        raise RecordError("unexpected", f"expected `content` or `token_ids`, came {came}")
    spans = _spans(record)
    texts = _texts(fields.only(record.get("content")))
    num_said = max(1, min(2 * len(spans) - 1, len(texts) - 1))  # turns and what is between
    messages: list[Message] = []
    if len(texts) > 1:
        messages = [{"role": "user", "content": text} for text in texts[:-num_said]]
    said = texts[-num_said:]
    advantage = fields.only(record.get("advantages"))
    if isinstance(advantage, list):
        advantage = next((a for a in advantage if a), 0.0)
    advantage = fields.number(advantage)
    return [
        Sample(
            messages=messages,
            completion=_joined(said),
            scores={
                name: fields.only(record[name])
                for name in ("rewards", "filtered_rewards")
                if name in record
            },
            parts={} if advantage is None else {"advantage": advantage},
            step=step,
            turns=_turns(record, spans, said),
        )
    ]


def _texts(content: Any) -> list[str]:
    """Return the texts of the messages; of a single text, that alone."""
    texts = content if isinstance(content, list) else [content]
    if any(not isinstance(text, str | None) for text in texts):
        raise RecordError("unexpected", "expected `content` as a text or a list of texts")
    return [text or "" for text in texts]


def _joined(said: Sequence[str]) -> str:
    """Return the texts of turns and of what the environment said between them."""
    first, *rest = said
    roles = ("environment", "assistant")
    return first + "".join(f"\n{roles[n % 2]}\n{text}" for n, text in enumerate(rest))


def _spans(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return where the sampled stretches begin and end."""
    mask, length = (
        fields.only(record.get("token_loss_mask")),
        fields.only(record.get("input_lengths")),
    )
    if not isinstance(mask, list) or not isinstance(length, int | float):
        return []
    spans, start = [], 0
    for is_sampled, stretch in groupby(mask[: int(length)], bool):
        stop = start + sum(1 for _ in stretch)
        spans += [(start, stop)] * is_sampled
        start = stop
    return spans


def _turns(
    record: Mapping[str, Any], spans: Sequence[tuple[int, int]], said: Sequence[str]
) -> Sequence[Turn]:
    ids, mask, logprobs = (fields.only(record.get(name)) for name in _SEQUENCES)
    if not isinstance(ids, list) or len(ids) != len(mask or ()):
        return ()
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        logprobs = []
    turns = []
    for number, (start, stop) in enumerate(spans):
        text = _joined(said[: 2 * number + 1])
        own = said[2 * number] if 2 * number < len(said) else ""
        turn = tokens.turn(ids[:start], ids[start:stop], logprobs[start:stop], text, ("", own))
        if turn is None:
            return ()
        turns.append(turn)
    return turns
