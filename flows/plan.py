"""What a run will cost, before it starts: tokens, minutes, disk."""

from dataclasses import dataclass

from flows.config import RunConfig
from flows.wiring import model_spec
from rrl_core.policy.size import adapter_num_bytes
from storage import Store

# Measured on 2 CPU cores with SmolLM2-135M; the basis where the store holds no finished like run.
SAMPLED_TOKENS_PER_S = {"vllm": 300.0, "transformers": 60.0, "fake": 100_000.0}
LEARNED_TOKENS_PER_S = 400.0
ASSUMED_PROMPT_TOKENS = 64

BYTES_PER_TOKEN = 6  # a float32 log-prob and an id, compressed
BYTES_PER_ROLLOUT = 600  # its rows in all tables
OPTIMIZER_SIZE = 2  # AdamW keeps two numbers per weight


@dataclass(frozen=True)
class Plan:
    """Upper bounds: every completion at its longest; `minutes` follow from `basis`."""

    iterations: int
    rollouts: int
    evaluation_rollouts: int
    sampled_tokens: int
    minutes: float
    basis: str
    log_mib: float
    artifacts_mib: float


def plan_run(config: RunConfig, store: Store | None, engine: str) -> Plan:
    """Return the plan of `config`; a finished run of the same configuration gives the pace."""
    s, e, iterations = config.sampler, config.evaluation, config.run.iterations
    is_offline = config.run.mode == "offline"
    rollouts = 0 if is_offline else iterations * s.prompts * s.group_size
    num_evaluations = sum(config.is_evaluated(i) for i in range(iterations + 1))
    evaluation_rollouts = num_evaluations * e.prompts
    num_reviews = _num_reviews(config)
    sampled = (rollouts + num_reviews) * s.max_tokens + num_reviews * config.review.max_tokens
    rollouts += 2 * num_reviews  # each leads to a second attempt
    sampled += evaluation_rollouts * (e.max_tokens or s.max_tokens)
    minutes, basis = _minutes(config, store, engine, sampled)
    log_bytes = sampled * BYTES_PER_TOKEN + (rollouts + evaluation_rollouts) * BYTES_PER_ROLLOUT
    kept = {"last2": 2, "evaluated": num_evaluations + 1, "all": iterations}
    num_states = kept[config.tracking.keep_optimizer]
    adapter_bytes = adapter_num_bytes(model_spec(config))
    artifact_bytes = adapter_bytes * (iterations + 1 + OPTIMIZER_SIZE * num_states)
    return Plan(
        iterations, rollouts, evaluation_rollouts, sampled, round(minutes, 1), basis,
        round(log_bytes / 2**20, 1), round(artifact_bytes / 2**20, 1),
    )  # fmt: skip


def _num_reviews(config: RunConfig) -> int:
    """Return how many reviews there are at most: every prompt fails, controls left aside."""
    if config.review.gate is None:
        return 0
    return config.run.iterations * config.sampler.prompts * config.review.reviews


def _minutes(
    config: RunConfig, store: Store | None, engine: str, sampled: int
) -> tuple[float, str]:
    """Return (minutes, where the pace comes from)."""
    for row in [] if store is None else store.read("runs"):
        if row["what"] == "finished" and row["config_json"] == config.to_json():
            return row["elapsed_s"] / 60, f"the finished run {row['run_id']}"
    s = config.sampler
    num_tokens = s.prompts * (s.group_size * s.max_tokens + ASSUMED_PROMPT_TOKENS)
    if config.run.mode == "offline":
        num_tokens = config.offline.samples * (s.max_tokens + ASSUMED_PROMPT_TOKENS)
    learned = config.run.iterations * num_tokens
    seconds = sampled / SAMPLED_TOKENS_PER_S[engine]
    seconds += learned * config.learner.epochs / LEARNED_TOKENS_PER_S
    return seconds / 60, f"a 135M model with {engine} on 2 CPU cores"
