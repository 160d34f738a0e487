"""What a GRPOTrainer does with its samples, seen from inside: the wrappers of `trl_seams`.

A generation batch is followed from the examples TRL begins with to the advantages it ends with, its
samples are numbered in a column of TRL's own batch, and by these numbers every micro-batch of the
loss is known again, however TRL shuffled and cut.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import storage
from flows.integrations import trl_rows as rows
from flows.integrations.trl_replay import Fit
from flows.integrations.trl_rows import Generation, Judge, MicroBatch, Sample, Step
from flows.integrations.trl_seams import cut_distribution, wrap
from flows.translate import Row
from rrl_core.tasks.protocol import Prompt

SAMPLE = "rrl_sample"  # column of TRL's batch: the number of the sample
OLD = "old_per_token_logps"

Begin = Callable[[int], None]  # told of the step that a generation is for
Choose = Callable[[int, Fit], Sequence[Sample]]  # what that step replays, called once a step


class Watcher:
    """Wraps a trainer and gathers what each optimizer step was given; idle until `start`."""

    def __init__(
        self,
        trainer: Any,
        judges: Sequence[Judge],
        reward: Judge,
        answer_column: str,
        begin: Begin,
        choose: Choose | None,
    ) -> None:
        self.run_id = ""
        self.step = Step()
        self._trainer = trainer
        self._judges = judges
        self._reward = reward
        self._answer_column = answer_column
        self._begin = begin
        self._choose = choose
        self._generation: Generation | None = None
        self._samples: dict[int, Sample] = {}  # of the newest generation, by number
        self._num_samples = 0
        self._open: MicroBatch | None = None
        self.begin_step()
        wrappers: dict[str, Callable[..., Any]] = {
            "_generate_and_score_completions": self._on_generation,
            "_generate_single_turn": self._on_sampling,
            "_calculate_rewards": self._on_rewards,
            "compute_loss": self._on_loss,
            "_get_per_token_logps_and_entropies": self._on_logprobs,
            "_get_grad_norm": self._on_grad_norm,
        }
        for name, wrapper in wrappers.items():
            wrap(trainer, name, wrapper)

    def start(self, run_id: str) -> None:
        """Gather for the run from now on; for none with ""."""
        self.run_id = run_id
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step that was."""
        self.step = Step()
        self._num_of: Counter[str] = Counter()  # samples by prompt
        self._groups_of: Counter[str] = Counter()
        self._has_chosen = False

    def _is_training(self) -> bool:
        return bool(self.run_id and self._trainer.model.training)

    def _on_generation(self, original: Callable[..., Any], inputs: Any) -> Any:
        if not self._is_training():
            return original(inputs)
        iteration = self._trainer.state.global_step + 1
        prompts = [rows.prompt_of(example, self._answer_column) for example in inputs]
        self._begin(iteration)
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
        if self._choose is None or self._has_chosen:
            return completion_ids, logprobs
        self._has_chosen = True
        return self._replaced(generation, prompt_ids, completion_ids, logprobs)

    def _replaced(
        self, generation: Generation, prompt_ids: Any, completion_ids: Any, logprobs: Any
    ) -> tuple[Any, Any]:
        """Return a batch with the last completion of some groups replaced by an old success."""
        assert self._choose is not None
        trainer = self._trainer
        size = trainer.num_generations
        last: dict[str, int] = {}
        for start in range(0, len(prompt_ids), size):
            last.setdefault(generation.prompts[start].prompt_id, start + size - 1)
        fit = Fit(
            len(prompt_ids),
            {prompt_id: list(prompt_ids[i]) for prompt_id, i in last.items()},
            float(trainer.temperature),
            trainer.max_completion_length,
        )
        completion_ids = list(completion_ids)
        logprobs = None if logprobs is None else list(logprobs)
        for sample in self._choose(generation.iteration, fit):
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
        if not self._is_training() or SAMPLE not in inputs:
            return original(model, inputs, *args, **kwargs)
        given = dict(inputs)
        samples = [self._samples[number] for number in given.pop(SAMPLE).tolist()]
        self._open = batch = MicroBatch(samples, given)
        try:
            loss = original(model, given, *args, **kwargs)
        finally:
            self._open = None
        batch.loss = float(loss.detach())
        self.step.batches.append(batch)
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
        self.step.grad_norm = 0.0 if norm is None else float(norm)
        return norm

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
        self.step.prompts.setdefault(prompt_id, prompt)
        ends = {*trainer.eos_token_ids, trainer.processing_class.pad_token_id}
        self.step.fresh.append((sample, bool(ids[1]) and ids[1][-1] in ends, facts))
        return sample

    def _learn_logprobs(self, sample: Sample, logprobs_T: Tensor, mask_T: Tensor) -> None:
        """Take the trainer's log-probs as those of the sampler, where they are."""
        if sample.logprobs_reason != rows.PENDING:
            return
        cut = cut_distribution(self._trainer)
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
            weights = self._trainer.reward_weights.tolist()
            values[self._reward] = rows.weighted_sum(generation.values_BF[i].tolist(), weights)
        elapsed_ms = 1e3 * generation.score_s / len(generation.prompts)
        found = rows.score_rows(generation.iteration, sample, values, elapsed_ms)
        self.step.scores += found
        [own] = [row for row in found if row["scorer"] == self._reward.name]
        sample.reward = own["value"]
        sample.score_id = storage.event_id("scores", own | {"run_id": self.run_id})

    def _is_corrected(self) -> bool:
        """Whether TRL's loss weighs the sampler's log-probs by itself."""
        trainer = self._trainer
        return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def _with_stored(logprobs_BT: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return log-probs with those of replayed rows as they were stored."""
    changed_BT = logprobs_BT.detach().clone()
    for row, sample in enumerate(samples):
        if sample.pick is not None:
            stored = torch.tensor(sample.logprobs, dtype=changed_BT.dtype)
            changed_BT[row, : len(stored)] = stored.to(changed_BT.device)
    return changed_BT
