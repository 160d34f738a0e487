"""The second example store of docs/sql.md: a run with self-review, and an imported history.

`sums-c` has six iterations on six sums: four attempts each, one review of the first failure, a
second attempt after it, and a retry without it to compare with. Two problems are solved in the
first iteration and by none of the next sixteen attempts; one of them comes back. `import-verl` is
what another framework sampled, judged by its own score, and again by `final_number`.
"""

import json
from pathlib import Path

import storage
from tests.docs_sums import TRAIN, completion_text, prompt_id, prompt_row, right_answer
from tests.storage import rows as make
from tests.storage.review_rows import ReviewRun
from tests.storage.rows import Row

RUN, IMPORT = "sums-c", "import-verl"
ITERATIONS, GROUP_SIZE = 6, 4
NEVER_AGAIN, COMES_BACK = 1, 0  # numbers of the problems that are lost
ADVICE = (
    "Add the ones first.", "Mind the sign.", "Carry the ten.", "Subtract tens, then ones.",
    "Write both numbers below each other.", "Double the number.",
)  # fmt: skip
IMPORTED = ((0, 42, True), (0, 42, False), (0, 52, False), (2, 43, True), (2, 43, False),
            (2, 33, True), (3, 46, False), (3, 56, False))  # fmt: skip


def build(path: Path) -> storage.Store:
    """Make the store in a new folder."""
    path.mkdir(parents=True)
    store = storage.open(path, create=True)
    _train(ReviewRun(store, RUN, kind="train", planned_iterations=ITERATIONS))
    _import(store)
    return store


def _train(run: ReviewRun) -> None:
    helpful: dict[int, str] = {}  # the newest verified review of each problem
    for iteration in range(1, ITERATIONS + 1):
        run.begin(iteration)
        for number, problem in enumerate(TRAIN):
            run.wait("prompts", prompt_row(problem, "train"))
            num_right = _num_right(number, iteration)
            wrong = [
                run.attempt(float(index < num_right), prompt_id(problem))
                for index in range(GROUP_SIZE)
            ][num_right]
            shown = [helpful[other] for other in ((number + 1) % len(TRAIN),) if other in helpful]
            review_id = run.review(
                wrong, prompt_id(problem), shown=shown, what_went_wrong="The sum is wrong.",
                what_to_do=ADVICE[number], review=f"The sum is wrong. {ADVICE[number]}",
                leak="answer" if (number, iteration) == (5, 2) else "none",
            )  # fmt: skip
            is_fixed = (number + iteration) % 3 != 0
            run.second(review_id, float(is_fixed), prompt_id(problem))
            run.control(
                "retry", wrong, float((number + 2 * iteration) % 5 == 0), prompt_id(problem)
            )
            if is_fixed:
                helpful[number] = review_id
        run.commit()


def _num_right(number: int, iteration: int) -> int:
    """Return how many of a group are right, the first ones."""
    if number in (NEVER_AGAIN, COMES_BACK):
        return 1 if iteration == 1 or (number == COMES_BACK and iteration == ITERATIONS) else 0
    return 0 if number == 4 else 1 + (number + iteration) % 2


def _import(store: storage.Store) -> None:
    opened = make.OPENED | {"kind": "import", "planned_iterations": 0}
    writer = store.open_stream(IMPORT, opened)
    rollouts: list[Row] = []
    scores: list[Row] = []
    for index, (number, guess, has_line) in enumerate(IMPORTED):
        problem = TRAIN[number]
        row = make.rollout(
            prompt_id(problem), index, 0, role="imported", policy_version=1 + index // 4,
            group_id=f"guessed-{number}", policy_digest="unknown", num_prompt_tokens=-1,
            num_completion_tokens=-1, completion=completion_text(problem, guess, 0, has_line),
            top_p=-1.0, top_k=-1, max_tokens=-1, seed=-1, engine="imported", sync="unknown",
            logprob_mode="none",
        )  # fmt: skip
        rollouts.append(row)
        is_right = has_line and guess == right_answer(problem)
        scores.append(
            make.score(
                writer.event_id_of("rollouts", row), float(is_right), 0,
                scorer="score", scorer_version="imported",
            )
        )  # fmt: skip
    part = {
        "iteration": 0, "number": 0, "path": "outputs/rollouts/1.jsonl", "format": "verl",
        "sha256": "made up", "position": 1024, "first_line": 1, "num_lines": len(IMPORTED) + 1,
        "num_rollouts": len(IMPORTED), "num_token_rollouts": 0, "num_failures": 1,
        "num_guessed_groups": 3, "base_digest": None,
    }  # fmt: skip
    pin = make.pin(0, json.dumps({"score": "imported"}))
    prompts = [prompt_row(TRAIN[number], "train") for number in (0, 2, 3)]
    tables = {"prompts": prompts, "rollouts": rollouts, "scores": scores}
    writer.append(tables | {"imports": [part], "views_pinned": [pin]}, "part-0")
    again = store.open_stream("rescore-final-number", opened | {"kind": "rescore"})
    again.append(
        {"scores": [_again(row) for row in store.read("rollouts", run_id=IMPORT)]}, "scores"
    )


def _again(rollout: Row) -> Row:
    """Judge by the last number: the line is not asked for."""
    problem = next(p for p in TRAIN if prompt_id(p) == rollout["prompt_id"])
    is_right = rollout["completion"].split()[-1] == str(right_answer(problem))
    return make.score(
        rollout["event_id"], float(is_right), 0, scorer="final_number", scorer_version="1"
    )
