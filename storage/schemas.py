"""Every table and column of the event log, in one place.

Invariant: a stored row is read for ever with the meaning written here. A column is never renamed,
retyped or given another meaning; a change is a new nullable column `since` a new `version` of its
table, which says by `upcast` what it is in older rows. Code that may repeat an older row of a
derived table leaves its later columns NULL: another value is another content, a conflict.

Place identity: `event_id = prefix + first 128 bits of sha256(table, place)`; the place is the
canonical JSON of the columns marked `place=True`, in the order of declaration. `content_sha256` is
the first 128 bits of the sha256 over all remaining facts; columns marked `timing=True` are not
facts.

An `observed` row is not bit-reproducible (a sampled completion): the first commit of a place wins.
A `derived` row is a function of committed rows: the same place with another content is a conflict.
A derived table may hold observed rows too: those whose `kind` is among its `observed_kinds`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # loaded only when a segment is read or written: a query by SQL needs none of it
    import pyarrow as pa

FORMAT_VERSION = 1  # of the store as a whole: commits, segments, folder layout

Nature = Literal["observed", "derived"]

TypeName = Literal[
    "text", "int32", "int64", "float64", "bool", "moment", "list of int32", "list of float32"
]
TEXT: TypeName = "text"  # UTF-8
INT: TypeName = "int32"
LONG: TypeName = "int64"
REAL: TypeName = "float64"
TRUTH: TypeName = "bool"
MOMENT: TypeName = "moment"  # microseconds, UTC
INTS: TypeName = "list of int32"
FLOATS: TypeName = "list of float32"


@dataclass(frozen=True)
class Column:
    """One column: its type, one sentence on what it holds, and its part in the identity.

    `since` is the version of its table that brought it, `upcast` an SQL expression over the older
    columns: its value in the rows of older versions.
    """

    name: str
    type: TypeName
    doc: str
    place: bool = False
    timing: bool = False
    nullable: bool = False
    since: int = 1
    upcast: str = "null"

    @property
    def is_list(self) -> bool:
        """Whether a value is a list of numbers."""
        return self.type in (INTS, FLOATS)

    @cached_property
    def arrow_field(self) -> "pa.Field":
        """The column as Arrow and Parquet know it."""
        import pyarrow as pa

        arrow_type = {
            TEXT: pa.string(),
            INT: pa.int32(),
            LONG: pa.int64(),
            REAL: pa.float64(),
            TRUTH: pa.bool_(),
            MOMENT: pa.timestamp("us", tz="UTC"),
            INTS: pa.list_(pa.int32()),
            FLOATS: pa.list_(pa.float32()),
        }[self.type]
        return pa.field(self.name, arrow_type, nullable=self.nullable)


@dataclass(frozen=True)
class Table:
    """One table of past-tense facts; `prefix` opens its event ids, `nature` decides conflicts."""

    name: str
    prefix: str
    nature: Nature
    doc: str
    columns: tuple[Column, ...]
    version: int = 1
    rows_per_group: int = 16_384
    observed_kinds: frozenset[str] = frozenset()

    @cached_property
    def place_columns(self) -> tuple[str, ...]:
        """Names of the columns that make up the place, in order."""
        return tuple(c.name for c in self.columns if c.place)

    @cached_property
    def content_columns(self) -> tuple[str, ...]:
        """Names of the columns that are facts about the place."""
        return tuple(c.name for c in self.columns if not c.place and not c.timing)

    @cached_property
    def arrow_schema(self) -> "pa.Schema":
        """The explicit schema every segment of this table is written with."""
        import pyarrow as pa

        return pa.schema([c.arrow_field for c in self.all_columns])

    @cached_property
    def all_columns(self) -> tuple[Column, ...]:
        """The common columns followed by the table's own."""
        return COMMON + self.columns


COMMON = (
    Column("event_id", TEXT, "Identity of the event: hash of its table and place."),
    Column("content_sha256", TEXT, "First 128 bits of the sha256 of its facts, timings left out."),
    Column("epoch", INT, "Epoch of the writer that appended it; a resumed run has a higher one."),
    Column("recorded_at", MOMENT, "When the writer appended it (UTC)."),
)

_RUN = Column("run_id", TEXT, "The stream that wrote the event: a run.", place=True)
_ITERATION = Column("iteration", INT, "Iteration of the run; 0 is before any learning.", place=True)

RUNS = Table(
    "runs",
    "ru",
    "observed",
    "A run was opened for writing, or came to its end.",
    (
        _RUN,
        Column("run_epoch", INT, "The epoch this row opens or ends.", place=True),
        Column("what", TEXT, "opened, finished, interrupted or failed.", place=True),
        Column("config_json", TEXT, "The resolved configuration, as JSON."),
        Column("seed_root", LONG, "Root of every seed of the run; inherited by forks."),
        Column("planned_iterations", INT, "Iterations the configuration asks for."),
        Column("code_version", TEXT, "Version of rrl, with the commit where known."),
        Column("packages_json", TEXT, "Versions of the packages the run depends on, as JSON."),
        Column("reason", TEXT, "Why the run ended; empty when opened.", nullable=True),
        Column(
            "elapsed_s", REAL, "Seconds since this epoch was opened.", timing=True, nullable=True
        ),
        Column(
            "task_sha256",
            TEXT,
            "Hash of the prompts and scorers: a resumed run must find the same.",
            nullable=True,
            since=2,
        ),
        Column(
            "kind",
            TEXT,
            "What the stream does: train, rescore (judge history again), refit (value models), "
            "evaluate (a stored policy), import (other frameworks' rollouts), recorded (another "
            "trainer trains, and is only watched) or flow (what went wrong with a schedule).",
            nullable=True,
            since=3,
            upcast="'train'",
        ),
        Column(
            "parent_run_id", TEXT, "Run it was forked from, or evaluates.", nullable=True, since=3
        ),
        Column(
            "parent_iteration", INT, "Iteration of that run it takes up.", nullable=True, since=3
        ),
        Column(
            "parent_as_of", LONG, "Commit its parent's history ends with.", nullable=True, since=3
        ),
    ),
    version=3,
)

PROMPTS = Table(
    "prompts",
    "pr",
    "derived",
    "A prompt was first used by a run.",
    (
        _RUN,
        Column("prompt_id", TEXT, "Stable id: hash of task, split and content.", place=True),
        Column("task", TEXT, "Name of the task."),
        Column("split", TEXT, "train or eval."),
        Column("messages_json", TEXT, "Chat messages as JSON: a list of {role, content}."),
        Column("answer", TEXT, "Reference answer; NULL where the task has none.", nullable=True),
        Column("difficulty", TEXT, "Difficulty bucket of the task."),
        Column("meta_json", TEXT, "What else the task says about the prompt, as JSON."),
    ),
)

ROLLOUTS = Table(
    "rollouts",
    "ro",
    "observed",
    "A completion was sampled.",
    (
        _RUN,
        _ITERATION,
        Column(
            "role",
            TEXT,
            "attempt, continuation (of a state), retry (of a prompt), evaluation, review (of a "
            "failed attempt), second_attempt, control (an answer to compare with), imported (from "
            "another framework), imported_turn (an earlier turn of an imported conversation).",
            place=True,
        ),
        Column("prompt_id", TEXT, "The prompt.", place=True),
        Column("sample_index", INT, "Index within its group.", place=True),
        Column(
            "parent_id", TEXT, "Event this one continues or answers; empty if none.", place=True
        ),
        Column("attempt", INT, "0, or the number of failed tries before this one.", place=True),
        Column("group_id", TEXT, "Rollouts compared with each other share it."),
        Column("policy_version", INT, "Version of the policy the engine call used."),
        Column("policy_digest", TEXT, "Digest of that policy: base and adapter."),
        Column("num_prompt_tokens", INT, "Tokens given to the engine, prefix included."),
        Column("prefix_tokens", INT, "Given tokens that belong to the response, not the prompt."),
        Column("num_completion_tokens", INT, "Tokens sampled."),
        Column("finish_reason", TEXT, "stop, length or error."),
        Column(
            "status", TEXT, "ok, or error: nothing was sampled, or the environment of turns failed."
        ),
        Column("error", TEXT, "What went wrong, when status is error.", nullable=True),
        Column(
            "completion",
            TEXT,
            "Text of the whole response, given tokens included; the token ids are the truth.",
        ),
        Column("temperature", REAL, "Sampling temperature; 0 is greedy."),
        Column("top_p", REAL, "Nucleus mass kept; 1 keeps all."),
        Column("top_k", INT, "Tokens kept; 0 keeps all."),
        Column("max_tokens", INT, "Limit on the sampled tokens."),
        Column("seed", LONG, "Seed of this sample, derived from the run's root and its place."),
        Column(
            "engine",
            TEXT,
            "vllm, transformers, fake, or imported: then -1 or `unknown` stands for what the file "
            "does not say, and policy_version may be the step.",
        ),
        Column("sync", TEXT, "How the engine got its weights: lora, merged or shared."),
        Column(
            "logprob_mode",
            TEXT,
            "processed (tempered, full distribution), imported (as the file has them), or none.",
        ),
        Column("batch_key", TEXT, "Sampler batch it was generated in."),
        Column("generate_s", REAL, "Seconds its sampler batch took.", timing=True),
        Column(
            "arm",
            TEXT,
            "Of a control: retry, no_memory, blank, raw_feedback or random_review.",
            nullable=True,
            since=2,
        ),
        Column(
            "ending",
            TEXT,
            "Why an episode of several turns ended: answered, max_turns, max_tokens, context (was "
            "full) or environment_error; NULL of a single completion.",
            nullable=True,
            since=3,
        ),
    ),
    version=3,
    rows_per_group=1_024,
)

ROLLOUT_TOKENS = Table(
    "rollout_tokens",
    "rt",
    "observed",
    "The token ids and sampler log-probs of a rollout.",
    (
        _RUN,
        _ITERATION,
        Column("rollout_id", TEXT, "`rollouts.event_id`.", place=True),
        Column("prompt_ids", INTS, "Token ids given to the engine."),
        Column(
            "completion_ids",
            INTS,
            "Token ids sampled; of an episode of several turns all that came after the prompt.",
        ),
        Column(
            "sampler_logprobs",
            FLOATS,
            "Natural-log probability of each sampled "
            "token under the sampler, 0 of one that was given between two turns; NULL where the "
            "engine gave none.",
            nullable=True,
        ),
        Column("logprobs_reason", TEXT, "Why `sampler_logprobs` is NULL.", nullable=True),
        Column(
            "sampled_bounds",
            INTS,
            "Where each stretch of completion_ids that was sampled starts and ends, one after the "
            "other; the rest was given between turns and is masked in the loss. NULL: all were "
            "sampled.",
            nullable=True,
            since=2,
        ),
    ),
    version=2,
    rows_per_group=256,
)

TURNS = Table(
    "turns",
    "tu",
    "observed",
    "A turn of an episode was sampled, or was given by a tool or the environment.",
    (
        _RUN,
        _ITERATION,
        Column("rollout_id", TEXT, "`rollouts.event_id` of the episode.", place=True),
        Column("turn", INT, "Number of the turn in its rollout, from 0.", place=True),
        Column("role", TEXT, "assistant (sampled), tool or environment (given)."),
        Column("first_token", INT, "Place of its first token in `rollout_tokens.completion_ids`."),
        Column("num_tokens", INT, "Its tokens, those that open and end a given one included."),
        Column("messages_json", TEXT, "What was said, as JSON: a list of {role, content}."),
        Column(
            "status",
            TEXT,
            "Of a sampled turn stop or length; of a given one ok, tool_error or timeout.",
        ),
        Column(
            "policy_version", INT, "Policy that sampled it; NULL of a given turn.", nullable=True
        ),
    ),
    rows_per_group=1_024,
)

SCORES = Table(
    "scores",
    "sc",
    "derived",
    "A scorer judged a rollout.",
    (
        _RUN,
        _ITERATION,
        Column(
            "target_id",
            TEXT,
            "Event that was judged: `rollouts.event_id` or `states.event_id`.",
            place=True,
        ),
        Column("scorer", TEXT, "Name of the scorer.", place=True),
        Column("scorer_version", TEXT, "Version of the scorer.", place=True),
        Column("attempt", INT, "0, or the number of time-outs before this judgement.", place=True),
        Column("target_kind", TEXT, "rollout or state."),
        Column("kind", TEXT, "reward, value (of a value model) or judge (a language model)."),
        Column("value", REAL, "The judgement; NULL unless status is ok; never NaN.", nullable=True),
        Column("status", TEXT, "ok, timeout, unscorable or scorer_error."),
        Column("components_json", TEXT, "Parts of the value by name, as JSON."),
        Column("feedback", TEXT, "What a reader may learn from the judgement; never the answer."),
        Column("elapsed_ms", REAL, "Milliseconds the judgement took.", timing=True),
        Column(
            "signature",
            TEXT,
            "Normalised answer and operations of the completion: equal solutions share it.",
            nullable=True,
            since=2,
        ),
    ),
    version=2,
    observed_kinds=frozenset({"value", "judge"}),
)

STATES = Table(
    "states",
    "st",
    "derived",
    "A response was cut: its prompt and its first tokens are a state that can be continued.",
    (
        _RUN,
        _ITERATION,
        Column("rollout_id", TEXT, "`rollouts.event_id` of the response.", place=True),
        Column(
            "prefix_tokens",
            INT,
            "Tokens of the response that belong to the state; 0 is the prompt alone.",
            place=True,
        ),
        Column("source_run_id", TEXT, "Run the rollout comes from."),
        Column("prompt_id", TEXT, "The prompt."),
        Column(
            "prefix_sha256", TEXT, "Hash of these token ids: equal states of a prompt share it."
        ),
        Column("cut", TEXT, "Why here: prompt, line, sentence, code, turn, word, half or drop."),
    ),
)

VALUE_MODELS = Table(
    "value_models",
    "vm",
    "observed",
    "A value model was fitted on history and examined.",
    (
        _RUN,
        _ITERATION,
        Column("scorer", TEXT, "Name it scores under."),
        Column("scorer_version", TEXT, "Version it scores under; names this model alone."),
        Column("as_of", LONG, "Commit of the history it learned from."),
        Column("artifact", TEXT, "Artifact with its two heads."),
        Column("backbone_digest", TEXT, "Digest of the model that makes its features."),
        Column("num_states", INT, "States it learned from."),
        Column("num_prompts", INT, "Prompts they belong to."),
        Column("num_mixed_prompts", INT, "Prompts with successes and failures."),
        Column("mean_target", REAL, "Weighted share of successes among its targets."),
        Column("auroc", REAL, "Pooled AUROC out of fold.", nullable=True),
        Column("within_prompt_auroc", REAL, "Mean AUROC within mixed prompts.", nullable=True),
        Column("brier", REAL, "Mean squared error out of fold.", nullable=True),
        Column("length_corr", REAL, "Correlation of value and prefix length.", nullable=True),
        Column(
            "signature_corr",
            REAL,
            "Correlation of value and frequency of the signature.",
            nullable=True,
        ),
        Column("verdict", TEXT, "healthy, unhealthy or insufficient_data."),
        Column("metrics_json", TEXT, "Calibration bins, metrics by age and others, as JSON."),
        Column("fit_s", REAL, "Seconds the fit took.", timing=True),
    ),
)

REPLAY_PLANS = Table(
    "replay_plans",
    "pn",
    "derived",
    "An iteration decided what of its history is replayed, or why nothing is.",
    (
        _RUN,
        _ITERATION,
        Column("num_candidates", LONG, "Entries of the replay buffer at the pin."),
        Column("num_eligible", LONG, "Those that could be picked."),
        Column("num_picked", INT, "Those that were."),
        Column("share", REAL, "Share of the iteration's groups the schedule gives to replay."),
        Column("priority_entropy", REAL, "Entropy of the pick probabilities, nats.", nullable=True),
        Column(
            "waiting_reason", TEXT, "Why less is replayed than the share allows.", nullable=True
        ),
        Column("reasons_json", TEXT, "Candidates by unit and eligibility reason, as JSON."),
        Column("buffer_sha256", TEXT, "Hash of the buffer's ids and counts at the pin."),
    ),
)

PICKS = Table(
    "picks",
    "pk",
    "derived",
    "An entry of the replay buffer was picked.",
    (
        _RUN,
        _ITERATION,
        Column("unit", TEXT, "state, trajectory or prompt.", place=True),
        Column(
            "entry_id", TEXT, "The state's or rollout's event id, or the prompt id.", place=True
        ),
        Column("position", INT, "Position among the iteration's picks."),
        Column("prompt_id", TEXT, "The prompt."),
        Column("rollout_id", TEXT, "Rollout it was taken from.", nullable=True),
        Column("source_run_id", TEXT, "Run of that rollout.", nullable=True),
        Column("prefix_tokens", INT, "Tokens of that rollout that are given."),
        Column("score_id", TEXT, "`scores.event_id` it was chosen under.", nullable=True),
        Column("scorer_version", TEXT, "Version of that scorer.", nullable=True),
        Column("value", REAL, "Estimated success from the state; reward of a trajectory."),
        Column("prompt_value", REAL, "Estimated success from the prompt."),
        Column(
            "p_hat", REAL, "Success rate of the prompt's last 16 attempts, with two more tries."
        ),
        Column(
            "prompt_mean_reward",
            REAL,
            "Mean reward of the prompt's last 16 attempts.",
            nullable=True,
        ),
        Column("base", REAL, "What the priority rests on, such as the gain."),
        Column("freshness", REAL, "Factor for age."),
        Column("rarity", REAL, "Factor for how rare its signature is."),
        Column("priority", REAL, "exp(beta base) freshness rarity^0.5."),
        Column("probability", REAL, "Probability of being the first pick."),
        Column("gumbel_key", REAL, "Key it was ranked by."),
        Column("pick_kind", TEXT, "prioritised, uniform or substitute."),
        Column("age", INT, "Policy versions since its rollout was sampled."),
    ),
)

RETRIES = Table(
    "retries",
    "re",
    "derived",
    "An old answer was compared with a new one under one scorer version.",
    (
        _RUN,
        _ITERATION,
        Column("old_rollout_id", TEXT, "`rollouts.event_id` of the old answer.", place=True),
        Column("new_rollout_id", TEXT, "`rollouts.event_id` of the new one.", place=True),
        Column("scorer", TEXT, "Scorer of both.", place=True),
        Column("scorer_version", TEXT, "Its version.", place=True),
        Column("prompt_id", TEXT, "The prompt."),
        Column("unit", TEXT, "Unit of the pick: state, trajectory or prompt."),
        Column("pick_id", TEXT, "`picks.event_id` that asked for the new answer."),
        Column("old_score_id", TEXT, "`scores.event_id` of the old answer."),
        Column("new_score_id", TEXT, "`scores.event_id` of the new one."),
        Column("outcome", TEXT, "rescued, retained, regressed or still_failed."),
    ),
)

REVIEWS = Table(
    "reviews",
    "rv",
    "derived",
    "A review of a failed attempt, or at test time of any answer, was read.",
    (
        _RUN,
        _ITERATION,
        Column("rollout_id", TEXT, "`rollouts.event_id` of the review.", place=True),
        Column("attempt_id", TEXT, "`rollouts.event_id` of what it reviews."),
        Column("prompt_id", TEXT, "The prompt."),
        Column("format_sha256", TEXT, "Hash of the texts it was asked with and is read by."),
        Column("status", TEXT, "ok, malformed, empty, truncated or parrot."),
        Column("what_went_wrong", TEXT, "Its first part; NULL where malformed.", nullable=True),
        Column("what_to_do", TEXT, "Its second part; NULL where malformed.", nullable=True),
        Column("review", TEXT, "What the second attempt is given of it."),
        Column("leak", TEXT, "none, answer (it states an answer) or gold (the reference answer)."),
        Column("feedback", TEXT, "Feedback on the attempt that it was shown."),
        Column(
            "memory_json",
            TEXT,
            "Earlier reviews it was shown, as JSON: a list of {review_id, similarity}.",
        ),
        Column("memory_tokens", INT, "Tokens these take in its prompt."),
    ),
)

EMBEDDINGS = Table(
    "embeddings",
    "em",
    "observed",
    "A text was turned into a vector.",
    (
        _RUN,
        Column("target_id", TEXT, "What it stands for: a prompt id.", place=True),
        Column("model", TEXT, "Name and version of what made it.", place=True),
        Column("vector", FLOATS, "The vector, of length 1."),
    ),
)

DISTILLATIONS = Table(
    "distillations",
    "di",
    "derived",
    "A successful second attempt was planned as a target for its prompt alone.",
    (
        _RUN,
        _ITERATION,
        Column("rollout_id", TEXT, "`rollouts.event_id` of the second attempt.", place=True),
        Column("attempt_id", TEXT, "`rollouts.event_id` of the attempt whose prompt it follows."),
        Column("review_id", TEXT, "`rollouts.event_id` of the review that led to it."),
        Column("prompt_id", TEXT, "The prompt."),
    ),
)

REPLAYS = Table(
    "replays",
    "rp",
    "derived",
    "A sample was planned into an optimizer step.",
    (
        _RUN,
        _ITERATION,
        Column("step", INT, "Optimizer step within the iteration, from 0.", place=True),
        Column(
            "rollout_id",
            TEXT,
            "`rollouts.event_id`, or `distillations.event_id` of a distilled one.",
            place=True,
        ),
        Column("batch_id", TEXT, "Hash of the step's rollout ids, in order."),
        Column("position", INT, "Position in the step's batch."),
        Column(
            "unit",
            TEXT,
            "fresh, state, trajectory, prompt, review, second_attempt or distill.",
        ),
        Column("source_run_id", TEXT, "Run the rollout comes from."),
        Column("group_id", TEXT, "Group its advantage was computed in."),
        Column("score_id", TEXT, "`scores.event_id` it was chosen under.", nullable=True),
        Column("reward", REAL, "That score's value.", nullable=True),
        Column("advantage", REAL, "Advantage it enters the loss with."),
        Column(
            "priority", REAL, "Priority it was picked with; NULL for fresh rollouts.", nullable=True
        ),
        Column(
            "probability", REAL, "Probability of its pick; NULL for fresh rollouts.", nullable=True
        ),
        Column("pick_kind", TEXT, "fresh, prioritised, uniform or substitute."),
        Column("age", INT, "Policy versions between its sampling and this step's iteration."),
        Column("pick_id", TEXT, "`picks.event_id` that brought it.", nullable=True, since=2),
        Column(
            "prefix_tokens",
            INT,
            "Given tokens of the response, masked in the policy term.",
            nullable=True,
            since=2,
        ),
        Column(
            "prefix_advantage",
            REAL,
            "Advantage these given tokens enter the loss with.",
            nullable=True,
            since=2,
        ),
        Column(
            "weight",
            REAL,
            "Weight of its term in the loss; NULL for samples without review, which weigh 1.",
            nullable=True,
            since=3,
        ),
    ),
    version=3,
)

LEARNED_SAMPLES = Table(
    "learned_samples",
    "ls",
    "derived",
    "A sample entered an optimizer step; one that was skipped taught nothing (`updates`).",
    (
        _RUN,
        _ITERATION,
        Column("step", INT, "Optimizer step within the iteration.", place=True),
        Column("rollout_id", TEXT, "`replays.rollout_id`.", place=True),
        Column("num_loss_tokens", INT, "Tokens it was trained on; 0 means it left the loss."),
        Column(
            "policy_logprob_mean",
            REAL,
            "Mean log-prob under the policy before the step.",
            nullable=True,
        ),
        Column("mismatch_mean", REAL, "Mean |trainer - sampler| log-prob.", nullable=True),
        Column("mismatch_max", REAL, "Largest |trainer - sampler| log-prob.", nullable=True),
        Column("importance_mean", REAL, "Mean sampler-correction weight.", nullable=True),
        Column("ratio_mean", REAL, "Mean importance ratio policy/old.", nullable=True),
        Column("frac_clipped", REAL, "Fraction of its tokens at the clip.", nullable=True),
        Column(
            "frac_truncated", REAL, "Fraction of its correction weights truncated.", nullable=True
        ),
        Column("kl_mean", REAL, "Mean k3 estimate of KL to the reference.", nullable=True),
        Column("entropy_mean", REAL, "Mean entropy in nats.", nullable=True),
        Column(
            "prefix_weight_mean",
            REAL,
            "Mean weight of its given tokens in the prefix term.",
            nullable=True,
            since=2,
        ),
        Column(
            "prefix_logprob_mean",
            REAL,
            "Mean log-prob of its given tokens under the policy before the step.",
            nullable=True,
            since=2,
        ),
    ),
    version=2,
)

UPDATES = Table(
    "updates",
    "up",
    "derived",
    "An optimizer step was taken, or skipped because nothing had an advantage.",
    (
        _RUN,
        _ITERATION,
        Column("step", INT, "Optimizer step within the iteration.", place=True),
        Column("batch_id", TEXT, "`replays.batch_id` of what it learned from."),
        Column("algorithm", TEXT, "Name of the objective."),
        Column("loss", REAL, "Total loss."),
        Column("policy_loss", REAL, "Its policy term."),
        Column("kl_loss", REAL, "Its KL term, weighted."),
        Column("grad_norm", REAL, "Norm of the gradient before clipping."),
        Column("learning_rate", REAL, "Learning rate of the step."),
        Column("num_sequences", INT, "Sequences in the step."),
        Column("num_loss_tokens", LONG, "Tokens trained on."),
        Column("is_skipped", TRUTH, "True when no sequence had an advantage: no step was taken."),
        Column("metrics_json", TEXT, "Further metrics of the step, as JSON."),
        Column("learn_s", REAL, "Seconds the step took.", timing=True),
    ),
)

POLICIES = Table(
    "policies",
    "po",
    "derived",
    "A policy was published.",
    (
        _RUN,
        Column("policy_version", INT, "0 is the start policy.", place=True),
        Column("iteration", INT, "Iteration that published it."),
        Column("base_digest", TEXT, "Digest of the base model's weights."),
        Column("adapter_digest", TEXT, "Digest of the adapter's weights."),
        Column("policy_digest", TEXT, "Digest of both."),
        Column("adapter_artifact", TEXT, "Artifact with the adapter."),
        Column("optimizer_artifact", TEXT, "Artifact with the optimizer's state.", nullable=True),
    ),
)

VIEWS_PINNED = Table(
    "views_pinned",
    "vp",
    "observed",
    "An iteration fixed the commit it reads history as of.",
    (
        _RUN,
        _ITERATION,
        Column("as_of", LONG, "Number of the newest commit the iteration may read."),
        Column("as_of_sha256", TEXT, "Hash of that commit."),
        Column("scorer_versions_json", TEXT, "Scorer versions it uses, as JSON {scorer: version}."),
        Column(
            "views_json",
            TEXT,
            "Hash of the text of each view its picks depend on, as JSON {view: hash}.",
            nullable=True,
            since=2,
        ),
    ),
    version=2,
)

EVALUATIONS = Table(
    "evaluations",
    "ev",
    "derived",
    "A policy was evaluated.",
    (
        _RUN,
        _ITERATION,
        Column("name", TEXT, "Name of the evaluation.", place=True),
        Column("scorer", TEXT, "Scorer that judged it.", place=True),
        Column("scorer_version", TEXT, "Its version.", place=True),
        Column("policy_version", INT, "Policy that was evaluated."),
        Column("num_prompts", INT, "Prompts with a score."),
        Column("num_unscored", INT, "Prompts without one."),
        Column("mean_score", REAL, "Mean score.", nullable=True),
        Column("ci_low", REAL, "Lower end of the 95 % interval.", nullable=True),
        Column("ci_high", REAL, "Upper end of the 95 % interval.", nullable=True),
        Column("mean_completion_tokens", REAL, "Mean sampled tokens.", nullable=True),
        Column("temperature", REAL, "Sampling temperature; 0 is greedy."),
    ),
)

FAILURES = Table(
    "failures",
    "fa",
    "observed",
    "Something went wrong and was survived.",
    (
        _RUN,
        _ITERATION,
        Column(
            "phase",
            TEXT,
            "generate, score, plan, learn, refit, evaluate, track, flow or import.",
            place=True,
        ),
        Column(
            "subject", TEXT, "What failed: an event id, a batch key or a component.", place=True
        ),
        Column("attempt", INT, "0, or the number of earlier failures of this subject.", place=True),
        Column("kind", TEXT, "Short name of the failure."),
        Column("message", TEXT, "What was expected, what came, what to do."),
    ),
)

IMPORTS = Table(
    "imports",
    "im",
    "observed",
    "A part of a file of another framework was imported.",
    (
        _RUN,
        _ITERATION,
        Column("number", INT, "Files of this iteration before this one.", place=True),
        Column("path", TEXT, "The file, where it was read from."),
        Column("format", TEXT, "verl, trl, verifiers, prime-rl and so on."),
        Column("sha256", TEXT, "Hash of the file's bytes up to `position`; of Parquet, of all."),
        Column("position", LONG, "Where the part ends: bytes of JSON lines, rows of Parquet."),
        Column("first_line", LONG, "Its first line, from 1."),
        Column("num_lines", LONG, "Lines it consists of."),
        Column("num_rollouts", LONG, "Rollouts they became; turns before the last not counted."),
        Column("num_token_rollouts", LONG, "Those with as many log-probs as token ids."),
        Column("num_failures", LONG, "Lines that are none, see `failures`."),
        Column("num_guessed_groups", LONG, "Groups that began here and rest on equal prompts."),
        Column(
            "base_digest",
            TEXT,
            "Digest of the base model's weights, where the importer was told.",
            nullable=True,
        ),
    ),
)

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        RUNS,
        PROMPTS,
        ROLLOUTS,
        ROLLOUT_TOKENS,
        TURNS,
        SCORES,
        STATES,
        VALUE_MODELS,
        REPLAY_PLANS,
        PICKS,
        RETRIES,
        REVIEWS,
        EMBEDDINGS,
        DISTILLATIONS,
        REPLAYS,
        LEARNED_SAMPLES,
        UPDATES,
        POLICIES,
        VIEWS_PINNED,
        EVALUATIONS,
        FAILURES,
        IMPORTS,
    )
}
