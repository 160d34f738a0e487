"""Wiring: from a configuration to the objects of a run, held in one session per run and process.

Prefect tasks get ids, never engines or models; they find their session here by run id.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import storage
from flows.config import ConfigError, RunConfig, SamplerSection, parse_config
from flows.embedding import embedder_of, stored_names
from flows.judged import configured_task
from flows.lineage import Lineage, lineage_of
from flows.machine import code_version, package_versions
from flows.mining import check_imports
from flows.offline import Selection, check_named
from flows.progress import Progress
from flows.states import Outcome, StateFeatures, states_in_training
from flows.streams import is_training
from flows.tracking import Tracker
from rrl_core.policy.adapters import LoraSettings
from rrl_core.policy.learner import Learner, LearnerConfig
from rrl_core.policy.model import ModelSpec, Policy, load_policy_model
from rrl_core.sampling import SamplerName, SamplerSettings, make_sampler, resolve_sampler_name
from rrl_core.sampling.none import NoSampler
from rrl_core.sampling.protocol import Sampler
from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import Prompt, Scorer, Split, Task, environment_of
from rrl_core.tasks.scoring_pool import ScoringPool
from rrl_core.tasks.selection import select_prompts
from storage import Store, StreamWriter

if TYPE_CHECKING:
    from flows.fetching import Fetch
    from flows.replaying import Decision
    from flows.reviewing import Gated


@dataclass
class Session:
    """One open run in this process: its configuration, its objects, and how far it is."""

    run_id: str
    config: RunConfig
    store: Store
    writer: StreamWriter
    task: Task
    scoring: ScoringPool
    policy: Policy
    learner: Learner
    sampler: Sampler
    tracker: Tracker
    progress: Progress
    make_sampler: Callable[[], Sampler]
    lineage: Lineage
    state_features: StateFeatures
    policy_run_id: str | None = None  # run whose policies are sampled, where it is another
    should_stop: bool = False
    started_s: float = field(default_factory=time.monotonic)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    prompt_cache: dict[str, list[Prompt]] = field(default_factory=dict)
    selection: Selection | None = None  # what an offline run learns from, once it was asked for
    gated: dict[int, list["Gated"]] = field(default_factory=dict)  # of the iteration at hand
    decided: "Decision | None" = None  # until the iteration's batch takes it up
    fetch: "Fetch | None" = None  # what the iteration's batch needs of earlier ones

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of `split`, read once."""
        if split not in self.prompt_cache:
            self.prompt_cache[split] = list(self.task.prompts(split))
        return self.prompt_cache[split]

    @property
    def reward_scorer(self) -> Scorer:
        """The scorer whose value is the reward: the task's first."""
        return self.task.scorers[0]

    def restart_sampler(self) -> None:
        """Replace a failed engine by a new one that holds the same policy version."""
        version = self.sampler.policy_version
        self.sampler.close()
        self.sampler = self.make_sampler()
        self.sampler.load_policy(self.policy, version)


_sessions: dict[str, Session] = {}


def session_of(run_id: str) -> Session:
    """Return the session of `run_id` opened in this process."""
    return _sessions[run_id]


@dataclass(frozen=True)
class Fork:
    """Where a new run branches off: a published policy, and the history as of a commit."""

    parent_run_id: str
    parent_iteration: int
    parent_as_of: int


@contextmanager
def open_session(
    store: Store,
    run_id: str,
    config: RunConfig,
    progress: Progress,
    policy_run_id: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[Session]:
    """Build every object of the run and open its stream for writing.

    Everything that can be wrong with the configuration, the data or the model is found before the
    first event is written.

    Args:
        store: the store.
        run_id: the stream.
        config: its configuration.
        progress: told what is waited for.
        policy_run_id: the run whose policies are sampled; None: this one's own.
        facts: further columns of the `runs` row that opens the stream.
    """
    storage.require_whole(store)
    task = configured_task(config)
    parent = (facts or {}).get("parent_run_id")
    engine = _checked_engine(store, config, task, parent or run_id)
    with progress.status(f"loading {config.model.name}"):
        policy = load_policy_model(model_spec(config), seed=derive_seed(config.run.seed, "adapter"))
    learner = Learner(policy, learner_config(config))

    new_sampler = partial(_start_sampler, engine, policy, config)
    with progress.status("starting the sampler") if engine else nullcontext():
        sampler = new_sampler()
    try:
        with storage.hold_run(store, run_id):
            digest = task_sha256(task)
            _check_resumed(store, policy_run_id or run_id, digest, policy)
            if policy_run_id is None:
                _check_embedder(store, run_id, config)
            if parent is not None:
                _check_base(store, parent, policy)
            writer = store.open_stream(run_id, opened_row(config, digest) | dict(facts or {}))
            tracker = Tracker(store.path, config, run_id)
            lineage = lineage_of(store, run_id)
            states_of = states_in_training(store, lineage, config.value.every)
            max_tokens = config.learner.micro_batch_tokens
            features = StateFeatures(store, lineage, policy, max_tokens, states_of)
            session = Session(
                run_id, config, store, writer, task, ScoringPool(task.scorers), policy, learner,
                sampler, tracker, progress, new_sampler, lineage, features, policy_run_id,
            )  # fmt: skip
            _sessions[run_id] = session
            try:
                yield session
            finally:
                sampler = session.sampler
                session.scoring.close()
                del _sessions[run_id]
    finally:
        sampler.close()


def _checked_engine(store: Store, config: RunConfig, task: Task, run_id: str) -> SamplerName | None:
    """Return the sampler of a run, None for an offline one; refuse what would fail later.

    `run_id` is the run, or the parent of a fork.

    Raises:
        ConfigError, TaskError: the sampler is not installed; an iteration asks for more prompts
            than there are.
        QueryError: the query of an offline run is wrong, or names nothing to learn from; or
            `replay.imports` names what is no import.
    """
    if config.run.mode == "offline":
        judge = (task.scorers[0].name, task.scorers[0].version)
        check_named(store, run_id, config, judge)
        return None
    check_imports(store, config)
    select_prompts(len(task.prompts("train")), 1, config.sampler.prompts, config.run.seed)
    try:
        return resolve_sampler_name(config.sampler.engine)
    except ValueError as error:
        raise ConfigError(f"`sampler.engine`: {error}") from error


def _start_sampler(engine: SamplerName | None, policy: Policy, config: RunConfig) -> Sampler:
    if engine is None:
        return NoSampler()
    return make_sampler(engine, policy, sampler_settings(config))


def model_spec(config: RunConfig) -> ModelSpec:
    """Translate the model section."""
    m = config.model
    lora = LoraSettings(m.lora.rank, m.lora.alpha, m.lora.target_modules)
    return ModelSpec(m.name, m.dtype, m.device, lora, m.start_adapter)


def learner_config(config: RunConfig) -> LearnerConfig:
    """Translate the learner section."""
    fields = config.learner.model_dump(exclude={"steps", "epochs"})
    return LearnerConfig(
        **fields,
        max_completion_tokens=config.sampler.max_tokens,
        prefix_credit=config.replay.credit,
        critic_seed=derive_seed(config.run.seed, "critic"),
    )


def sampler_settings(config: RunConfig) -> SamplerSettings:
    """Translate the sampler section."""
    shared = {f.name for f in fields(SamplerSettings)} & set(SamplerSection.model_fields)
    return SamplerSettings(**config.sampler.model_dump(include=shared))


def task_sha256(task: Task) -> str:
    """Return the hash of what a run is asked and judged by: prompts, scorers, environment."""
    facts: list[list[Any]] = [
        [prompt.prompt_id for prompt in task.prompts("train")],
        [prompt.prompt_id for prompt in task.prompts("eval")],
        [[scorer.name, scorer.version] for scorer in task.scorers],
    ]
    if (environment := environment_of(task)) is not None:
        facts.append([environment.name, environment.version])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_resumed(store: Store, run_id: str, digest: str, policy: Policy) -> None:
    """Refuse to go on with other data, another reward or another base model than before.

    Raises:
        ConfigError: names what differs.
    """
    opened = [row["task_sha256"] for row in store.read("runs", run_id=run_id)]
    _check_same(run_id, "prompts or the scorers", opened, digest)
    _check_base(store, run_id, policy)


def _check_embedder(store: Store, run_id: str, config: RunConfig) -> None:
    """Refuse a sentence model that is not there, or whose weights are not those of before."""
    if config.review.gate is not None and config.review.embedding_model is not None:
        name = embedder_of(config.review).name
        _check_same(run_id, "weights of the sentence model", stored_names(store, run_id), name)


def _check_base(store: Store, run_id: str, policy: Policy) -> None:
    bases = [row["base_digest"] for row in store.read("policies", run_id=run_id)]
    _check_same(run_id, "weights of the base model", bases, policy.base_digest)


def _check_same(run_id: str, what: str, known: Sequence[str | None], now: str) -> None:
    before = known[0] if known else None
    if before is not None and before != now:
        raise ConfigError(
            f"run {run_id}: the {what} changed since it began: expected {before[:12]}, came "
            f"{now[:12]}. Bring back what it began with to go on, or start a new run"
        )


def opened_row(config: RunConfig, task_digest: str) -> dict[str, Any]:
    """Return the facts with which a training run is opened."""
    return {
        "kind": "train",
        "task_sha256": task_digest,
        "config_json": config.to_json(),
        "seed_root": config.run.seed,
        "planned_iterations": config.run.iterations,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
        "reason": None,
        "elapsed_s": None,
    }


def stored_config(store: Store, run_id: str) -> RunConfig:
    """Return the configuration a run was first opened with.

    Raises:
        ConfigError: the run was written with keys this version does not know.
        StorageError: there is no such run, or it is no training run.
    """
    rows = store.read("runs", run_id=run_id)
    if not rows:
        raise storage.StorageError(
            f"no run {run_id!r} in {store.path}: `rrl runs` lists those there are"
        )
    if not is_training(rows[0]):
        raise storage.StorageError(
            f"{run_id!r}: expected a training run, came a stream of kind {rows[0]['kind']}"
        )
    return parse_config(json.loads(rows[0]["config_json"]), f"configuration of {run_id}")
