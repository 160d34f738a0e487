"""A reward function for verl that judges by our scorers and writes what it judged into our log.

verl calls `compute_score` once a completion, by keyword, in one process or in many; set

    custom_reward_function.path: <path of this file>
    custom_reward_function.name: compute_score
    custom_reward_function.reward_kwargs: {store: rrl-data, reward: final_number}

The log gets texts: verl gives a reward function no token ids, so nothing of it can be replayed with
its log-probs. It can be judged again, asked with SQL and mined for prompts.

Our choices:
1. Every process writes a stream of its own, `verl-<host>-<pid>-<time>` of kind `recorded`: a stream
   has one writer.
2. The iteration is `extra_info["global_steps"]` where verl's data has it, else 0. verl does not
   tell a reward function the prompt: it is taken from `extra_info` (`question` or `prompt`) where
   it is there, and is else a hash of data source, `index` and reference answer, without a text.
3. Rows are committed 64 at a time and when the process ends by itself. A log that cannot be written
   costs verl no step: an error is logged, `is_recorded` is 0 in its metrics, and rows wait for the
   next try.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import storage
from flows.machine import code_version, package_versions
from flows.translate import Row, prompt_row, rollout_place, rollout_rows, score_row
from rrl_core.sampling.protocol import Completion, SampleRequest, SamplingParams
from rrl_core.tasks.protocol import Judgement, Prompt, Scorer, Split, make_prompt_id
from rrl_core.tasks.scorers import judge_one, make_scorers
from storage import StreamWriter

BATCH_ROLLOUTS = 64
_logger = logging.getLogger(__name__)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    store: str | None = None,
    reward: str = "final_number",
    **_: Any,
) -> dict[str, float]:
    """Return the score of a completion as verl wants it, and keep it for the log.

    Args:
        data_source: verl's name of the data set; our task.
        solution_str: the completion.
        ground_truth: the reference answer.
        extra_info: what verl's data says of the example.
        store: folder of the log, made if there is none; None writes nothing.
        reward: a built-in scorer or `module:function`.

    Returns:
        `score`; `is_scored`, 0 where the scorer could give none (the score is 0 then);
        `is_recorded`, 0 while the log cannot be written.
    """
    scorer = _scorer_of(reward)
    prompt = _prompt_of(str(data_source), ground_truth, extra_info or {})
    judged = judge_one(scorer, prompt, solution_str)
    score = judged.score
    is_recorded = False
    if store is not None:
        log = _log_of(os.path.abspath(store))
        is_recorded = log.add(prompt, solution_str, scorer, judged, extra_info or {})
    return {
        "score": score.value or 0.0,
        "is_scored": float(score.value is not None),
        "is_recorded": float(is_recorded),
    }


@cache
def _scorer_of(reward: str) -> Scorer:
    return make_scorers(reward)[0]


def _prompt_of(task: str, ground_truth: Any, extra: Mapping[str, Any]) -> Prompt:
    answer = None if ground_truth is None else str(ground_truth)
    asked = extra.get("question", extra.get("prompt"))
    split: Split = "train" if extra.get("split", "train") == "train" else "eval"
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(asked, str):
        messages = ({"role": "user", "content": asked},)
    elif asked is not None:
        messages = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in asked)
    index = "" if messages else str(extra.get("index", ""))
    prompt_id = make_prompt_id(task + index, split, messages, answer)
    return Prompt(prompt_id, task, split, messages, answer)


class ScoreLog:
    """What one process judged, on its way into a stream of its own."""

    def __init__(self, path: str) -> None:
        self.run_id = f"verl-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        self._path = path
        self._pid = (
            os.getpid()
        )  # a forked process has a copy of this, which is not its own to write
        self._lock = threading.Lock()
        self._writer: StreamWriter | None = None
        self._rows: dict[str, list[Row]] = {}
        self._known: set[Any] = set()
        self._num_of: Counter[tuple[int, str]] = Counter()
        self._is_failing = False
        self._begin()
        # `atexit` is too late: by then a commit can start no thread.
        threading._register_atexit(self.flush)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        tables = ("prompts", "views_pinned", "rollouts", "rollout_tokens", "scores")
        self._rows = {table: [] for table in tables}

    def add(
        self,
        prompt: Prompt,
        text: str,
        scorer: Scorer,
        judged: Judgement,
        extra: Mapping[str, Any],
    ) -> bool:
        """Keep a judgement; return whether the log can be written."""
        step = extra.get("global_steps")
        iteration = step if isinstance(step, int) and step >= 0 else 0
        with self._lock:
            self._keep_first(prompt, iteration, scorer)
            number = self._num_of[iteration, prompt.prompt_id]
            self._num_of[iteration, prompt.prompt_id] += 1
            role = "attempt" if prompt.split == "train" else "evaluation"
            place = rollout_place(self.run_id, iteration, role, prompt.prompt_id, number)
            rollout, tokens = _text_rows(place, text)
            named = rollout | {"event_id": storage.event_id("rollouts", place)}
            self._rows["rollouts"].append(rollout)
            self._rows["rollout_tokens"].append(tokens)
            self._rows["scores"].append(score_row(named, scorer, judged))
            is_full = len(self._rows["rollouts"]) % BATCH_ROLLOUTS == 0
        if is_full:
            self.flush()
        return not self._is_failing

    def _keep_first(self, prompt: Prompt, iteration: int, scorer: Scorer) -> None:
        """Keep what is written once: the prompt, and whose value is the iteration's reward."""
        if prompt.prompt_id not in self._known:
            self._known.add(prompt.prompt_id)
            self._rows["prompts"].append(prompt_row(prompt))
        if iteration not in self._known:
            self._known.add(iteration)
            pin = {
                "iteration": iteration,
                "as_of": 0,
                "as_of_sha256": "",
                "scorer_versions_json": json.dumps({scorer.name: scorer.version}),
                "views_json": "{}",
            }
            self._rows["views_pinned"].append(pin)

    def flush(self) -> None:
        """Commit what was kept; where that fails say so and keep it."""
        with self._lock:
            if not self._rows["rollouts"] or os.getpid() != self._pid:
                return
            try:
                self._append()
            except (storage.StorageError, OSError) as error:
                self._is_failing = True
                _logger.error(
                    "%d scores wait in memory: the log in %s could not be written: %s",
                    len(self._rows["rollouts"]), self._path, error,
                )  # fmt: skip
            else:
                self._is_failing = False
                self._begin()

    def _append(self) -> None:
        if self._writer is None:
            store = storage.open(self._path, create=True)
            self._writer = store.open_stream(self.run_id, _opened())
        self._writer.append(self._rows, batch_key=f"scores-{sum(self._num_of.values())}")


def _text_rows(place: Row, text: str) -> tuple[Row, Row]:
    """Return the rows of a completion of which only the text is known."""
    completion = Completion((), None, "stop", text, "verl gives a reward function texts alone")
    facts = {
        "policy_version": max(0, place["iteration"] - 1),
        "policy_digest": "",
        "engine": "verl",
        "sync": "shared",
        "batch_key": "",
        "generate_s": 0.0,
    }
    return rollout_rows(
        place, SampleRequest((), 0), SamplingParams(max_tokens=0), completion, facts
    )


def _opened() -> Row:
    return {
        "kind": "recorded",
        "config_json": json.dumps({"trainer": "verl"}),
        "seed_root": 0,
        "planned_iterations": 0,
        "code_version": code_version(),
        "packages_json": json.dumps(package_versions(), sort_keys=True),
    }


_logs: dict[tuple[int, str], ScoreLog] = {}
_logs_lock = threading.Lock()


def _log_of(path: str) -> ScoreLog:
    """Return this process's log into the store at `path`."""
    key = (os.getpid(), path)  # a forked process must not write into its parent's stream
    with _logs_lock:
        if key not in _logs:
            _logs[key] = ScoreLog(path)
        return _logs[key]
