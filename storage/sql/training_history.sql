-- Question: how did a run go, iteration by iteration?
-- Grain: one row per run and iteration that was begun (has a pin).
-- Parameters: $as_of, a commit number.
-- Columns:
--   num_rollouts, num_scored, num_prompts  attempts, those with a reward, their prompts
--   mean_reward              over the scored attempts, by the iteration's reward scorer; NULL when
--                            none is scored
--   tokens_sampled           tokens of the attempts
--   sampled_tokens_per_s     by the time of their sampler batches
--   frac_groups_all_right, frac_groups_all_wrong  of the groups with a reward, those where every
--                            reward, or none, is 0.999 or more: where rewards are 0 or 1, a group
--                            like that teaches nothing
--   num_steps                optimizer steps taken (skipped ones are not)
--   loss, kl_loss, grad_norm means over these steps; kl_loss is weighted
--   kl_mean                  mean KL to the reference (nats) over the learned samples
--   mismatch_mean            mean |trainer - sampler| log-prob (nats) over the learned samples
--   num_learned_samples      samples in the loss of these steps, one that is in two of them twice
with attempts as (
    select
        rollout.run_id,
        rollout.iteration,
        rollout.event_id,
        rollout.prompt_id,
        rollout.group_id,
        rollout.num_completion_tokens,
        rollout.batch_key,
        rollout.generate_s,
        score.value
    from rollouts($as_of) as rollout
    join reward_scorers($as_of) as reward
        on reward.run_id = rollout.run_id
        and reward.iteration = rollout.iteration
    left join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    where rollout.role = 'attempt'
),
batches as (
    select
        attempts.run_id,
        attempts.iteration,
        attempts.batch_key,
        max(attempts.generate_s) as generate_s
    from attempts
    group by attempts.run_id, attempts.iteration, attempts.batch_key
),
engine as (
    select
        batches.run_id,
        batches.iteration,
        sum(batches.generate_s order by batches.batch_key) as generate_s
    from batches
    group by batches.run_id, batches.iteration
),
sampled as (
    select
        attempts.run_id,
        attempts.iteration,
        count(*) as num_rollouts,
        count(attempts.value) as num_scored,
        count(distinct attempts.prompt_id) as num_prompts,
        avg(attempts.value order by attempts.event_id) as mean_reward,
        sum(attempts.num_completion_tokens)::bigint as tokens_sampled
    from attempts
    group by attempts.run_id, attempts.iteration
),
scored_groups as (
    select
        attempts.run_id,
        attempts.iteration,
        attempts.group_id,
        min(attempts.value) >= 0.999 as is_all_right,
        max(attempts.value) < 0.999 as is_all_wrong
    from attempts
    where attempts.value is not null
    group by attempts.run_id, attempts.iteration, attempts.group_id
),
outcomes as (
    select
        scored_groups.run_id,
        scored_groups.iteration,
        count(*) filter (where scored_groups.is_all_right) / count(*) as frac_groups_all_right,
        count(*) filter (where scored_groups.is_all_wrong) / count(*) as frac_groups_all_wrong
    from scored_groups
    group by scored_groups.run_id, scored_groups.iteration
),
steps as (
    select
        step.run_id,
        step.iteration,
        count(*) as num_steps,
        avg(step.loss order by step.step) as loss,
        avg(step.kl_loss order by step.step) as kl_loss,
        avg(step.grad_norm order by step.step) as grad_norm
    from updates($as_of) as step
    where not step.is_skipped
    group by step.run_id, step.iteration
),
learned as (
    select
        sample.run_id,
        sample.iteration,
        count(*) as num_learned_samples,
        avg(sample.kl_mean order by sample.event_id) as kl_mean,
        avg(sample.mismatch_mean order by sample.event_id) as mismatch_mean
    from learned_samples($as_of) as sample
    join updates($as_of) as step
        on step.run_id = sample.run_id
        and step.iteration = sample.iteration
        and step.step = sample.step
        and not step.is_skipped
    where sample.num_loss_tokens > 0
    group by sample.run_id, sample.iteration
)
select
    begun.run_id,
    begun.iteration,
    begun.scorer,
    begun.scorer_version,
    sampled.mean_reward,
    coalesce(sampled.num_rollouts, 0) as num_rollouts,
    coalesce(sampled.num_scored, 0) as num_scored,
    coalesce(sampled.num_prompts, 0) as num_prompts,
    coalesce(sampled.tokens_sampled, 0) as tokens_sampled,
    sampled.tokens_sampled / nullif(engine.generate_s, 0) as sampled_tokens_per_s,
    outcomes.frac_groups_all_right,
    outcomes.frac_groups_all_wrong,
    coalesce(steps.num_steps, 0) as num_steps,
    steps.loss,
    steps.kl_loss,
    steps.grad_norm,
    learned.kl_mean,
    learned.mismatch_mean,
    coalesce(learned.num_learned_samples, 0) as num_learned_samples
from reward_scorers($as_of) as begun
left join sampled on sampled.run_id = begun.run_id and sampled.iteration = begun.iteration
left join engine on engine.run_id = begun.run_id and engine.iteration = begun.iteration
left join outcomes on outcomes.run_id = begun.run_id and outcomes.iteration = begun.iteration
left join steps on steps.run_id = begun.run_id and steps.iteration = begun.iteration
left join learned on learned.run_id = begun.run_id and learned.iteration = begun.iteration
order by begun.run_id, begun.iteration
