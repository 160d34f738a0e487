"""States where a success was lost: up to the token that the policy no longer gives by itself.

Of a prompt that was solved and fails now, an old success is scored under the policy of today. The
token whose log-prob fell most since it was sampled ends a state (`drop_cut`), which is judged and
picked as any other.

Our choices:
1. Forgotten is a success of an earlier refit's time whose prompt is rarely solved now (p_hat of
   0.25 at most). Each is cut so once, and of a prompt one at a refit: the newest.
2. At most 16 a refit, those of the prompts that are solved least: each costs a forward pass.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.planned import tokens_of
from flows.replaying import NO_MODEL, VIEW
from flows.states import cut_before, state_row
from flows.translate import Row
from flows.wiring import Session
from rrl_core.policy.logprobs import policy_logprobs
from rrl_core.policy.packing import Branch
from rrl_core.replay.credit import RARELY_SOLVED
from rrl_core.value.cuts import drop_cut

MAX_DROPS = 16
DROP = "drop"
_COLUMNS = ("entry_id", "entry_key", "prompt_id", "p_hat", "sampled_iteration")


def drop_rows(session: Session, iteration: int) -> list[Row]:
    """Return the `states` rows of forgotten successes, cut where the policy's log-prob fell most.

    They follow from the log and the present policy, so a resumed refit makes the same.
    """
    ids = _forgotten(session, iteration)
    if not ids:
        return []
    rollouts = {row["event_id"]: row for row in session.store.read("rollouts", event_ids=ids)}
    tokens = tokens_of(session.store, rollouts.values())
    scores = policy_logprobs(
        session.policy,
        [
            Branch(
                tuple(tokens[i]["prompt_ids"]),
                tuple(tokens[i]["completion_ids"]),
                rollouts[i]["temperature"],
            )
            for i in ids
        ],
        max_tokens=session.config.learner.micro_batch_tokens,
    )
    rows = []
    for rollout_id, logprobs_T in zip(ids, scores.logprobs_BT.tolist(), strict=True):
        held = tokens[rollout_id]
        before, given = held["sampler_logprobs"], held["completion_ids"]
        cut = drop_cut(before, logprobs_T[: len(given)], bounds=held["sampled_bounds"])
        if cut is not None:
            rows.append(state_row(iteration, rollouts[rollout_id], given, cut))
    return rows


def _forgotten(session: Session, iteration: int) -> list[str]:
    """Return the ids of the rollouts to cut, those of the least solved prompts first."""
    known = pa.array(
        sorted(cut_before(session.store, session.lineage, iteration, "cut", [DROP])), pa.string()
    )
    newest: dict[str, dict[str, Any]] = {}
    for batch in session.store.batches(VIEW, {"run": session.run_id, "version": NO_MODEL}):
        is_wanted = pc.and_(
            pc.and_(
                pc.equal(batch["unit"], "trajectory"), _is_forgotten(session, batch, iteration)
            ),
            pc.invert(pc.is_in(batch["entry_id"], value_set=known)),
        )
        for row in batch.filter(is_wanted).select(_COLUMNS).to_pylist():
            other = newest.setdefault(row["prompt_id"], row)
            newest[row["prompt_id"]] = max(other, row, key=_age_order)
    best = sorted(newest.values(), key=lambda row: (row["p_hat"], row["entry_key"]))
    return [row["entry_id"] for row in best[:MAX_DROPS]]


def _is_forgotten(session: Session, batch: pa.RecordBatch, iteration: int) -> pa.BooleanArray:
    is_rare = pc.less_equal(batch["p_hat"], RARELY_SOLVED)
    is_unfit = pc.is_in(batch["eligibility_reason"], pa.array(["no_logprobs", "unfit_import"]))
    last_refit = iteration - (session.config.value.every or 1)
    is_old = pc.less_equal(batch["sampled_iteration"], last_refit)
    return pc.and_(pc.and_(is_rare, pc.invert(is_unfit)), is_old)


def _age_order(row: dict[str, Any]) -> tuple[int, str]:
    return row["sampled_iteration"], row["entry_key"]
