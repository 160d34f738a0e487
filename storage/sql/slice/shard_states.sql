-- Question: which states were these responses and these prompts cut into, and how were they judged?
-- Grain: one row per state, in the order of their commits.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version; $rollout_ids; $prompt_ids, of
--             which only the states without a prefix are wanted.
-- Columns: is_judged (the verdict is final), is_unreadable (it is final, and no value); attempt, the
--          number of judgements that were not.
with found as materialized (
    select
        state.event_id,
        state.rollout_id,
        state.prompt_id,
        state.prefix_tokens,
        state._commit,
        state._row
    from states($as_of) as state
    where state.rollout_id in (select unnest($rollout_ids::varchar[]))
        or (
            state.prefix_tokens = 0
            and state.prompt_id in (select unnest($prompt_ids::varchar[]))
        )
),
tried as (
    select
        score.target_id,
        bool_or(score.status in ('ok', 'unscorable')) as is_judged,
        bool_and(score.status = 'unscorable') as is_unreadable,
        max(score.attempt) + 1 as attempt
    from scores($as_of) as score
    semi join found on found.event_id = score.target_id
    where score.scorer = $scorer and score.scorer_version = $scorer_version
    group by score.target_id
)
select
    found.event_id,
    found.rollout_id,
    found.prompt_id,
    found.prefix_tokens,
    coalesce(tried.is_judged, false) as is_judged,
    coalesce(tried.is_unreadable, false) as is_unreadable,
    coalesce(tried.attempt, 0) as attempt
from found
left join tried on tried.target_id = found.event_id
order by found._commit, found._row
