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
2. A replayed completion brings its stored log-probs to where TRL has a place for them: with vLLM
   and its correction as the sampler's, else as `old_per_token_logps`, so that TRL's clipped ratio
   is the present policy over the one that sampled it.
3. Where the log cannot be written, TRL finishes the step, saves a checkpoint and stops, and
   `train()` raises: neither what was learned nor that the log ends is lost.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import storage
from flows.integrations import trl_rows as rows
from flows.integrations.trl_replay import Fit, ReplayOptions, Situation, decide
from flows.integrations.trl_rows import Sample
from flows.integrations.trl_seams import RecordingError, check_kind, check_seams, unknown_trl
from flows.integrations.trl_watch import Watcher
from flows.machine import PACKAGES, code_version, package_versions
from flows.translate import Row, prompt_row
from rrl_core.sampling.protocol import SamplingParams
from storage import Store, StreamWriter

__all__ = ["RecordingError", "ReplayOptions", "RrlRecorder", "record"]

KIND = "recorded"


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
    """What writes as TRL goes from step to step; made by `record`."""

    def __init__(
        self,
        trainer: Any,
        store: Store,
        run_id: str | None,
        reward: str | None,
        answer_column: str,
        replay: ReplayOptions | None,
    ) -> None:
        check_kind(trainer, replay is not None)
        self.store = store
        self.run_id = run_id or ""
        self._is_named = run_id is not None
        self._trainer = trainer
        self._replay = replay
        self._judges = rows.judges_of(trainer)
        self._reward = rows.reward_judge(self._judges, trainer.reward_weights.tolist(), reward)
        self._held = ExitStack()
        self._writer: StreamWriter | None = None
        self._error: RecordingError | None = None
        self._known_prompts: set[str] = set()
        self._pinned: tuple[int, int] | None = None  # step, and the commit it reads as of
        choose = None if replay is None else self._chosen
        self._watcher = Watcher(
            trainer, self._judges, self._reward, answer_column, self._begin, choose
        )

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
        self._pinned = None
        self._watcher.start(self.run_id)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Note the learning rate of the step."""
        self._watcher.step.learning_rate = float(known["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Commit the step; where that fails, let TRL save a checkpoint and stop."""
        if not self._watcher.step.batches:
            raise unknown_trl(f"step {state.global_step} went by without a loss that was seen")
        self._guarded(state.global_step, lambda writer: self._commit(writer, state.global_step))
        self._watcher.begin_step()
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
        self._watcher.start("")
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

    def _begin(self, iteration: int) -> None:
        """Pin a step, once."""
        if self._pinned is None or self._pinned[0] != iteration:
            as_of = self._guarded(iteration, lambda writer: self._pin(writer, iteration))
            self._pinned = None if as_of is None else (iteration, as_of)

    def _chosen(self, iteration: int, fit: Fit) -> Sequence[Sample]:
        """Return what a step replays: nothing where the log fails."""
        options, state = self._replay, self._trainer.state
        if options is None or self._pinned is None:
            return ()
        now = Situation(
            self.run_id, iteration, state.max_steps, self._pinned[1], self._trainer.args.seed
        )
        chosen = self._guarded(
            iteration, lambda writer: decide(self.store, writer, options, now, fit)
        )
        return chosen or ()

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
        self._begin(iteration)
        trainer, step = self._trainer, self._watcher.step
        params = SamplingParams(
            float(trainer.temperature),
            float(trainer.top_p),
            int(trainer.top_k or 0),
            int(trainer.max_completion_length),
        )
        pairs = [
            rows.sampled_rows(sample, params, "stop" if is_ended else "length", facts)
            for sample, is_ended, facts in step.fresh
        ]
        new = {i: p for i, p in step.prompts.items() if i not in self._known_prompts}
        kl_loss = 0.0
        if trainer.beta:
            recent = trainer._metrics["train"]["kl"][-len(step.batches) :]
            kl_loss = float(trainer.beta) * sum(recent) / max(1, len(recent))
        writer.append(
            {
                "prompts": [prompt_row(prompt) for prompt in new.values()],
                "rollouts": [rollout for rollout, _ in pairs],
                "rollout_tokens": [tokens for _, tokens in pairs],
                "scores": step.scores,
                "replays": rows.replay_rows(iteration, step),
                "learned_samples": rows.learned_rows(iteration, step),
                "updates": [rows.update_row(iteration, step, trainer.loss_type, kl_loss)],
            },
            batch_key=f"i{iteration:06d}-step",
            closes_iteration=iteration,
        )
        self._known_prompts |= new.keys()
        for sample, _, _ in step.fresh:
            sample.is_committed = True


def _opened_row(trainer: Any, planned: int) -> Row:
    config = {
        "trainer": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "model": {"name": trainer.model.config._name_or_path},
        "learner": {"algorithm": f"trl {trainer.loss_type}"},
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
