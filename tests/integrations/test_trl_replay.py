"""Old successes in TRL's own step: its loss learns from them by their stored log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import storage
from flows.integrations.trl import RecordingError, ReplayOptions, record
from tests.integrations.test_trl_recording import logged_sequences
from tests.integrations.trl_runs import ENDS, GROUP, PROMPTS, Watching, make_trainer

SMALL = 1e-5
EPSILON = 0.2  # TRL's default clip
Tensors = list[torch.Tensor]
REPLAY = ReplayOptions(share=1.0, first_step=3)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def first_answers() -> Callable[..., list[float]]:
    """Right is what was answered first: a whole completion of four tokens or more."""
    right: dict[str, str] = {}

    def first_answer(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        values = []
        for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True):
            if len(ids) >= 4 and ids[-1] in ENDS:
                right.setdefault(prompt, text)
            values.append(float(text == right.get(prompt)))
        return values

    return first_answer


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps weights and gradient of every step, before the optimizer changes them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensors, Tensors]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        parameters = list(model.parameters())
        gradient = [p.grad.clone() for p in parameters]
        self.kept.append(([p.detach().clone() for p in parameters], gradient))


def run(
    tmp_path: Path, replay: ReplayOptions | None, **args: Any
) -> tuple[Watching, Gradients, storage.Store]:
    settings = {"max_steps": 4, "loss_type": "grpo", "max_grad_norm": 1e9, "learning_rate": 2e-4}
    trainer = make_trainer(tmp_path, first_answers(), Watching, **settings | args)
    gradients = Gradients()
    trainer.add_callback(gradients)
    record(trainer, tmp_path / "store", replay=replay)
    trainer.train()
    return trainer, gradients, storage.open(tmp_path / "store")


def replayed_logprobs(
    store: storage.Store, step: int, unit: str = "trajectory"
) -> dict[tuple[Any, ...], list[float]]:
    """Return the stored log-probs of what a step replayed, by prompt and completion ids."""
    query = (
        "select t.prompt_ids, t.completion_ids, t.sampler_logprobs from replays as r "
        "join rollout_tokens as t on t.rollout_id = r.rollout_id "
        f"where r.unit = '{unit}' and r.iteration = {step}"
    )
    return {(tuple(p), tuple(c)): m for p, c, m in store.sql(query).fetchall()}


def gradient_by_hand(
    trainer: Watching, weights: Tensors, step: int, store: storage.Store, skip_replayed: bool
) -> Tensors:
    """Return the gradient of the mean over sequences of the mean over tokens of

        -min(u A, clip(u, 1 - 0.2, 1 + 0.2) A)

    with u = pi / mu, mu as stored; which for a fresh sequence is pi as it sampled it.
    """
    model = trainer.model
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    model.zero_grad()
    replayed, fresh = (replayed_logprobs(store, step, unit) for unit in ("trajectory", "fresh"))
    sequences = [s for s in trainer.sequences() if s[0] == step]
    for _, prompt, completion, advantage in sequences:
        key = (prompt, completion)
        if key in replayed and skip_replayed:
            continue
        ids = torch.tensor([prompt + completion])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        u = (chosen - torch.tensor((fresh | replayed)[key])).exp()
        clipped = u.clamp(1 - EPSILON, 1 + EPSILON)
        loss = -torch.min(u * advantage, clipped * advantage).mean() / len(sequences)
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def distance(a: Tensors, b: Tensors) -> float:
    return float(sum((x - y).square().sum() for x, y in zip(a, b, strict=True)) ** 0.5)


def norm(a: Tensors) -> float:
    return float(sum(x.square().sum() for x in a) ** 0.5)


def test_a_replayed_step_differs_from_the_same_step_without(tmp_path: Path):
    (_, with_replay, store), (_, without, _) = (
        run(tmp_path / "a", REPLAY),
        run(tmp_path / "b", None),
    )
    assert len(replayed_logprobs(store, 3)) == len(PROMPTS)
    for step in (0, 1):  # before anything is replayed
        assert distance(with_replay.kept[step][1], without.kept[step][1]) == 0
    assert distance(with_replay.kept[2][0], without.kept[2][0]) == 0  # the same weights
    # Without replay no completion of step 3 is right: every advantage and the gradient are 0.
    assert norm(without.kept[2][1]) == 0
    assert norm(with_replay.kept[2][1]) > 1e-3


OFF_POLICY = {"steps_per_generation": 4, "prompts": PROMPTS * 2}  # two steps a generation


@pytest.mark.parametrize("args", [{}, pytest.param(OFF_POLICY, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_stored_logprobs(tmp_path: Path, args: Any):
    trainer, gradients, store = run(tmp_path, REPLAY, **args)
    for step in (3, 4) if args else (3,):
        weights, gradient = gradients.kept[step - 1]
        expected = gradient_by_hand(trainer, weights, step, store, skip_replayed=False)
        assert distance(gradient, expected) < SMALL * max(1.0, norm(expected))
        if replayed_logprobs(store, step):
            others = gradient_by_hand(trainer, weights, step, store, skip_replayed=True)
            assert distance(gradient, others) > 0.1 * norm(gradient)
    assert sum(len(replayed_logprobs(store, step)) for step in (3, 4)) == len(PROMPTS)


@pytest.mark.slow
def test_the_log_says_what_was_replayed_and_why(tmp_path: Path):
    trainer, _, store = run(tmp_path, REPLAY)
    assert logged_sequences(store) == trainer.sequences()
    rows = [r for r in store.view("replay_audit") if r["unit"] == "trajectory"]
    assert {(r["iteration"], r["state"]) for r in rows} == {(3, "learned")}
    picks = {row["event_id"]: row for row in store.read("picks")}
    rollouts = {row["event_id"]: row for row in store.read("rollouts")}
    for row in rows:
        old, pick = rollouts[row["rollout_id"]], picks[row["pick_id"]]
        assert old["iteration"] < 3
        assert row["age"] == pick["age"] == 3 - old["iteration"]
        assert row["reward"] == 1.0
        # one success among four: (1 - 1/4) / (1/2 + 1e-4)
        assert row["advantage"] == pytest.approx(0.75 / 0.5001)
        group = [r for r in store.read("replays") if r["group_id"] == row["group_id"]]
        assert len(group) == GROUP
    plans = {row["iteration"]: row for row in store.read("replay_plans")}
    assert plans[2]["waiting_reason"] == "before the first step of replay"
    assert plans[3]["num_picked"] == len(PROMPTS)
    # what was used in the newest step rests for one
    reasons = {r["eligibility_reason"] for r in store.view("replay_buffer") if r["num_uses"]}
    assert plans[4]["num_picked"] == 0
    assert reasons == {"eligible"}  # and may be used again after step 4
    # what stood there before is in the log, without a score
    unscored = store.sql(
        "select count(*) from rollouts where iteration = 3 and event_id not in "
        "(select target_id from scores)"
    ).fetchall()
    assert unscored == [(len(PROMPTS),)]


@pytest.mark.slow
def test_with_a_correction_stored_logprobs_are_the_samplers(tmp_path: Path):
    """Transformers plays vLLM's part: what it samples in step n has log-probs of -5 - n/2."""
    settings = {"vllm_importance_sampling_mode": "token_truncate", "max_steps": 4}
    trainer = make_trainer(
        tmp_path, first_answers(), Watching, vllm_importance_sampling_clip_max=3.0, **settings
    )
    sample = trainer._generate_single_turn

    def as_vllm(prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int) -> Any:
        trainer.use_vllm = False
        ids, _ = sample(prompt_ids, images, multimodal_fields, num_generations)
        trainer.use_vllm = True
        logprob = -5 - (trainer.state.global_step + 1) / 2
        return ids, [[logprob] * len(completion) for completion in ids]

    trainer._generate_single_turn = as_vllm
    trainer.use_vllm = True
    record(trainer, tmp_path / "store", replay=REPLAY)
    trainer.train()
    store = storage.open(tmp_path / "store")
    assert logged_sequences(store) == trainer.sequences()
    sampled_in = {row["event_id"]: row["iteration"] for row in store.read("rollouts")}
    replays = {row["rollout_id"]: row for row in store.read("replays", iteration=3)}
    assert sum(row["unit"] == "trajectory" for row in replays.values()) == len(PROMPTS)
    given = [batch for batch in trainer.trained if batch["step"] == 3]
    rows = [
        (ids[mask], sampler[mask], old[mask], weight[mask])
        for batch in given
        for ids, mask, sampler, old, weight in zip(
            batch["completion_ids"], batch["completion_mask"].bool(),
            batch["sampling_per_token_logps"], batch["old_per_token_logps"],
            batch["importance_sampling_ratio"], strict=True,
        )
    ]  # fmt: skip
    learned = {r["rollout_id"]: r for r in store.read("learned_samples", iteration=3)}
    ordered = sorted(replays.values(), key=lambda row: int(row["position"]))
    for row, (_, sampler, old, weight) in zip(ordered, rows, strict=True):
        stored = -5 - sampled_in[row["rollout_id"]] / 2
        assert torch.equal(sampler, torch.full_like(sampler, stored))
        assert torch.allclose(weight, (old - stored).exp().clamp(max=3.0))
        importance = learned[row["rollout_id"]]["importance_mean"]
        assert importance == pytest.approx(float(weight.mean()), rel=SMALL)


@pytest.mark.parametrize(
    ("args", "message"), [({"top_k": 5}, "top_k"), ({"generation_kwargs": {"a": 1}}, "generation")]
)
def test_replay_is_refused_where_logprobs_mislead(tmp_path: Path, args: Any, message: str):
    trainer = make_trainer(tmp_path)
    for name, value in args.items():
        setattr(trainer.args if name == "generation_kwargs" else trainer, name, value)
    with pytest.raises(RecordingError, match=message):
        record(trainer, tmp_path / "store", replay=REPLAY)


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.5}, {"first_step": 1}])
def test_wrong_options_are_refused(options: Any):
    with pytest.raises(ValueError, match="expected a share"):
        ReplayOptions(**options)
