"""What goes into the learner and what comes out: samples, settings, the result of a step."""

from dataclasses import dataclass
from typing import Literal, get_args

from rrl_core.algorithms.corrections import CORRECTIONS
from rrl_core.algorithms.kl import KL_ESTIMATORS
from rrl_core.algorithms.objectives import ALGORITHMS
from rrl_core.algorithms.prefix_credit import PREFIX_CREDITS
from rrl_core.policy.statistics import SampleStats

Term = Literal["attempt", "review", "second_attempt", "distill"]
TERMS: tuple[Term, ...] = get_args(Term)


class LearnerError(ValueError):
    """A step cannot be taken; the message names the sample. The adapter is unchanged."""


@dataclass(frozen=True)
class LearnSample:
    """One completion to learn from.

    `prompt_ids` are given, `completion_ids` trained on: both as the sampler had them, never
    re-encoded. `sampler_logprobs` are natural logs under the tempered full distribution, one per
    completion id; None where the sampler gave none. `temperature` > 0 divides the trainer's logits.
    `weight` multiplies the sample's loss and leaves the denominators alone.

    `loss_mask` tells of each completion id whether it is trained on, None: all are. Of an episode
    of several turns those are masked that a tool or an environment said: they are seen, and in no
    term and no denominator. `prefix_mask` tells the same of `prefix_ids`.

    Under an algorithm with a critic `reward`, what the completion earned, takes the place of
    `advantage`; `is_truncated` tells that it was cut off, so what would have followed counts too.

    Of a continuation `prefix_ids` are the given tokens between the prompt and what was sampled:
    masked in the policy term. With `prefix_advantage` > 0 they enter the prefix term (see
    `algorithms.prefix_credit`), with `prefix_logprobs` those under the sampler that first wrote
    them; None where it gave none.

    `term` says what it is learned as. Attempts, reviews and second attempts have a policy term each
    and differ in the metrics only. A sample to `distill` is a second attempt that follows its
    prompt alone (see `algorithms.distill`): `prompt_ids` hold no review; advantage and
    `sampler_logprobs` are not read, `prefix_ids` must be empty.
    """

    rollout_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...] | None
    advantage: float
    temperature: float = 1.0
    weight: float = 1.0
    prefix_ids: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] | None = None
    prefix_advantage: float = 0.0
    reward: float | None = None
    is_truncated: bool = False
    term: Term = "attempt"
    loss_mask: tuple[bool, ...] | None = None
    prefix_mask: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class LearnerConfig:
    """How the learner learns. `None` means off, for `clip_low` and `clip_high` the algorithm's own.

    `kl_coef` 0 turns the KL term (and the reference's forward pass) off. `correction_cap` is C.
    `max_completion_tokens` is the constant length of dr_grpo. `micro_batch_tokens` bounds the nodes
    of one forward pass: memory, not results (on a CPU one group a pass is quickest, some 1024).

    The last seven are read under an algorithm with a critic only: `gamma` and `lam` of GAE, weight
    and clip of the value loss, the critic's own learning rate, how many iterations it learns alone
    before the policy does, and the seed of its adapter.
    """

    algorithm: str = "grpo"
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float | None = 1.0
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    correction: str = "token_truncate"
    correction_cap: float = 2.0
    prefix_credit: str = "direct"
    max_completion_tokens: int = 64
    micro_batch_tokens: int = 1024
    packing: bool = True
    skip_zero_advantage: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    vf_coef: float = 0.5
    value_clip: float | None = 0.2
    critic_learning_rate: float = 2e-4
    critic_warmup: int = 2
    critic_seed: int = 0

    def __post_init__(self) -> None:
        for name, table in (
            ("algorithm", ALGORITHMS),
            ("kl_estimator", KL_ESTIMATORS),
            ("correction", CORRECTIONS),
            ("prefix_credit", PREFIX_CREDITS),
        ):
            if getattr(self, name) not in table:
                raise ValueError(
                    f"expected `{name}` to be one of {', '.join(sorted(table))}, "
                    f"got {getattr(self, name)!r}"
                )
        for name, is_right, bounds in (
            ("correction_cap", self.correction_cap > 1, "above 1"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "above 1, or None"),
            ("max_completion_tokens", self.max_completion_tokens > 0, "positive"),
            ("kl_coef", self.kl_coef >= 0, "0 or more"),
            ("gamma", 0 < self.gamma <= 1, "above 0 and at most 1"),
            ("lam", 0 <= self.lam <= 1, "between 0 and 1"),
            ("vf_coef", self.vf_coef > 0, "positive"),
            ("value_clip", self.value_clip is None or self.value_clip > 0, "positive, or None"),
            ("critic_learning_rate", self.critic_learning_rate > 0, "positive"),
            ("critic_warmup", self.critic_warmup >= 0, "0 or more"),
        ):
            if not is_right:
                raise ValueError(f"expected `{name}` to be {bounds}, got {getattr(self, name)}")

    @property
    def correction_in_force(self) -> str:
        """The correction of the algorithm's objective: none where it has no ratio."""
        return self.correction if ALGORITHMS[self.algorithm].has_ratio else "none"

    @property
    def clip_range(self) -> tuple[float, float]:
        """The (low, high) clip range in force."""
        own = ALGORITHMS[self.algorithm]
        return (
            own.clip_low if self.clip_low is None else self.clip_low,
            own.clip_high if self.clip_high is None else self.clip_high,
        )


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    `loss` = `policy_loss` + `kl_loss` (weighted); with a critic, + `vf_coef` times the metric
    `value_loss`. `policy_loss` is that of all terms, the distilled one included; where a step has
    others than attempts, `metrics` tell them apart. `grad_norm` is the policy's, before clipping: 0
    while the critic learns alone, in steps that are not `is_skipped` all the same.
    `num_sequences` and `num_loss_tokens` are the denominators: samples that were skipped count,
    samples that left the loss do not, nor do distilled ones. `samples` are in the order given.
    `elapsed_s` is the only part that depends on the clock. `metrics` are over the tokens that were
    run.
    """

    loss: float
    policy_loss: float
    kl_loss: float
    grad_norm: float
    learning_rate: float
    num_sequences: int
    num_loss_tokens: int
    is_skipped: bool
    metrics: dict[str, float]
    samples: list[SampleStats]
    elapsed_s: float
