-- Question: what had a run cost by the end of each iteration?
-- Grain: one row per run and iteration that was begun (has a pin).
-- Parameters: $as_of, a commit number.
-- Columns: each is summed over the iterations up to this one
--   num_rollouts, num_tokens sampled in training, whatever for: evaluation is left out
--   num_attempts             of these rollouts, the fresh attempts
--   num_learned_tokens       tokens trained on
--   generate_s, learn_s      seconds in sampler batches, and in optimizer steps
with sampled as (
    select
        rollout.run_id,
        rollout.iteration,
        count(*) as num_rollouts,
        count(*) filter (where rollout.role = 'attempt') as num_attempts,
        sum(rollout.num_completion_tokens)::bigint as num_tokens
    from rollouts($as_of) as rollout
    where rollout.status = 'ok' and rollout.role <> 'evaluation'
    group by rollout.run_id, rollout.iteration
),
batches as (
    select
        rollout.run_id,
        rollout.iteration,
        rollout.batch_key,
        max(rollout.generate_s) as generate_s
    from rollouts($as_of) as rollout
    where rollout.role <> 'evaluation'
    group by rollout.run_id, rollout.iteration, rollout.batch_key
),
engine as (
    select
        batches.run_id,
        batches.iteration,
        sum(batches.generate_s order by batches.batch_key) as generate_s
    from batches
    group by batches.run_id, batches.iteration
),
learned as (
    select
        sample.run_id,
        sample.iteration,
        sum(sample.num_loss_tokens)::bigint as num_tokens
    from learned_samples($as_of) as sample
    group by sample.run_id, sample.iteration
),
steps as (
    select
        step.run_id,
        step.iteration,
        sum(step.learn_s order by step.step) as learn_s
    from updates($as_of) as step
    group by step.run_id, step.iteration
),
of_iteration as (
    select
        begun.run_id,
        begun.iteration,
        coalesce(sampled.num_rollouts, 0) as num_rollouts,
        coalesce(sampled.num_attempts, 0) as num_attempts,
        coalesce(sampled.num_tokens, 0) as num_tokens,
        coalesce(learned.num_tokens, 0) as num_learned_tokens,
        coalesce(engine.generate_s, 0) as generate_s,
        coalesce(steps.learn_s, 0) as learn_s
    from reward_scorers($as_of) as begun
    left join sampled on sampled.run_id = begun.run_id and sampled.iteration = begun.iteration
    left join engine on engine.run_id = begun.run_id and engine.iteration = begun.iteration
    left join learned on learned.run_id = begun.run_id and learned.iteration = begun.iteration
    left join steps on steps.run_id = begun.run_id and steps.iteration = begun.iteration
)
select
    cost.run_id,
    cost.iteration,
    (sum(cost.num_rollouts) over past)::bigint as num_rollouts,
    (sum(cost.num_attempts) over past)::bigint as num_attempts,
    (sum(cost.num_tokens) over past)::bigint as num_tokens,
    (sum(cost.num_learned_tokens) over past)::bigint as num_learned_tokens,
    sum(cost.generate_s) over past as generate_s,
    sum(cost.learn_s) over past as learn_s
from of_iteration as cost
window past as (partition by cost.run_id order by cost.iteration)
order by cost.run_id, cost.iteration
