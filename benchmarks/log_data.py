"""Made-up rollouts that are as large and as compressible as real ones, for `log.py`.

Groups of 8 share a prompt of about 50 tokens; a completion has about 150. Token ids follow Zipf's
law over 49,152 ids, texts (about 600 characters) follow it over as many words, so both compress as
little as language does. Log-probs are float32 with all their digits: log-normal, mean about -0.5.
Two scorers judge every rollout; one in a hundred judgements times out and is repeated.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

import storage

Record = dict[str, Any]

RUN_ID = "benchmark"
VOCABULARY = 49_152
GROUP_SIZE = 8
NUM_PROMPTS = 8_192
MEAN_PROMPT_TOKENS, MEAN_COMPLETION_TOKENS = 50, 150
CHARACTERS_PER_TOKEN = 4
_ZIPF_CELLS = 2**22  # of the table that turns uniform numbers into Zipf's: 8 or more for each id
_FRACTIONS = (0.25, 0.5, 0.75)
FRAC_TIMEOUTS = 0.01
OPENED: Record = {
    "config_json": "{}", "seed_root": 7, "planned_iterations": 1, "code_version": "benchmark",
    "packages_json": "{}",
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """The fixed parts: Zipf's table, a word for every token id, the prompts and how hard they are.

    Attributes:
        zipf: [cells] int32, uniform cell to token id.
        words: [VOCABULARY] words with a space behind them.
        prompt_ids: token ids by prompt.
        solve_rates: [NUM_PROMPTS] chance of a completion to be right.
    """

    zipf: np.ndarray
    words: np.ndarray
    prompt_ids: list[list[int]]
    solve_rates: np.ndarray


def make_data(seed: int = 0) -> Data:
    """Return the fixed parts for a seed."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / (np.arange(VOCABULARY) + 2.7)
    edges = np.round(np.cumsum(weights) / weights.sum() * _ZIPF_CELLS).astype(np.int64)
    ranks = np.repeat(np.arange(VOCABULARY), np.diff(edges, prepend=0))
    zipf = rng.permutation(VOCABULARY).astype(np.int32)[ranks]
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en")]
    lengths = rng.choice([1, 2, 3, 4], VOCABULARY, p=[0.2, 0.5, 0.25, 0.05])
    words = np.array(
        ["".join(rng.choice(syllables, length)) + " " for length in lengths], dtype=object
    )
    sizes = rng.integers(MEAN_PROMPT_TOKENS // 2, 3 * MEAN_PROMPT_TOKENS // 2, NUM_PROMPTS)
    prompts = [zipf[rng.integers(0, len(zipf), n)].tolist() for n in sizes]
    return Data(zipf, words, prompts, rng.beta(0.6, 0.6, NUM_PROMPTS))


def make_records(data: Data, num: int, iteration: int, run_id: str = RUN_ID) -> list[Record]:
    """Return `num` rollouts of an iteration, each with its tokens and its scores."""
    rng = np.random.default_rng([iteration, *run_id.encode()])
    sizes = rng.integers(MEAN_COMPLETION_TOKENS // 3, 5 * MEAN_COMPLETION_TOKENS // 3, num)
    ends = np.cumsum(sizes)
    ids = data.zipf[rng.integers(0, len(data.zipf), ends[-1])]
    logprobs = -np.exp(rng.normal(-2.5, 1.9, ends[-1])).astype(np.float32)
    prompts = np.repeat(rng.permutation(NUM_PROMPTS), GROUP_SIZE)[:num]
    is_right = rng.random(num) < data.solve_rates[prompts]
    seeds = rng.integers(0, 2**62, num).tolist()
    records = []
    for n, (prompt, end, size) in enumerate(
        zip(prompts.tolist(), ends.tolist(), sizes.tolist(), strict=True)
    ):
        sampled = ids[end - size : end]
        text = "".join(data.words[sampled].tolist())[: size * CHARACTERS_PER_TOKEN]
        record = _rollout(iteration, prompt, n % GROUP_SIZE, seeds[n], text)
        record["id"] = storage.event_id("rollouts", {**record, "run_id": run_id})
        record["num_prompt_tokens"] = len(data.prompt_ids[prompt])
        record["num_completion_tokens"] = size
        record["prompt_ids"] = data.prompt_ids[prompt]
        record["completion_ids"] = sampled.tolist()
        record["sampler_logprobs"] = logprobs[end - size : end].tolist()
        record["scores"] = _scores(rng.random(3).tolist(), bool(is_right[n]))
        records.append(record)
    return records


def table_rows(records: list[Record]) -> dict[str, list[Record]]:
    """Return the records as rows of the log's tables."""
    rollouts, tokens, scores = [], [], []
    for record in records:
        own = ("id", "prompt_ids", "completion_ids", "sampler_logprobs", "scores")
        rollouts.append({k: v for k, v in record.items() if k not in own})
        link = {"iteration": record["iteration"], "rollout_id": record["id"]}
        tokens.append(link | {name: record[name] for name in own[1:4]})
        target = {"iteration": record["iteration"], "target_id": record["id"]}
        scores += [target | score for score in record["scores"]]
    return {"rollouts": rollouts, "rollout_tokens": tokens, "scores": scores}


def _rollout(iteration: int, prompt: int, sample: int, seed: int, text: str) -> Record:
    return {
        "iteration": iteration, "role": "attempt", "prompt_id": f"prompt-{prompt:06d}",
        "sample_index": sample, "parent_id": "", "attempt": 0,
        "group_id": f"g-{iteration}-{prompt}", "policy_version": iteration // 4,
        "policy_digest": f"{iteration // 4:064x}", "prefix_tokens": 0, "finish_reason": "stop",
        "status": "ok", "completion": text, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "max_tokens": 512, "seed": seed, "engine": "vllm", "sync": "lora",
        "logprob_mode": "processed", "batch_key": f"i{iteration:06d}-attempt-0",
        "generate_s": 12.5 + iteration,
    }  # fmt: skip


def _scores(draws: list[float], is_right: bool) -> list[Record]:
    """Return what the scorers `exact` and `format` say; `draws` are three uniform numbers."""
    exact = float(is_right) if draws[0] < 0.95 else _FRACTIONS[int(draws[1] * 3)]
    form = 1.0 if draws[1] < 0.7 else _FRACTIONS[int(draws[2] * 3)]
    values = {"exact": exact, "format": form}
    scores = [_score(name, value, 0, draws[2]) for name, value in values.items()]
    if draws[2] < FRAC_TIMEOUTS:
        scores.append(_score("exact", exact, 1, draws[1]))
        scores[0] |= {"value": None, "status": "timeout"}
    return scores


def _score(scorer: str, value: float | None, attempt: int, draw: float) -> Record:
    return {
        "scorer": scorer, "scorer_version": "1", "attempt": attempt, "target_kind": "rollout",
        "kind": "reward", "value": value, "status": "ok", "components_json": "{}", "feedback": "",
        "elapsed_ms": round(draw * 10, 4),
    }  # fmt: skip
