-- Question: which rollouts does a slice hold, and which of them has a scorer version still to judge?
-- Grain: one row per rollout of the slice.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version; $where, the condition.
-- Columns: reason (why it cannot be judged; NULL where it can), is_judged (its verdict is final),
--          is_left (neither).
with sliced as materialized (
    select
        rollouts.event_id,
        rollouts.run_id,
        rollouts.prompt_id,
        rollouts.status,
        rollouts.role = 'review' or rollouts.arm = 'no_memory_review' as is_review,
        rollouts.role,
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
),
found as (
    select
        sliced.*,
        case
            when sliced.status <> 'ok' then 'nothing was sampled'
            when sliced.is_review then 'a review answers no prompt'
            when sliced.role = 'imported_turn' then 'their conversations go on'
            when judged.target_id is null and prompt.prompt_id is null
                then 'its prompt is not in the store'
        end as reason,
        judged.target_id is not null as is_judged
    from sliced
    left join prompts($as_of) as prompt
        on prompt.run_id = sliced.run_id and prompt.prompt_id = sliced.prompt_id
    left join judged on judged.target_id = sliced.event_id
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
