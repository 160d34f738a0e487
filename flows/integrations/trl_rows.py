"""What TRL trained on, as rows: prompts, rollouts, scores, planned and learned samples.

Our choices:
1. An iteration is an optimizer step of TRL (`global_step`), its only step is 0. A rollout belongs
   to the step before whose end it was sampled; a step that learns from it again is a later
   iteration. The policy version of a rollout is the number of steps taken when it was sampled.
2. TRL draws from generators of its own: `seed` names the place of a rollout and repeats nothing.
3. `policy_digest` is empty: TRL's weights are not ours to hash at every step.
"""

import hashlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import storage
from flows.batching import batch_id_of
from flows.integrations.trl_seams import RecordingError
from flows.translate import Row, group_id, rollout_place, rollout_rows
from rrl_core.sampling.protocol import Completion, FinishReason, SampleRequest, SamplingParams
from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import Prompt, make_prompt_id
from rrl_core.tasks.signature import solution_signature

TASK = "trl"
SUM = "weighted_sum"
PENDING = "TRL did not compute them before its weights changed"


@dataclass(frozen=True)
class Judge:
    """A reward function, or the weighted sum of all, by name and version."""

    name: str
    version: str


@dataclass
class Sample:
    """One completion of a generation batch: sampled now, or replayed (`pick`).

    `rollout` is the committed row of a replayed one, else the place. `logprobs` may become known
    when TRL computes them for its loss.
    """

    rollout: Row
    group_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    text: str = ""
    logprobs_reason: str | None = PENDING
    pick: Row | None = None
    is_committed: bool = False
    advantage: float = 0.0
    reward: float | None = None
    score_id: str | None = None

    @property
    def rollout_id(self) -> str:
        """`rollouts.event_id`."""
        return storage.event_id("rollouts", self.rollout)

    def set_logprobs(self, logprobs: Sequence[float]) -> None:
        """Take what the sampler gave; numbers that are not finite say nothing."""
        if len(logprobs) == len(self.completion_ids) and all(map(math.isfinite, logprobs)):
            self.logprobs, self.logprobs_reason = list(logprobs), None
        else:
            self.logprobs_reason = "the engine gave no finite log-prob for every token"


@dataclass
class Generation:
    """A batch of completions while TRL makes, scores and compares it."""

    iteration: int
    prompts: list[Prompt]
    completion_ids: list[list[int]] = field(default_factory=list)
    values_BF: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    replayed: dict[int, Sample] = field(default_factory=dict)
    displaced: dict[int, tuple[list[int], list[float] | None]] = field(default_factory=dict)
    """What was sampled where a replayed completion stands, and its log-probs."""
    generate_s: float = 0.0
    score_s: float = 0.0


@dataclass
class MicroBatch:
    """What one call of TRL's loss was given, and the log-probs it computed from it."""

    samples: list[Sample]
    inputs: dict[str, Any]
    loss: float = 0.0
    logprobs_BT: Tensor | None = None
    entropies_BT: Tensor | None = None

    def mask(self) -> Tensor:
        """Return which tokens are in the loss: [B, T] bool."""
        mask_BT: Tensor = self.inputs["completion_mask"]
        tool_mask_BT = self.inputs.get("tool_mask")
        return (mask_BT if tool_mask_BT is None else mask_BT * tool_mask_BT).bool()


@dataclass
class Step:
    """An optimizer step: what was sampled, its micro-batches, what the optimizer was told."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    fresh: list[tuple[Sample, bool, Row]] = field(default_factory=list)
    """What was sampled, whether it came to an end, and facts of its batch."""
    scores: list[Row] = field(default_factory=list)
    batches: list[MicroBatch] = field(default_factory=list)
    grad_norm: float = 0.0
    learning_rate: float = 0.0


def prompt_of(example: Mapping[str, Any], answer_column: str) -> Prompt:
    """Return an example of TRL's data set as a prompt; further short columns are its `meta`.

    Raises:
        RecordingError: it is no text, or messages of something else than text.
    """
    asked = example.get("prompt")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    is_text = isinstance(asked, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in asked
    )
    if not is_text or not asked:
        raise RecordingError(
            "expected a `prompt` of text, or of messages whose content is text; came "
            f"{type(asked).__name__}: images and environments are not recorded"
        )
    messages = tuple({"role": str(m["role"]), "content": m["content"]} for m in asked)
    answer = example.get(answer_column)
    answer = None if answer is None else str(answer)
    given = example.get("prompt_id")
    prompt_id = given if isinstance(given, str) else make_prompt_id(TASK, "train", messages, answer)
    meta = {
        name: str(value)
        for name, value in sorted(example.items())
        if name not in ("prompt", "prompt_id", answer_column)
        and isinstance(value, str | int | float)
    }
    return Prompt(prompt_id, TASK, "train", messages, answer, "", meta)


def judges_of(trainer: Any) -> list[Judge]:
    """Return the reward functions by name and version; of two with one name the later gets a 2."""
    seen = Counter([SUM])  # a name of ours
    judges = []
    for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        seen[name] += 1
        own = name if seen[name] == 1 else f"{name}-{seen[name]}"
        judges.append(Judge(own, _version(function)))
    return judges


def _version(function: Any) -> str:
    """Return a hash of a function's text: an edited reward is a new judge."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        try:
            source = inspect.getsource(type(function))
        except (OSError, TypeError):
            return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def reward_judge(judges: Sequence[Judge], weights: Sequence[float], name: str | None) -> Judge:
    """Return whose value is the reward: the named function, the only one, or their weighted sum.

    Raises:
        RecordingError: there is no function of that name.
    """
    by_name = {judge.name: judge for judge in judges}
    if name is not None:
        if name not in by_name:
            raise RecordingError(f"reward: expected one of {sorted(by_name)}, came {name!r}")
        return by_name[name]
    if list(weights) == [1.0]:
        return judges[0]
    parts = [[judge.name, judge.version, w] for judge, w in zip(judges, weights, strict=True)]
    return Judge(SUM, hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12])


def weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return what TRL compares: NaN where every function returned None, else without these."""
    parts = [w * v for w, v in zip(weights, values, strict=True) if not math.isnan(v)]
    return sum(parts) if parts else math.nan


def fresh_sample(
    run_id: str, iteration: int, prompt_id: str, numbers: tuple[int, int], ids: tuple[Any, Any]
) -> Sample:
    """Return a completion that was sampled now.

    Args:
        run_id: the run.
        iteration: the step it is sampled for.
        prompt_id: its prompt.
        numbers: its index among the prompt's samples of the step, and its group's.
        ids: token ids of prompt and completion.
    """
    place = rollout_place(run_id, iteration, "attempt", prompt_id, numbers[0])
    group = group_id(place) + (f"-{numbers[1]}" if numbers[1] else "")
    return Sample(place, group, list(ids[0]), list(ids[1]), None)


def sampled_rows(
    sample: Sample, params: SamplingParams, finish: FinishReason, facts: Row
) -> tuple[Row, Row]:
    """Return the `rollouts` and `rollout_tokens` rows of a fresh sample."""
    place = sample.rollout
    parts = [place["iteration"], place["prompt_id"], place["sample_index"]]
    request = SampleRequest(tuple(sample.prompt_ids), derive_seed(0, TASK, *parts))
    logprobs = None if sample.logprobs is None else tuple(sample.logprobs)
    completion = Completion(
        tuple(sample.completion_ids), logprobs, finish, sample.text, sample.logprobs_reason
    )
    shared = {"policy_version": place["iteration"] - 1, "policy_digest": "", "sync": "shared"}
    rollout, tokens = rollout_rows(place, request, params, completion, shared | facts)
    return rollout | {"group_id": sample.group_id}, tokens


def score_rows(
    iteration: int, sample: Sample, values: Mapping[Judge, float], elapsed_ms: float
) -> list[Row]:
    """Return the `scores` rows of a sample; a value that is not finite becomes a missing one.

    Args:
        iteration: the step it was judged for.
        sample: what was judged.
        values: by reward function; NaN where it returned None.
        elapsed_ms: milliseconds the judgements took, a sample.
    """
    parts = {judge.name: value for judge, value in values.items() if math.isfinite(value)}
    rows = []
    for judge, value in values.items():
        is_ok = math.isfinite(value)
        components = {n: v for n, v in parts.items() if n != SUM} if judge.name == SUM else {}
        rows.append(
            {
                "iteration": iteration,
                "target_id": sample.rollout_id,
                "scorer": judge.name,
                "scorer_version": judge.version,
                "attempt": 0,
                "target_kind": "rollout",
                "kind": "reward",
                "value": value if is_ok else None,
                "status": "ok"
                if is_ok
                else ("unscorable" if math.isnan(value) else "scorer_error"),
                "components_json": json.dumps(components, sort_keys=True),
                "feedback": "",
                "elapsed_ms": elapsed_ms,
                "signature": solution_signature(sample.text) if is_ok else None,
            }
        )
    return rows


def replay_rows(iteration: int, step: Step) -> list[Row]:
    """Return the `replays` rows of a step: a sample that was in it twice has one, of weight 2."""
    samples = {s.rollout_id: s for batch in step.batches for s in batch.samples}
    times = Counter(s.rollout_id for batch in step.batches for s in batch.samples)
    batch_id = batch_id_of(list(samples))
    return [
        {
            "iteration": iteration,
            "step": 0,
            "position": position,
            "batch_id": batch_id,
            "rollout_id": rollout_id,
            "unit": "fresh" if sample.pick is None else "trajectory",
            "source_run_id": sample.rollout["run_id"],
            "group_id": sample.group_id,
            "score_id": sample.score_id,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "priority": sample.pick and sample.pick["priority"],
            "probability": sample.pick and sample.pick["probability"],
            "pick_kind": "fresh" if sample.pick is None else sample.pick["pick_kind"],
            "age": iteration - sample.rollout["iteration"],
            "pick_id": sample.pick and sample.pick["event_id"],
            "weight": None if times[rollout_id] == 1 else float(times[rollout_id]),
        }
        for position, (rollout_id, sample) in enumerate(samples.items())
    ]


def learned_rows(iteration: int, step: Step) -> list[Row]:
    """Return the `learned_samples` rows of a step; of a sample in it twice, the first pass."""
    rows: dict[str, Row] = {}
    for batch in step.batches:
        mask_BT = batch.mask().cpu()
        for row, sample in enumerate(batch.samples):
            if sample.rollout_id not in rows:
                place = {"iteration": iteration, "step": 0, "rollout_id": sample.rollout_id}
                rows[sample.rollout_id] = place | _statistics(batch, row, sample, mask_BT[row])
    return list(rows.values())


def _statistics(batch: MicroBatch, row: int, sample: Sample, mask_T: Tensor) -> Row:
    of_row = partial(_row_of, row=row, mask_T=mask_T)
    policy = of_row(batch.logprobs_BT)
    old = of_row(batch.inputs.get("old_per_token_logps"))
    ratio = None if policy is None or old is None else (policy - old).exp()
    gap = None
    if policy is not None and sample.logprobs is not None and len(policy) == len(sample.logprobs):
        gap = (policy - torch.tensor(sample.logprobs, dtype=torch.float64)).abs()
    return {
        "num_loss_tokens": int(mask_T.sum()),
        "policy_logprob_mean": _mean(policy),
        "mismatch_mean": _mean(gap),
        "mismatch_max": None if gap is None or _mean(gap) is None else float(gap.max()),
        "importance_mean": _mean(of_row(batch.inputs.get("importance_sampling_ratio"))),
        "ratio_mean": _mean(ratio),
        "entropy_mean": _mean(of_row(batch.entropies_BT)),
    }


def _row_of(values_BT: Tensor | None, row: int, mask_T: Tensor) -> Tensor | None:
    """Return the masked values of a row; a weight of the whole sequence stands alone."""
    if values_BT is None:
        return None
    values_T = values_BT[row].detach().cpu().double()
    return values_T if values_T.shape != mask_T.shape else values_T[mask_T]


def _mean(values: Tensor | None) -> float | None:
    if values is None or not len(values) or not bool(torch.isfinite(values).all()):
        return None
    return float(values.mean())


def update_row(iteration: int, step: Step, loss_type: str, kl_loss: float) -> Row:
    """Return the `updates` row of a step; a number that is not finite is 0 and in the metrics."""
    ids = dict.fromkeys(s.rollout_id for batch in step.batches for s in batch.samples)
    loss = sum(batch.loss for batch in step.batches)
    numbers = {"loss": loss, "policy_loss": loss - kl_loss, "kl_loss": kl_loss}
    numbers["grad_norm"] = step.grad_norm
    wrong = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    return {
        "iteration": iteration,
        "step": 0,
        "batch_id": batch_id_of(list(ids)),
        "algorithm": f"trl {loss_type}",
        **{name: 0.0 if name in wrong else value for name, value in numbers.items()},
        "learning_rate": step.learning_rate,
        "num_sequences": sum(len(batch.samples) for batch in step.batches),
        "num_loss_tokens": sum(int(batch.mask().sum()) for batch in step.batches),
        "is_skipped": False,
        "metrics_json": json.dumps({"not_finite": wrong} if wrong else {}),
        "learn_s": 0.0,
    }
