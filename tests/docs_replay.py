"""What the example store knows of replay: states, value models, picks and their continuations.

A value of a state is made up as the share of successes among the rollouts that share its prefix,
so it follows what was sampled, as a real one does.
"""

import json
import math
from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING

from tests.docs_sums import (
    MAX_TOKENS,
    TRAIN,
    completion_text,
    prompt_id,
    right_answer,
    wrong_answer,
)
from tests.storage import rows as make
from tests.storage.replay_rows import model, pick, state, value
from tests.storage.rows import Row

if TYPE_CHECKING:
    from tests.docs_example import Training

NUM_PICKS = 2
NUM_CONTINUATIONS = 4
NUM_RIGHT = (3, 1)  # of the continuations of each pick
BETA = 10.0
COPIED = (
    "prompt_id", "rollout_id", "source_run_id", "prefix_tokens", "score_id", "scorer_version",
    "value", "prompt_value", "age",
)  # fmt: skip
OUTCOMES = {  # by the success of the old answer and of the new one
    (False, True): "rescued",
    (True, True): "retained",
    (True, False): "regressed",
    (False, False): "still_failed",
}


def refit(training: "Training", iteration: int) -> None:
    """Cut what was sampled, fit a value model and judge every state by it."""
    run_id, version = training.run.run_id, f"{training.run.run_id}-{iteration}"
    known = [entry for of_one in training.past.values() for entry in of_one]
    cuts: dict[tuple[str, bytes], Row] = {}
    for rollout, _ in known:
        if rollout["role"] == "attempt":
            for length in (0, *cut_points(rollout["completion"])):
                prefix = rollout["completion"].encode()[:length]
                cuts.setdefault((rollout["prompt_id"], prefix), _state(run_id, rollout, prefix))
    rows = training.writer.append({"states": list(cuts.values())}, f"i{iteration}-states")
    states = dict(zip(cuts, (row["event_id"] for row in rows.rows["states"]), strict=True))
    fitted = model(version, iteration) | {
        "as_of": training.store.head().number, "num_states": len(states), "num_prompts": 6,
        "num_mixed_prompts": 4, "auroc": 0.75, "within_prompt_auroc": 0.625, "brier": 0.1875,
    }  # fmt: skip
    training.writer.append({"value_models": [fitted]}, f"i{iteration}-refit")
    values = [
        value(state_id, _share(known, prompt, prefix), version, iteration)
        for (prompt, prefix), state_id in states.items()
    ]
    training.writer.append({"scores": values}, f"i{iteration}-values")


def cut_points(text: str) -> list[int]:
    """Return after how many bytes a sentence or a line ends, up to four fifths of the text."""
    ends = [n + 1 for n in range(1, len(text)) if text[n - 1 : n + 1] == ". " or text[n] == "\n"]
    return [n for n in ends if n <= 0.8 * len(text)]


def continue_states(training: "Training", iteration: int) -> None:
    """Pick the states of the largest gain, continue each, and compare with the old answer."""
    arguments = {"run": training.run.run_id}
    buffer = training.store.view("replay_buffer", arguments=arguments, as_of=training.pinned)
    entries = [r for r in buffer if r["unit"] == "state" and r["eligibility_reason"] == "eligible"]
    entries.sort(key=lambda row: (row["prompt_value"] - row["value"], row["entry_id"]))
    plan = {
        "iteration": iteration, "num_candidates": len(buffer), "num_picked": NUM_PICKS,
        "num_eligible": sum(row["eligibility_reason"] == "eligible" for row in buffer),
        "share": 0.25, "reasons_json": _reasons(buffer), "buffer_sha256": "made up",
    }  # fmt: skip
    picks = [_pick(iteration, entries, position) for position in range(NUM_PICKS)]
    key = f"i{iteration}-continuation-0"
    picked = training.writer.append({"replay_plans": [plan], "picks": picks}, f"{key}-picks")
    rollouts: list[Row] = []
    tokens: list[Row] = []
    for row, num_right in zip(picked.rows["picks"], NUM_RIGHT, strict=True):
        for index in range(NUM_CONTINUATIONS):
            rollout, its_tokens = _continuation(training, row, index, index < num_right)
            rollouts.append(rollout | {"batch_key": key})
            tokens.append(its_tokens)
            training.pick_of[its_tokens["rollout_id"]] = row
    sampled = training.writer.append({"rollouts": rollouts, "rollout_tokens": tokens}, key)
    judged = training.judge(iteration, "continuation", sampled.rows["rollouts"])
    retries = [_retry(training, rollout, score) for rollout, score in judged]
    training.writer.append({"retries": retries}, f"{key}-retries")
    training.past[iteration] = judged


def _state(run_id: str, rollout: Row, prefix: bytes) -> Row:
    ids = f"{rollout['prompt_id']} {list(prefix)}"
    return state(
        rollout["event_id"],
        len(prefix),
        rollout["iteration"],
        source_run_id=run_id,
        prompt_id=rollout["prompt_id"],
        prefix_sha256=sha256(ids.encode()).hexdigest(),
        cut="line" if prefix.endswith(b"\n") else "sentence" if prefix else "prompt",
    )


def _share(known: list[tuple[Row, Row]], prompt: str, prefix: bytes) -> float:
    """Return the share of successes among the attempts that begin so, one half and two added."""
    values = [
        score["value"]
        for rollout, score in known
        if rollout["role"] == "attempt"
        and rollout["prompt_id"] == prompt
        and rollout["completion"].encode().startswith(prefix)
    ]
    return round((sum(values) + 0.5) / (len(values) + 2), 4)


def _pick(iteration: int, entries: list[Row], position: int) -> Row:
    entry = entries[position]
    gains = [row["value"] - row["prompt_value"] for row in entries]
    priorities = [math.exp(BETA * gain) for gain in gains]
    return pick(
        "state",
        entry["entry_id"],
        iteration,
        position=position,
        **{name: entry[name] for name in COPIED},
        base=gains[position],
        priority=priorities[position],
        probability=priorities[position] / sum(priorities),
    )


def _continuation(training: "Training", picked: Row, index: int, is_right: bool) -> tuple[Row, Row]:
    """Return a rollout that goes on from the picked state, and its tokens, which are bytes."""
    [source] = training.store.read("rollouts", event_ids=[picked["rollout_id"]])
    prefix = source["completion"].encode()[: picked["prefix_tokens"]].decode()
    iteration = picked["iteration"]
    problem = next(p for p in TRAIN if prompt_id(p) == picked["prompt_id"])
    guess = wrong_answer(problem, training.run.run_id, iteration, index)
    text = completion_text(problem, right_answer(problem) if is_right else guess, 0, has_line=True)
    rest = text.removeprefix(prefix)
    rollout = make.rollout(
        picked["prompt_id"], index, iteration, role="continuation", parent_id=picked["entry_id"],
        group_id=f"{training.run.run_id}-i{iteration}-{picked['entry_id'][:10]}", completion=rest,
        num_prompt_tokens=len(picked["prompt_id"]) + len(prefix), prefix_tokens=len(prefix),
        num_completion_tokens=len(rest), policy_version=iteration - 1, generate_s=1.5,
        policy_digest=f"policy-{iteration - 1}", max_tokens=MAX_TOKENS - len(prefix),
    )  # fmt: skip
    return rollout, make.tokens(
        training.writer.event_id_of("rollouts", rollout),
        iteration,
        prompt_ids=list((picked["prompt_id"] + prefix).encode()),
        completion_ids=list(rest.encode()),
        sampler_logprobs=[-(byte % 8) / 8 for byte in rest.encode()],
    )


def _retry(training: "Training", rollout: Row, score: Row) -> Row:
    picked = training.pick_of[rollout["event_id"]]
    [old_score] = [
        s for of_one in training.past.values() for r, s in of_one
        if r["event_id"] == picked["rollout_id"]
    ]  # fmt: skip
    return {
        "iteration": rollout["iteration"],
        "old_rollout_id": picked["rollout_id"],
        "new_rollout_id": rollout["event_id"],
        "scorer": score["scorer"],
        "scorer_version": score["scorer_version"],
        "prompt_id": rollout["prompt_id"],
        "unit": "state",
        "pick_id": picked["event_id"],
        "old_score_id": old_score["event_id"],
        "new_score_id": score["event_id"],
        "outcome": OUTCOMES[old_score["value"] >= 0.999, score["value"] >= 0.999],
    }


def _reasons(buffer: list[Row]) -> str:
    counts = Counter(f"{row['unit']} {row['eligibility_reason']}" for row in buffer)
    return json.dumps(dict(sorted(counts.items())))
