-- Question: how much did a run sample, and for what?
-- Grain: one row per run, role, and arm of the controls.
-- Parameters: $as_of, a commit number.
-- Columns: arm (NULL but for controls), num_rollouts (with a completion), num_tokens (sampled for
--          them), is_training (false for evaluations, in training or outside, and for imports).
with training as (
    select opened.run_id
    from runs($as_of) as opened
    where coalesce(opened.kind, 'train') in ('train', 'recorded')
    group by opened.run_id
)
select
    rollout.run_id,
    rollout.role,
    rollout.arm,
    count(*) as num_rollouts,
    sum(rollout.num_completion_tokens)::bigint as num_tokens,
    rollout.role <> 'evaluation' and rollout.run_id in (
        select training.run_id from training
    ) as is_training
from rollouts($as_of) as rollout
where rollout.status = 'ok'
group by rollout.run_id, rollout.role, rollout.arm
order by rollout.run_id, rollout.role, rollout.arm
