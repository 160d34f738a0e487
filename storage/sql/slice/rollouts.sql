-- Question: which rollouts does a slice hold, and which of them has a scorer version still to judge?
-- Grain: one row per rollout of the slice.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version; $where, the condition.
-- Columns: reason (why it cannot be judged; NULL where it can), is_judged (its verdict is final),
--          is_left (neither).
with sliced as materialized (
    select
        rollouts.event_id,
        rollouts.prompt_id,
        case when rollouts.status <> 'ok' then 'nothing was sampled' end as reason,
        rollouts._commit,
        rollouts._row
    from sliced_rollouts() as rollouts
    where ($where)
),
judged as (
    select distinct score.target_id
    from scores($as_of) as score
    semi join sliced on sliced.event_id = score.target_id
    where score.scorer = $scorer
        and score.scorer_version = $scorer_version
        and score.status in ('ok', 'unscorable')
)
select
    sliced.event_id,
    sliced.prompt_id,
    sliced.reason,
    judged.target_id is not null as is_judged,
    sliced.reason is null and judged.target_id is null as is_left,
    sliced._commit,
    sliced._row
from sliced
left join judged on judged.target_id = sliced.event_id
