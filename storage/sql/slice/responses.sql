-- Question: which rollouts does a slice hold, and which have states that a scorer version has still
--           to judge?
-- Grain: one row per rollout of the slice.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version; $where, the condition;
--             $unfit_runs, of which nothing can be judged.
-- Columns: reason (why it has no states; NULL where it can have some), is_judged (it was cut, and
--          the verdict on each of its states is final), is_left (neither).
with sliced as materialized (
    select
        rollouts.event_id,
        rollouts.run_id,
        rollouts.prompt_id,
        rollouts.status,
        rollouts.role,
        rollouts.prefix_tokens,
        rollouts._commit,
        rollouts._row
    from sliced_rollouts() as rollouts
    where ($where)
),
with_tokens as (
    select distinct token.rollout_id
    from rollout_tokens($as_of) as token
    semi join sliced on sliced.event_id = token.rollout_id
),
judged as (
    select distinct score.target_id
    from scores($as_of) as score
    where score.scorer = $scorer
        and score.scorer_version = $scorer_version
        and score.status in ('ok', 'unscorable')
),
cut as (
    select state.rollout_id, count(*) = count(judged.target_id) as is_judged
    from states($as_of) as state
    semi join sliced on sliced.event_id = state.rollout_id
    left join judged on judged.target_id = state.event_id
    group by state.rollout_id
),
found as (
    select
        sliced.*,
        case
            when sliced.status <> 'ok' then 'nothing was sampled'
            when sliced.role not in ('attempt', 'retry', 'imported')
                then 'only attempts, retries and imported responses are cut into states'
            when sliced.prefix_tokens > 0 then 'it was given more than its prompt'
            when sliced.run_id in (select unnest([$unfit_runs]::varchar[]))
                then 'its run has another base model, or names none'
            when with_tokens.rollout_id is null then 'no token ids are stored'
        end as reason,
        coalesce(cut.is_judged, false) as is_judged
    from sliced
    left join with_tokens on with_tokens.rollout_id = sliced.event_id
    left join cut on cut.rollout_id = sliced.event_id
)
select
    found.event_id,
    found.prompt_id,
    found.reason,
    found.is_judged,
    found.reason is null and not found.is_judged as is_left,
    found._commit,
    found._row
from found
