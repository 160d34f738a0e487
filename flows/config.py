"""Run configuration: frozen, validated, a sentence per field; TOML only, never the environment.

`None` means "off", written so in TOML too. An unknown key is an error. The resolved whole is the
first event of a run.
"""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flows.config_rules import check_across_sections

PositiveInt = Annotated[int, Field(ge=1)]
CONFIGS_DIR = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """The configuration is not as expected; the message says what to do."""


class Section(BaseModel):
    """A part of the configuration: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    """What the run is called, how long it is, and the root of its randomness."""

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]*$", description="Opens the run's id.")
    seed: int = Field(0, ge=0, lt=2**63, description="Root of every seed; forks inherit it.")
    iterations: PositiveInt = Field(20, description="Iterations of generate, score, learn.")
    budget_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that training may sample: the iteration that reaches it is the last; "
        "off: no limit.",
    )
    mode: Literal["online", "hybrid", "offline"] = Field(
        "hybrid",
        description="online: fresh rollouts alone; hybrid: and what of its history is replayed; "
        "offline: history alone, no sampler is started.",
    )


class LoraSection(Section):
    """The adapter that learns."""

    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: float = Field(32.0, gt=0, description="Its scale is alpha / rank.")
    target_modules: str = Field(
        "all-linear", description="Layers it is attached to: `all-linear` or a PEFT pattern."
    )


class ModelSection(Section):
    """The base model and where it runs."""

    name: str = Field("smollm2-135m", description="`tiny`, a fetched name, a folder, or a hub id.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the learner's base weights."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the learner runs.")
    start_adapter: Path | None = Field(
        None, description="Trained adapter the run starts from; also the KL reference."
    )
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter that learns.")


class TaskSection(BaseModel):
    """The task: its name and its own parameters, `reward` (the scorer that judges) among them."""

    model_config = ConfigDict(frozen=True, extra="allow")  # the task checks its own parameters

    name: str = Field(
        "arithmetic", description="A task of docs/tasks.md, or your own `module:name`."
    )

    @property
    def params(self) -> dict[str, Any]:
        """The task's own parameters: every key that is not a field of this section."""
        return dict(self.model_extra or {})


class RewardSection(Section):
    """What is made of the score that the task's own scorer gives; by default nothing."""

    components: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Weights of the score's components whose mean is the outcome; `outcome` is its "
        "value. Empty: the value alone.",
    )
    format: Literal["answer_line", "answer_tags", "think_answer"] | None = Field(
        None, description="Form that is paid for where a completion has it exactly once; off: none."
    )
    format_weight: float = Field(0.1, ge=0, lt=1, description="What that form adds.")
    overlong_tokens: PositiveInt | None = Field(
        None,
        description="Last tokens below the limit in which length is punished, more and more; "
        "off: not at all.",
    )
    overlong_weight: float = Field(0.5, ge=0, lt=1, description="What the limit itself costs.")
    novelty_weight: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="What an attempt unlike the others at its prompt adds, times the outcome.",
    )


class SamplerSection(Section):
    """How completions are generated."""

    engine: Literal["auto", "vllm", "transformers", "fake"] = Field(
        "auto", description="auto: vllm where installed."
    )
    prompts: PositiveInt = Field(16, description="Prompts an iteration (P).")
    group_size: PositiveInt = Field(8, description="Rollouts a prompt (G).")
    temperature: float = Field(1.0, ge=0.01, description="Sampling temperature of attempts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass kept; 1 keeps all.")
    top_k: int = Field(0, ge=0, description="Tokens kept; 0 keeps all.")
    max_tokens: PositiveInt = Field(64, description="Most tokens a completion may have.")
    batch_sequences: PositiveInt = Field(
        512, description="Sequences a sampler batch: the unit of commit and resumption."
    )
    context_tokens: PositiveInt = Field(512, description="Longest prompt with its completion.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the vLLM engine."
    )
    max_num_seqs: PositiveInt = Field(128, description="Sequences the engine holds side by side.")
    sync: Literal["auto", "merged", "lora"] = Field(
        "auto", description="How vLLM gets new weights; auto: merged on CPU, lora on GPU."
    )
    seed_mode: Literal["sample", "batch"] = Field(
        "sample", description="vLLM's draws: by each sample's seed, or by those of a call together."
    )
    enforce_eager: bool | Literal["auto"] = Field(
        "auto", description="vLLM without compilation; auto: compiles on GPU only."
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of vLLM's cache, GiB; off: 1 on CPU, the share below on GPU.",
    )
    gpu_memory_utilization: float = Field(
        0.4, gt=0, lt=1, description="Share of the GPU's memory vLLM may take."
    )


class LearnerSection(Section):
    """How the policy learns from a batch."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "ppo", "sft", "raft"] = Field(
        "grpo", description="Objective, advantage and reduction."
    )
    learning_rate: float = Field(2e-4, gt=0, le=10, description="AdamW's learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    steps: PositiveInt = Field(
        1, description="Optimizer steps an iteration and epoch: groups are split evenly."
    )
    epochs: PositiveInt = Field(1, description="Passes over an iteration's batch.")
    clip_low: float | None = Field(
        None, gt=0, lt=1, description="Ratio's clip below 1 - clip_low; off: the algorithm's own."
    )
    clip_high: float | None = Field(
        None, gt=0, description="Ratio's clip above 1 + clip_high; off: the algorithm's own."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss of negative advantages; off: none."
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL to the start policy; 0 skips it."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL.")
    correction: Literal["none", "token_truncate", "sequence_geometric_mask"] = Field(
        "token_truncate", description="Correction of the trainer-sampler mismatch."
    )
    correction_cap: float = Field(2.0, gt=1, description="Correction weights are truncated here.")
    micro_batch_tokens: PositiveInt = Field(
        512, description="Tokens a forward pass may hold: memory, not results; 512 suits a CPU."
    )
    packing: bool = Field(
        True, description="Encode a group's shared prompt once; false: padded reference path."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="ppo's discount of rewards, per token.")
    lam: float = Field(
        1.0, ge=0, le=1, description="ppo's lambda of GAE: 1 trusts the rewards, 0 the critic."
    )
    vf_coef: float = Field(0.5, gt=0, description="Weight of ppo's value loss.")
    value_clip: float | None = Field(
        0.2, gt=0, description="How far a value may move in an iteration of ppo; off: any distance."
    )
    critic_learning_rate: float = Field(
        2e-4, gt=0, le=10, description="Learning rate of ppo's critic."
    )
    critic_warmup: int = Field(
        2, ge=0, description="Iterations in which ppo's critic learns alone, at the beginning."
    )


class ReplaySection(Section):
    """What of its history a run goes back to."""

    units: tuple[Literal["state", "trajectory", "prompt"], ...] = Field(
        (), description="Units replayed; none: history is kept, not replayed."
    )
    share: float = Field(
        0.25, ge=0, le=0.5, description="Share of an iteration's groups that replay may take."
    )
    beta: float = Field(
        10.0, ge=0, description="Sharpness of the priorities, per unit of reward range."
    )
    uniform_share: float = Field(
        0.1, ge=0, le=1, description="Share of the picks drawn uniformly from what is eligible."
    )
    state_base: Literal["gain", "value", "variance", "retry_success"] = Field(
        "gain", description="What a state's priority rests on."
    )
    reward_range: float = Field(1.0, gt=0, description="Largest minus smallest possible reward.")
    credit: Literal["none", "corrected", "direct"] = Field(
        "direct", description="Credit the given prefix of a state gets."
    )
    horizon: PositiveInt | None = Field(
        None,
        description="Policy versions over which trajectories fade; off: a quarter of the run's.",
    )
    capacity: PositiveInt = Field(
        16_384,
        description="Most entries of a unit that may be picked, states that a refit judges again.",
    )
    curriculum: bool = Field(
        False, description="Priorities favour the difficulties that are solved half of the time."
    )
    imports: tuple[str, ...] = Field(
        (), description="Imports whose responses a run goes back to as to its own; none: its own."
    )
    replace_zero_variance: bool = Field(
        False,
        description="A trajectory takes the place of a rollout in fresh groups that failed whole.",
    )


class ReviewSection(Section):
    """How failed attempts are reviewed, tried again, and the fix distilled."""

    gate: Literal["sample", "group_all_fail"] | None = Field(
        None,
        description="Prompts that are reviewed: where some attempt failed, or where all did; "
        "off: none.",
    )
    reviews: PositiveInt = Field(3, description="Reviews of a failed attempt (R), each tried.")
    max_tokens: PositiveInt = Field(48, description="Most tokens a review may have.")
    format: str = Field("v1", description="Version of the texts that ask for a review.")
    memory: Literal["recency", "bm25", "embedding"] | None = Field(
        "bm25", description="How verified reviews of other problems are ranked; off: none is shown."
    )
    embedding_model: str | None = Field(
        None,
        description="Sentence model on this machine, a folder or a name, whose vectors "
        "`memory` = embedding compares; off: hashed n-grams.",
    )
    memory_runs: Literal["run", "store"] = Field(
        "run", description="Whose reviews: the run's and its ancestors', or those of all runs."
    )
    memory_entries: PositiveInt = Field(2, description="Most reviews shown to a review.")
    memory_tokens: PositiveInt = Field(96, description="Most tokens of the reviews shown.")
    memory_floor: float = Field(0.1, ge=0, description="Similarity below which none is shown.")
    controls: bool = Field(
        True, description="Whether some prompts get answers without review to compare with."
    )
    imports: tuple[str, ...] = Field(
        (), description="Imports whose failed responses are reviewed as well, for memory."
    )
    imported: PositiveInt = Field(2, description="Most failed responses of imports an iteration.")
    attempt_coef: float = Field(1.0, gt=0, description="Weight of first attempts in the loss.")
    review_coef: float = Field(1.0, ge=0, description="Weight of reviews in the loss.")
    second_coef: float = Field(1.0, ge=0, description="Weight of second attempts in the loss.")
    distill_coef: float = Field(
        1.0, ge=0, description="Weight of successful second attempts as targets; 0: not distilled."
    )


class OfflineSection(Section):
    """What an offline run learns from."""

    query: str | None = Field(
        None,
        description="SELECT with the one column rollout_id, asked as of the run's first pin; "
        "off: every whole attempt, retry and imported rollout.",
    )
    samples: PositiveInt = Field(64, description="Rollouts an iteration.")


class ValueSection(Section):
    """The value model that judges history."""

    every: PositiveInt | None = Field(
        None, description="Iterations between refits, each followed by re-scoring; off: no model."
    )
    cuts: PositiveInt = Field(4, description="Most states a rollout is cut into.")
    fit_rollouts: PositiveInt = Field(
        2_048, description="Newest rollouts of the run that a refit learns from."
    )
    l2: float = Field(1.0, gt=0, description="Strength of the ridge penalty of its heads.")


class EvaluationSection(Section):
    """How the policy is evaluated on held-out prompts."""

    every: PositiveInt | None = Field(
        10,
        description="Iterations between evaluations; first and last are added; off: none.",
    )
    prompts: PositiveInt = Field(200, description="Held-out prompts used, from the first.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy, else 0.01 at least.")
    max_tokens: PositiveInt | None = Field(
        None, description="Most tokens a completion may have; off: the sampler's."
    )


class TrackingSection(Section):
    """What is projected outside the log, and what is kept beside it."""

    mlflow: bool = Field(True, description="Project metrics to MLflow.")
    mlflow_uri: str | None = Field(
        None, description="Tracking server; off: SQLite inside the store."
    )
    experiment: str = Field("rrl", description="MLflow experiment.")
    keep_optimizer: Literal["last2", "evaluated", "all"] = Field(
        "last2", description="Optimizer states kept."
    )


class RunConfig(Section):
    """Everything a run depends on, besides code and packages."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    task: TaskSection = Field(default_factory=lambda: TaskSection())
    reward: RewardSection = Field(default_factory=RewardSection)
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    replay: ReplaySection = Field(default_factory=ReplaySection)
    review: ReviewSection = Field(default_factory=ReviewSection)
    offline: OfflineSection = Field(default_factory=OfflineSection)
    value: ValueSection = Field(default_factory=ValueSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _check_across_sections(self) -> "RunConfig":
        check_across_sections(self)
        return self

    def is_refitted(self, iteration: int) -> bool:
        """Return True when a value model is fitted after `iteration`: every k-th."""
        every = self.value.every
        return every is not None and iteration > 0 and iteration % every == 0

    def is_evaluated(self, iteration: int, is_last: bool = False) -> bool:
        """Return True when `iteration` evaluates what it published: first, last, every k-th.

        `is_last` tells that the run ends with it before its planned iterations.
        """
        every = self.evaluation.every
        if every is None:
            return False
        return is_last or iteration in (0, self.run.iterations) or iteration % every == 0

    def to_json(self) -> str:
        """Return the resolved configuration as canonical JSON."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)

    def sha256(self) -> str:
        """Return the digest of the resolved configuration."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `a.b=value` overrides, and validate the whole.

    `path` may also name a shipped configuration (`demo`, `smoke.toml`).

    Raises:
        ConfigError: no such file, not TOML, an unknown key, or a value out of bounds.
    """
    found = _find(path)
    try:
        data = _with_off(tomllib.loads(found.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{found} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data, str(found))


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return `config` with `section.key=value` overrides applied.

    Raises:
        ConfigError: an override is malformed, names an unknown key, or a value is out of bounds.
    """
    data = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data, "overrides")


def task_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the task's parameters that `task.key=value` overrides set.

    Raises:
        ConfigError: an override is malformed, or is of another section.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
        if data.keys() != {"task"}:
            raise ConfigError(f"--set {override}: expected `task.key=value`, a parameter of a task")
    return dict(data.get("task", {}))


def parse_config(data: dict[str, Any], where: str) -> RunConfig:
    """Validate `data`; `where` names its origin in messages.

    Raises:
        ConfigError: an unknown key, or a value out of bounds.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from None


def _find(path: Path) -> Path:
    shipped = CONFIGS_DIR / path.name
    for candidate in (path, path.with_suffix(".toml"), shipped, shipped.with_suffix(".toml")):
        if candidate.is_file() and candidate.suffix == ".toml":
            return candidate.resolve()
    shipped_names = (p.name for p in CONFIGS_DIR.glob("*.toml") if not p.match("study-*"))
    names = ", ".join(sorted(shipped_names))
    raise ConfigError(
        f"no configuration at {path}: give a TOML file, or one of the shipped {names}"
    )


def _with_off(data: dict[str, Any]) -> dict[str, Any]:
    """Return TOML data with None for "off", which TOML has no word for."""
    return {
        key: _with_off(value) if isinstance(value, dict) else None if value == "off" else value
        for key, value in data.items()
    }


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"--set {override}: expected `section.key=value`, such as `learner.learning_rate=1e-4`"
        )
    section = data
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: `{part}` is a value, not a section")
    section[parts[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    if text == "off":  # not "none", which is a value of its own: `replay.credit=none`
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word or path


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(error["loc"][:-1]))
        return f"unknown key `{key}`; known here: {known}"
    if not key:
        return str(error["msg"]).removeprefix("Value error, ")
    return f"`{key}` = {error['input']!r}: {error['msg']}"


def _known_keys(location: Sequence[Any]) -> list[str]:
    section: Any = RunConfig
    for part in location:
        section = section.model_fields[part].annotation
    return sorted(section.model_fields)
