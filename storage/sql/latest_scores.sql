-- Question: which judgement of a target counts?
-- Grain: one row per target, scorer and scorer version: final verdicts (status ok or unscorable) before
--        failed tries, then the highest attempt, then the first position. Several streams may have
--        scored the same target.
-- Parameters: $as_of, a commit number.
-- Columns: those of `scores`, with `score_id` for its event id.
-- Order: none. Other questions read it, and sorting all scores takes as long as the rest of them.
with ranked as (  -- one integer for (is failed, -attempt, _commit, _row): quicker than comparing rows
    select
        *,
        (
            if(scored.status in ('ok', 'unscorable'), 2147483647, 4294967295) - scored.attempt
        )::hugeint * 18446744073709551616
        + scored._commit * 4294967296 + scored._row as rank
    from scores($as_of) as scored
)
select
    arg_min(ranked.event_id, ranked.rank) as score_id,
    arg_min(ranked.run_id, ranked.rank) as run_id,
    arg_min(ranked.iteration, ranked.rank) as iteration,
    ranked.target_id,
    arg_min(ranked.target_kind, ranked.rank) as target_kind,
    arg_min(ranked.kind, ranked.rank) as kind,
    ranked.scorer,
    ranked.scorer_version,
    arg_min(ranked.attempt, ranked.rank) as attempt,
    arg_min_null(ranked.value, ranked.rank) as value,
    arg_min(ranked.status, ranked.rank) as status,
    arg_min(ranked.components_json, ranked.rank) as components_json,
    arg_min(ranked.feedback, ranked.rank) as feedback,
    arg_min(ranked.elapsed_ms, ranked.rank) as elapsed_ms,
    arg_min_null(ranked.signature, ranked.rank) as signature,
    arg_min(ranked.recorded_at, ranked.rank) as recorded_at,
    arg_min(ranked._commit, ranked.rank) as _commit,
    arg_min(ranked._row, ranked.rank) as _row
from ranked
group by ranked.target_id, ranked.scorer, ranked.scorer_version
