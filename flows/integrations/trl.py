"""A TRL run in our event log, and our replay in TRL's own optimizer step, by one line.

    trainer = GRPOTrainer(...)
    record(trainer, "rrl-data")
    trainer.train()

What the loss was given is what is written, once an optimizer step, in one commit: prompts, token
ids, log-probs, the value of each reward function, advantages. The stream is of kind `recorded`:
views take it for a training run, but nothing here can resume it. docs/integrations.md has the rest.

Our choices:
1. Log-probs of the sampler are vLLM's where TRL has them. Where transformers samples, those that
   TRL's loss computes before the weights change are the sampler's: the same weights and
   temperature, as long as nothing cuts the distribution.
2. A replayed completion brings its stored log-probs in the place TRL has for them: with vLLM and its
   correction as the sampler's, else as `old_per_token_logps`, so that TRL's clipped ratio is the
   present policy over the one that sampled it.
3. Where the log cannot be written, TRL finishes the step, saves a checkpoint and stops, and
   `train()` raises: neither what was learned nor that the log ends is lost.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

import storage
from flows.integrations import trl_rows as rows
from flows.integrations.trl_replay import Fit, ReplayOptions, Situation, decide
from flows.integrations.trl_rows import Generation, Judge, MicroBatch, Sample, Step
from flows.integrations.trl_seams import RecordingError, check_seams, unknown_trl, wrap
from flows.machine import PACKAGES, code_version, package_versions
from flows.translate import Row, prompt_row
from rrl_core.sampling.protocol import SamplingParams
from rrl_core.tasks.protocol import Prompt
from storage import Store, StreamWriter

__all__ = ["RecordingError", "ReplayOptions", "RrlRecorder", "record"]

KIND = "recorded"
SAMPLE = "rrl_sample"  # column of TRL's batch: number of the sample, shuffled and cut with the rest
OLD = "old_per_token_logps"


def record(
    trainer: Any,
    store: Store | str | Path,
    *,
    run_id: str | None = None,
    reward: str | None = None,
    answer_column: str = "answer",
    replay: ReplayOptions | None = None,
) -> "RrlRecorder":
    """Write what `trainer` trains on into the log of `store`, from its next `train()` on.

    Args:
        trainer: a GRPOTrainer of TRL, before `train()`.
        store: the store, or its folder, which is made if there is none.
        run_id: name of the run; None: a new one at each `train()`. A run that is in the log goes on
            where it stands when TRL resumes from the checkpoint of its last recorded step.
        reward: the reward function whose value counts as the reward; None: the only one, else
            their weighted sum. A value of 0.999 or more is a success.
        answer_column: column of the data set with the reference answer.
        replay: replay old successes; None means off.

    Raises:
        RecordingError: the trainer is none that can be recorded, or replayed into.
        StorageError: there is something else in the folder.
    """
    check_seams(trainer)
    recorder = RrlRecorder(trainer, _opened_store(store), run_id, reward, answer_column, replay)
    trainer.add_callback(recorder)
    return recorder


def _opened_store(store: Store | str | Path) -> Store:
    return store if isinstance(store, Store) else storage.open(store, create=True)


class RrlRecorder(TrainerCallback):  # type: ignore[misc]
    """What looks into a trainer and writes; made by `record`."""

    def __init__(
        self,
        trainer: Any,
        store: Store,
        run_id: str | None,
        reward: str | None,
        answer_column: str,
        replay: ReplayOptions | None,
    ) -> None:
        _refuse(trainer, replay)
        self.store = store
        self.run_id = run_id or ""
        self._is_named = run_id is not None
        self._trainer = trainer
        self._answer_column = answer_column
        self._replay = replay
        self._judges = rows.judges_of(trainer)
        self._weights = [float(weight) for weight in trainer.reward_weights]
        self._reward = self._reward_judge(reward)
        self._held = ExitStack()
        self._writer: StreamWriter | None = None
        self._error: RecordingError | None = None
        self._prompts: dict[str, Prompt] = {}  # that were not committed yet
        self._known_prompts: set[str] = set()
        self._generation: Generation | None = None
        self._samples: dict[int, Sample] = {}  # of the newest generation, by number
        self._num_samples = 0
        self._open: MicroBatch | None = None
        self._begin_step()
        for name, wrapper in self._wrappers().items():
            wrap(trainer, name, wrapper)

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        return {
            "_generate_and_score_completions": self._on_generation,
            "_generate_single_turn": self._on_sampling,
            "_calculate_rewards": self._on_rewards,
            "compute_loss": self._on_loss,
            "_get_per_token_logps_and_entropies": self._on_logprobs,
            "_get_grad_norm": self._on_grad_norm,
        }

    def _reward_judge(self, name: str | None) -> Judge:
        by_name = {judge.name: judge for judge in self._judges}
        if name is None:
            is_alone = self._weights == [1.0]
            return self._judges[0] if is_alone else rows.weighted_sum(self._judges, self._weights)
        if name not in by_name:
            raise RecordingError(f"reward: expected one of {sorted(by_name)}, came {name!r}")
        return by_name[name]

    def _begin_step(self) -> None:
        self._step = Step()
        self._rows: dict[str, list[Row]] = {"scores": []}
        self._fresh: list[tuple[Sample, bool, Row]] = []  # sampled, whether ended, shared facts
        self._num_of: Counter[str] = Counter()  # samples by prompt
        self._groups_of: Counter[str] = Counter()
        self._pinned: int | None = None
        self._has_replayed = False

    # What transformers tells a callback.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the stream."""
        if not self._is_named:
            self.run_id = f"trl-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        _check_resumed(self.store, self.run_id, state.global_step)
        self._held.enter_context(storage.hold_run(self.store, self.run_id))
        self._opened = _opened_row(self._trainer, state.max_steps)
        self._writer = self.store.open_stream(self.run_id, self._opened)
        known = self.store.read("prompts", run_id=self.run_id)
        self._known_prompts = {row["prompt_id"] for row in known}
        self._error = None
        self._begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Note the learning rate of the step."""
        self._step.learning_rate = float(known["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Commit the step; where that fails, let TRL save a checkpoint and stop."""
        if not self._step.batches:
            raise unknown_trl(f"step {state.global_step} went by without a loss that was seen")
        self._guarded(state.global_step, lambda writer: self._commit(writer, state.global_step))
        self._begin_step()
        if self._error is not None:
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the stream, or raise what ended it early."""
        is_done = state.global_step >= state.max_steps
        reason = None if is_done else f"stopped after step {state.global_step} of {state.max_steps}"
        what = "finished" if is_done else "interrupted"

        def end(writer: StreamWriter) -> None:
            ended = self._opened | {"run_epoch": writer.epoch, "what": what, "reason": reason}
            writer.append({"runs": [ended]}, batch_key=what)

        self._guarded(state.global_step, end)
        self._held.close()
        self._writer = None
        if self._error is not None:
            raise self._error

    def _guarded(self, step: int, action: Callable[[StreamWriter], Any]) -> Any:
        """Return what `action` does with the log; None where it fails, or failed before."""
        if self._error is not None or self._writer is None:
            return None
        try:
            return action(self._writer)
        except (storage.StorageError, OSError) as error:
            self._error = RecordingError(
                f"run {self.run_id}: the log in {self.store.path} ends before step {step}, as it "
                f"could not be written: {error}. TRL saved a checkpoint of that step and stopped: "
                f"put the store right, then `train(resume_from_checkpoint=True)` goes on"
            )
            self._error.__cause__ = error
            return None

    # What the wrapped methods of the trainer tell.

    def _on_generation(self, original: Callable[..., Any], inputs: Any) -> Any:
        if self._writer is None or not self._trainer.model.training:
            return original(inputs)
        iteration = self._trainer.state.global_step + 1
        prompts = [rows.prompt_of(example, self._answer_column) for example in inputs]
        if self._pinned is None:
            self._pinned = self._guarded(iteration, lambda writer: self._pin(writer, iteration))
        self._generation = generation = Generation(iteration, prompts)
        try:
            output = original(inputs)
        finally:
            self._generation = None
        self._take(generation, output)
        return output

    def _on_sampling(
        self, original: Callable[..., Any], prompt_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        generation = self._generation
        started = time.monotonic()
        completion_ids, logprobs = original(prompt_ids, *args, **kwargs)
        if generation is None:
            return completion_ids, logprobs
        generation.generate_s += time.monotonic() - started
        if self._replay is None or self._has_replayed or self._pinned is None:
            return completion_ids, logprobs
        self._has_replayed = True
        return self._replaced(generation, prompt_ids, completion_ids, logprobs)

    def _replaced(
        self, generation: Generation, prompt_ids: Any, completion_ids: Any, logprobs: Any
    ) -> tuple[Any, Any]:
        """Return a batch with the last completion of some groups replaced by an old success."""
        assert self._replay is not None
        assert self._pinned is not None
        options, trainer = self._replay, self._trainer
        size = trainer.num_generations
        last: dict[str, int] = {}
        for start in range(0, len(prompt_ids), size):
            last.setdefault(generation.prompts[start].prompt_id, start + size - 1)
        now = Situation(
            self.run_id, generation.iteration, trainer.state.max_steps, self._pinned,
            trainer.args.seed,
        )  # fmt: skip
        fit = Fit(
            {prompt_id: list(prompt_ids[i]) for prompt_id, i in last.items()},
            float(trainer.temperature),
            trainer.max_completion_length,
        )
        picked = self._guarded(
            generation.iteration, lambda writer: decide(self.store, writer, options, now, fit)
        )
        completion_ids = list(completion_ids)
        logprobs = None if logprobs is None else list(logprobs)
        for sample in picked or ():
            i = last[sample.rollout["prompt_id"]]
            generation.replayed[i] = sample
            generation.displaced[i] = (completion_ids[i], None if logprobs is None else logprobs[i])
            completion_ids[i] = list(sample.completion_ids)
            if logprobs is not None:
                logprobs[i] = list(sample.logprobs or ())
        return completion_ids, logprobs

    def _on_rewards(
        self,
        original: Callable[..., Any],
        inputs: Any,
        prompts: Any,
        completions: Any,
        completion_ids_list: Any,
    ) -> Any:
        started = time.monotonic()
        values_BF = original(inputs, prompts, completions, completion_ids_list)
        if self._generation is not None:
            self._generation.score_s = time.monotonic() - started
            self._generation.values_BF = values_BF.detach().cpu()
            self._generation.completion_ids = [list(ids) for ids in completion_ids_list]
        return values_BF

    def _on_loss(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._writer is None or not self._trainer.model.training or SAMPLE not in inputs:
            return original(model, inputs, *args, **kwargs)
        given = dict(inputs)
        samples = [self._samples[number] for number in given.pop(SAMPLE).tolist()]
        self._open = batch = MicroBatch(samples, given)
        try:
            loss = original(model, given, *args, **kwargs)
        finally:
            self._open = None
        batch.loss = float(loss.detach())
        self._step.batches.append(batch)
        return loss

    def _on_logprobs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        batch = self._open
        if batch is None or batch.logprobs_BT is not None:
            return answer
        batch.logprobs_BT = answer[0].detach()
        batch.entropies_BT = None if answer[1] is None else answer[1].detach()
        if OLD not in batch.inputs and any(sample.pick for sample in batch.samples):
            batch.inputs[OLD] = _with_stored(batch.logprobs_BT, batch.samples)
        iteration = self._trainer.state.global_step + 1
        mask_BT = batch.mask()
        for row, sample in enumerate(batch.samples):
            if not sample.is_committed and sample.rollout["iteration"] == iteration:
                self._learn_logprobs(sample, batch.logprobs_BT[row], mask_BT[row])
        return answer

    def _on_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self._step.grad_norm = float(norm)
        return norm

    # From what was seen to rows.

    def _take(self, generation: Generation, output: dict[str, Any]) -> None:
        """Take a generation batch as TRL finished it, and number its samples in the batch."""
        size = self._trainer.num_generations
        sampler_BT, old_BT = output.get("sampling_per_token_logps"), output.get(OLD)
        facts = {
            "engine": "vllm" if self._trainer.use_vllm else "transformers",
            "batch_key": f"i{generation.iteration:06d}-{self._num_samples}",
            "generate_s": generation.generate_s,
        }
        samples = []
        for i, prompt in enumerate(generation.prompts):
            if i % size == 0:
                self._groups_of[prompt.prompt_id] += 1
            prompt_ids = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
            replayed = generation.replayed.get(i)
            own_ids, own_logprobs = generation.displaced.get(
                i, (generation.completion_ids[i], None)
            )
            fresh = self._fresh_sample(generation, prompt, (prompt_ids, own_ids), facts)
            if replayed is not None:
                if own_logprobs is not None:
                    fresh.set_logprobs(own_logprobs)
                replayed.group_id = fresh.group_id
            elif sampler_BT is not None:
                fresh.set_logprobs(sampler_BT[i, : len(own_ids)].tolist())
            elif old_BT is not None:
                self._learn_logprobs(fresh, old_BT[i], output["completion_mask"][i].bool())
            sample = replayed or fresh
            sample.advantage = float(output["advantages"][i].float().mean())
            self._score(generation, i, sample)
            samples.append(sample)
        if old_BT is not None and generation.replayed and not self._is_corrected():
            output[OLD] = _with_stored(old_BT, samples)
        numbers = range(self._num_samples, self._num_samples + len(samples))
        self._samples = dict(zip(numbers, samples, strict=True))
        self._num_samples += len(samples)
        output[SAMPLE] = torch.tensor(list(numbers), device=output["prompt_ids"].device)

    def _fresh_sample(
        self, generation: Generation, prompt: Prompt, ids: tuple[Any, Any], facts: Row
    ) -> Sample:
        """Return a completion that was sampled now, and keep it for the step's commit."""
        prompt_id, trainer = prompt.prompt_id, self._trainer
        numbers = (self._num_of[prompt_id], self._groups_of[prompt_id] - 1)
        self._num_of[prompt_id] += 1
        sample = rows.fresh_sample(self.run_id, generation.iteration, prompt_id, numbers, ids)
        sample.text = trainer.processing_class.decode(ids[1], skip_special_tokens=True)
        if prompt_id not in self._known_prompts:
            self._prompts.setdefault(prompt_id, prompt)
        ends = {*trainer.eos_token_ids, trainer.processing_class.pad_token_id}
        self._fresh.append((sample, bool(ids[1]) and ids[1][-1] in ends, facts))
        return sample

    def _learn_logprobs(self, sample: Sample, logprobs_T: Tensor, mask_T: Tensor) -> None:
        """Take the trainer's log-probs as those of the sampler, where they are."""
        if sample.logprobs_reason != rows.PENDING:
            return
        cut = _cut_distribution(self._trainer)
        if cut is not None:
            sample.logprobs_reason = cut
        elif int(mask_T.sum()) != len(sample.completion_ids):
            sample.logprobs_reason = "TRL masks some of its tokens"
        else:
            sample.set_logprobs(logprobs_T[: len(sample.completion_ids)].tolist())

    def _score(self, generation: Generation, i: int, sample: Sample) -> None:
        """Keep the judgements of a sample for the step's commit."""
        values = dict(zip(self._judges, generation.values_BF[i].tolist(), strict=True))
        if self._reward not in values:
            summed = generation.values_BF[i].double() * torch.tensor(self._weights).double()
            values[self._reward] = float(summed.nansum() if not summed.isnan().all() else torch.nan)
        elapsed_ms = 1e3 * generation.score_s / len(generation.prompts)
        found = rows.score_rows(generation.iteration, sample, values, elapsed_ms)
        self._rows["scores"] += found
        [own] = [row for row in found if row["scorer"] == self._reward.name]
        sample.reward = own["value"]
        sample.score_id = storage.event_id("scores", own | {"run_id": self.run_id})

    def _is_corrected(self) -> bool:
        """Whether TRL's loss weighs the sampler's log-probs by itself."""
        trainer = self._trainer
        return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)

    def _pin(self, writer: StreamWriter, iteration: int) -> int:
        """Fix what the step may read of the log, and by whom it is judged."""
        head = self.store.head()
        judges = {self._reward.name: self._reward.version}  # the first is the reward
        judges |= {judge.name: judge.version for judge in self._judges}
        views = storage.view_digests("replay_buffer") if self._replay else {}
        row = {
            "iteration": iteration,
            "as_of": head.number,
            "as_of_sha256": head.sha256,
            "scorer_versions_json": json.dumps(judges),
            "views_json": json.dumps(views),
        }
        written = writer.append({"views_pinned": [row]}, batch_key=f"i{iteration:06d}-pin")
        return int(written.rows["views_pinned"][0]["as_of"])

    def _commit(self, writer: StreamWriter, iteration: int) -> None:
        """Commit all of a step at once."""
        if self._pinned is None:
            self._pin(writer, iteration)
        trainer, step = self._trainer, self._step
        params = SamplingParams(
            float(trainer.temperature),
            float(trainer.top_p),
            int(trainer.top_k or 0),
            int(trainer.max_completion_length),
        )
        pairs = [
            rows.sampled_rows(sample, params, "stop" if is_ended else "length", facts)
            for sample, is_ended, facts in self._fresh
        ]
        kl_loss = 0.0
        if trainer.beta:
            recent = trainer._metrics["train"]["kl"][-len(step.batches) :]
            kl_loss = float(trainer.beta) * sum(recent) / max(1, len(recent))
        writer.append(
            {
                "prompts": [prompt_row(prompt) for prompt in self._prompts.values()],
                "rollouts": [rollout for rollout, _ in pairs],
                "rollout_tokens": [tokens for _, tokens in pairs],
                "scores": self._rows["scores"],
                "replays": rows.replay_rows(iteration, step),
                "learned_samples": rows.learned_rows(iteration, step),
                "updates": [rows.update_row(iteration, step, trainer.loss_type, kl_loss)],
            },
            batch_key=f"i{iteration:06d}-step",
            closes_iteration=iteration,
        )
        self._known_prompts |= self._prompts.keys()
        self._prompts = {}
        for sample, _, _ in self._fresh:
            sample.is_committed = True


def _refuse(trainer: Any, replay: ReplayOptions | None) -> None:
    """Refuse trainers whose batches are not what this module takes them for."""
    if trainer.accelerator.num_processes > 1:
        raise RecordingError(
            f"expected a trainer of one process; came {trainer.accelerator.num_processes}: each "
            "would see its own part of a group"
        )
    if trainer.environment_factories is not None:
        raise RecordingError("expected prompts from a data set; came environments")
    if replay is None:
        return
    if trainer.tools or trainer.rollout_func is not None:
        raise RecordingError(
            "replay: expected completions that TRL samples by itself; came tools or a "
            "`rollout_func`: record without `replay`"
        )
    cut = _cut_distribution(trainer)
    if cut is not None:
        raise RecordingError(f"replay needs the log-probs of whole distributions: {cut}")


def _cut_distribution(trainer: Any) -> str | None:
    """Return why the trainer's log-probs are not the sampler's; None where they are."""
    neutral = {"top_p": (1.0,), "top_k": (0, None), "min_p": (0.0, None),
               "repetition_penalty": (1.0,)}  # fmt: skip
    cut = [name for name, values in neutral.items() if getattr(trainer, name) not in values]
    if trainer.args.generation_kwargs:
        cut.append("generation_kwargs")
    return f"{', '.join(cut)} change the distribution that was sampled from" if cut else None


def _with_stored(logprobs_BT: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return log-probs with those of replayed rows as they were stored."""
    changed_BT = logprobs_BT.detach().clone()
    for row, sample in enumerate(samples):
        if sample.pick is not None:
            stored = torch.tensor(sample.logprobs, dtype=changed_BT.dtype)
            changed_BT[row, : len(stored)] = stored.to(changed_BT.device)
    return changed_BT


def _opened_row(trainer: Any, planned: int) -> Row:
    config = {
        "trainer": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "model": trainer.model.config._name_or_path,
        "args": json.loads(trainer.args.to_json_string()),
    }
    return {
        "kind": KIND,
        "config_json": json.dumps(config, sort_keys=True),
        "seed_root": trainer.args.seed,
        "planned_iterations": planned,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions((*PACKAGES, "trl")), sort_keys=True),
    }


def _check_resumed(store: Store, run_id: str, step: int) -> None:
    """Refuse to write steps that are in the log already.

    Raises:
        RecordingError: says from which step TRL would have to go on.
    """
    opened = store.read("runs", run_id=run_id)
    if opened and opened[0]["kind"] != KIND:
        raise RecordingError(
            f"run {run_id} is in the log as a stream of kind {opened[0]['kind']}: give another name"
        )
    newest = max((row["iteration"] for row in store.read("updates", run_id=run_id)), default=0)
    if newest > step:
        raise RecordingError(
            f"run {run_id} has steps up to {newest} in the log, TRL begins after step {step}: "
            f"resume from the checkpoint of step {newest}, or record under another `run_id`"
        )
