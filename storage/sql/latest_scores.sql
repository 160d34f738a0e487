-- Question: which judgement of a target counts?
-- Grain: one row per target, scorer and scorer version: the highest attempt, then the first position.
--        Several streams may have scored the same target.
-- Parameters: $as_of, a commit number.
-- Columns: those of `scores`, with `score_id` for its event id.
with counted as (
    select arg_min(scored.event_id, (-scored.attempt, scored._commit, scored._row)) as score_id
    from scores($as_of) as scored
    group by scored.target_id, scored.scorer, scored.scorer_version
)
select
    scored.event_id as score_id,
    scored.run_id,
    scored.iteration,
    scored.target_id,
    scored.target_kind,
    scored.kind,
    scored.scorer,
    scored.scorer_version,
    scored.attempt,
    scored.value,
    scored.status,
    scored.components_json,
    scored.feedback,
    scored.elapsed_ms,
    scored.recorded_at,
    scored._commit,
    scored._row
from scores($as_of) as scored
join counted on counted.score_id = scored.event_id
order by scored._commit, scored._row
