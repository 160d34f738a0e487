"""A run with reviews, second attempts, controls and distillations, as the log holds it."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import storage
from tests.storage.replay_rows import Run
from tests.storage.rows import Row, pin, planned, rollout, score


def review(rollout_id: str, attempt_id: str, iteration: int = 1, **facts: Any) -> Row:
    """What was read in a review of prompt p1."""
    return {
        "iteration": iteration,
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "prompt_id": "p1",
        "format_sha256": "f0",
        "status": "ok",
        "what_went_wrong": "The sign.",
        "what_to_do": "Mind the sign.",
        "review": "The sign. Mind the sign.",
        "leak": "none",
        "feedback": "wrong",
        "memory_json": "[]",
        "memory_tokens": 0,
    } | facts


class ReviewRun(Run):
    """A run whose rows wait for `commit`; a reward of None leaves a rollout without a score."""

    def __init__(self, store: storage.Store, run_id: str = "r1", **facts: Any) -> None:
        super().__init__(store, run_id, **facts)
        self.iteration = 0
        self._waiting: dict[str, list[Row]] = defaultdict(list)
        self._num_children: dict[tuple[int, str, str, str], int] = defaultdict(int)

    def begin(self, iteration: int) -> None:
        self.iteration = iteration
        self.wait("views_pinned", pin(iteration))

    def wait(self, table: str, row: Row) -> str:
        self._waiting[table].append(row)
        return self.writer.event_id_of(table, row)

    def commit(self) -> int:
        self.append(**self._waiting)
        self._waiting.clear()
        return self.store.head().number

    def answer(
        self, role: str, reward: float | None, prompt_id: str, parent_id: str = "", **facts: Any
    ) -> str:
        place = (self.iteration, role, prompt_id, parent_id)
        index, self._num_children[place] = self._num_children[place], self._num_children[place] + 1
        row = rollout(prompt_id, index, self.iteration, role=role, parent_id=parent_id, **facts)
        rollout_id = self.wait("rollouts", row)
        if reward is not None:
            self.wait("scores", score(rollout_id, reward, self.iteration))
        return rollout_id

    def attempt(self, reward: float | None = 0.0, prompt_id: str = "p1", **facts: Any) -> str:
        return self.answer("attempt", reward, prompt_id, **facts)

    def review(
        self,
        attempt_id: str,
        prompt_id: str = "p1",
        *,
        shown: Iterable[str] = (),
        num_tokens: int = 7,
        arm: str | None = None,
        **facts: Any,
    ) -> str:
        """A review that was read, of a control where `arm` is given."""
        role = "review" if arm is None else "control"
        sampled = {"num_completion_tokens": num_tokens, "arm": arm}
        review_id = self.answer(role, None, prompt_id, attempt_id, **sampled)
        memory = json.dumps([{"review_id": i, "similarity": 0.5} for i in shown])
        row = review(review_id, attempt_id, self.iteration, prompt_id=prompt_id, memory_json=memory)
        self.wait("reviews", row | facts)
        return review_id

    def second(self, review_id: str, reward: float | None, prompt_id: str = "p1") -> str:
        return self.answer("second_attempt", reward, prompt_id, review_id)

    def control(self, arm: str, parent_id: str, reward: float | None, prompt_id: str = "p1") -> str:
        return self.answer("control", reward, prompt_id, parent_id, arm=arm)

    def distil(self, second_id: str, review_id: str, prompt_id: str = "p1", **facts: Any) -> str:
        """Plan a second attempt as a target, and put it into a batch; return the plan's id."""
        target = {
            "iteration": self.iteration,
            "rollout_id": second_id,
            "attempt_id": "ro-y1",
            "review_id": review_id,
            "prompt_id": prompt_id,
        }
        target_id = self.wait("distillations", target)
        self.wait("replays", planned(target_id, 1, self.iteration, unit="distill", **facts))
        return target_id

    def memory(self, as_of: int | None = None, **arguments: Any) -> list[Row]:
        """Return the rows of `memory`."""
        return self.store.view("memory", arguments=arguments, as_of=as_of)
