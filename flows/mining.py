"""What others rolled out, as states a run may go on from, and as failures it reviews.

A run goes back to the imports that `replay.imports` names as to its own history: `replay_buffer`
has their successes as trajectories, and a refit cuts their responses into states. A prefix is given
to the present policy, so it does not matter how it was sampled, but whose token ids it has. Of the
imports that `review.imports` names the policy reviews failed responses, for which their text is
enough: what helps then is in its memory.

Our choices:
1. Cut are responses to prompts that the run tried since the last refit: of a prompt it never tried
   there is no success rate to compare with.
2. Of a prompt the first `MAX_RESPONSES` are cut, in the order of their ids.
3. They are no attempts: neither p_hat nor the value model learns from what others achieved.
4. Reviewed are failures at prompts that the run tried in an earlier iteration and does not try in
   this one, one of a prompt and none whose review was read. What comes of them is not distilled: a
   target follows an attempt of the policy itself.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

import storage
from flows.config import RunConfig
from flows.lineage import lineage_of
from flows.offline import VIEW
from flows.planned import tokens_of
from flows.states import CUT_ROLES, cut_before, state_rows
from flows.translate import Row
from rrl_core.replay.outcomes import SUCCESS
from rrl_core.seeds import derive_seed
from storage import Store

if TYPE_CHECKING:
    from flows.reviewing import Source
    from flows.wiring import Session

ROLE, KIND = "imported", "import"
MAX_RESPONSES = 16
_COLUMNS = ("rollout_id", "prompt_id")
FAILURES = """
select
    response.prompt_id,
    min(response.event_id) as rollout_id,
    arg_min(score.feedback, response.event_id) as feedback
from rollouts as response
join latest_scores as score
    on score.target_id = response.event_id
    and score.scorer = $scorer
    and score.scorer_version = $version
where
    response.role = 'imported'
    and response.run_id in (select unnest($imports::text[]))
    and response.prompt_id in (select unnest($prompts::text[]))
    and response.event_id not in (select unnest($reviewed::text[]))
    and score.value < $success
group by response.prompt_id
"""


def check_imports(store: Store, config: RunConfig) -> None:
    """Raise `QueryError` where `replay.imports` or `review.imports` names no import."""
    known = sorted({row["run_id"] for row in store.read("runs") if row["kind"] == KIND})
    named = {"replay.imports": config.replay.imports, "review.imports": config.review.imports}
    for key, names in named.items():
        for name in names:
            if name not in known:
                raise storage.QueryError(
                    f"`{key}`: expected imports of {store.path}, which has "
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


def imported_failures(
    source: "Source", iteration: int, attempted: Collection[str]
) -> list[tuple[Row, str]]:
    """Return the failed imported responses that an iteration reviews, each with its feedback.

    They follow from the log up to the pin of the iteration, and from the seed.

    Args:
        source: whose history.
        iteration: which.
        attempted: the prompts that the iteration tries itself.
    """
    store, review = source.store, source.config.review
    if not review.imports:
        return []
    [pin] = store.read("views_pinned", run_id=source.run_id, iteration=iteration)
    lineage, as_of = lineage_of(store, source.run_id), pin["as_of"]
    tried = {row["prompt_id"] for row in lineage.view(store, "prompt_history", as_of)}
    scorer, version = source.judge
    arguments = {
        "imports": list(review.imports),
        "scorer": scorer,
        "version": version,
        "success": SUCCESS,
        "prompts": sorted(tried.difference(attempted)),
        "reviewed": sorted({row["attempt_id"] for row in lineage.read(store, "reviews", as_of)}),
    }
    found = store.sql(FAILURES, arguments, as_of).fetchall()
    found.sort(key=lambda row: derive_seed(source.config.run.seed, "imported", iteration, row[0]))
    feedback = {rollout_id: said for _, rollout_id, said in found[: review.imported]}
    rollouts = store.read("rollouts", event_ids=feedback) if feedback else []
    return [(rollout, feedback[rollout["event_id"]]) for rollout in rollouts]


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
