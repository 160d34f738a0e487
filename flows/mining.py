"""What others rolled out, as states a run may go on from.

A run goes back to the imports that `replay.imports` names as to its own history: `replay_buffer`
has their successes as trajectories, and a refit cuts their responses into states. A prefix is given
to the present policy, so it does not matter how it was sampled, but whose token ids it has.

Our choices:
1. Cut are responses to prompts that the run tried since the last refit: of a prompt it never tried
   there is no success rate to compare with.
2. Of a prompt the first `MAX_RESPONSES` are cut, in the order of their ids.
3. They are no attempts: neither p_hat nor the value model learns from what others achieved.
"""

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

import storage
from flows.config import RunConfig
from flows.offline import VIEW
from flows.planned import tokens_of
from flows.states import CUT_ROLES, cut_before, state_rows
from flows.translate import Row
from storage import Store

if TYPE_CHECKING:
    from flows.wiring import Session

ROLE, KIND = "imported", "import"
MAX_RESPONSES = 16
_COLUMNS = ("rollout_id", "prompt_id")


def check_imports(store: Store, config: RunConfig) -> None:
    """Raise `QueryError` where `replay.imports` names a stream that is no import."""
    known = sorted({row["run_id"] for row in store.read("runs") if row["kind"] == KIND})
    for name in config.replay.imports:
        if name not in known:
            raise storage.QueryError(
                f"`replay.imports`: expected imports of {store.path}, which has "
                f"{', '.join(known) or 'none'}; came {name!r}. `rrl import` prints their names"
            )


def imported_states(session: "Session", iteration: int) -> list[Row]:
    """Return the `states` rows of imported responses to the prompts tried since the last refit.

    They follow from the log up to the pin of the iteration, so a resumed refit makes the same.
    """
    if not session.config.replay.imports:
        return []
    chosen = _responses(session, iteration)
    rollouts = session.store.read("rollouts", event_ids=chosen) if chosen else []
    tokens = tokens_of(session.store, rollouts)
    cuts = session.config.value.cuts
    rows = state_rows(session.policy, iteration, rollouts, tokens, cuts, (ROLE,))
    return [row for row in rows if row["prefix_tokens"]]  # the prompt has a state of its own


def _responses(session: "Session", iteration: int) -> list[str]:
    """Return the ids of the responses to cut: the first of each prompt, but those cut before."""
    store, imports = session.store, session.config.replay.imports
    [pin] = store.read("views_pinned", run_id=session.run_id, iteration=iteration)
    tried = pa.array(sorted(_tried(session, iteration)), pa.string())
    by_prompt: dict[str, list[str]] = {}
    arguments = {"scorer": session.reward_scorer.name, "scorer_version": None}
    for batch in store.batches(VIEW, arguments, pin["as_of"]):
        is_wanted = pc.and_(
            pc.and_(
                pc.is_in(batch["run_id"], pa.array(imports, pa.string())),
                pc.equal(batch["role"], ROLE),
            ),
            pc.and_(
                pc.and_(
                    pc.equal(batch["prefix_tokens"], 0), pc.greater(batch["num_prompt_ids"], 0)
                ),
                pc.and_(
                    pc.equal(batch["base_digest"], session.policy.base_digest),
                    pc.is_in(batch["prompt_id"], tried),
                ),
            ),
        )
        for row in batch.filter(is_wanted).select(_COLUMNS).to_pylist():
            by_prompt.setdefault(row["prompt_id"], []).append(row["rollout_id"])
    known = cut_before(store, session.lineage, iteration, "source_run_id", imports)
    return [
        rollout_id
        for prompt_id in sorted(by_prompt)
        for rollout_id in sorted(by_prompt[prompt_id])[:MAX_RESPONSES]
        if rollout_id not in known
    ]


def _tried(session: "Session", iteration: int) -> set[str]:
    """Return the prompts that the run tried since the last refit."""
    every = session.config.value.every or 1
    return {
        row["prompt_id"]
        for sampled in range(max(1, iteration - every + 1), iteration + 1)
        for row in session.store.read(
            "rollouts", run_id=session.lineage.run_of(sampled), iteration=sampled
        )
        if row["role"] in CUT_ROLES
    }
