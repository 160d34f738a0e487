-- Question: how did the samples of each unit enter the steps of an iteration: how old, how weighted?
-- Grain: one row per run, iteration and unit with a planned sample (fresh, state, trajectory, prompt,
--        review, second_attempt, distill).
-- Parameters: $as_of, a commit number.
-- Columns:
--   num_planned, num_learned  samples planned; those of them that entered a step with a token
--   num_loss_tokens          tokens trained on
--   age_mean, age_max        policy versions between sampling and step, of the planned samples
--   reward_mean              of the planned samples that were chosen under a score
--   the others are means (of mismatch also the largest) over the learned samples that have the figure
--   ess_frac                 effective share of the samples, (mean of importance_mean)^2 / mean of its
--                            square: 1 where all weigh the same
with planned as (
    select
        replay.run_id,
        replay.iteration,
        replay.unit,
        replay.event_id,
        replay.age,
        replay.reward,
        sample.num_loss_tokens,
        sample.importance_mean,
        sample.mismatch_mean,
        sample.mismatch_max,
        sample.ratio_mean,
        sample.frac_truncated,
        sample.frac_clipped,
        sample.kl_mean,
        sample.entropy_mean
    from replays($as_of) as replay
    left join learned_samples($as_of) as sample
        on sample.run_id = replay.run_id
        and sample.iteration = replay.iteration
        and sample.step = replay.step
        and sample.rollout_id = replay.rollout_id
        and sample.num_loss_tokens > 0
)
select
    planned.run_id,
    planned.iteration,
    planned.unit,
    count(*) as num_planned,
    count(planned.num_loss_tokens) as num_learned,
    coalesce(sum(planned.num_loss_tokens), 0)::bigint as num_loss_tokens,
    sum(planned.age) / count(*) as age_mean,
    max(planned.age) as age_max,
    avg(planned.reward order by planned.event_id) as reward_mean,
    avg(planned.importance_mean order by planned.event_id) as importance_mean,
    avg(planned.importance_mean order by planned.event_id) ^ 2
    / nullif(avg(planned.importance_mean ^ 2 order by planned.event_id), 0) as ess_frac,
    avg(planned.mismatch_mean order by planned.event_id) as mismatch_mean,
    max(planned.mismatch_max) as mismatch_max,
    avg(planned.ratio_mean order by planned.event_id) as ratio_mean,
    avg(planned.frac_truncated order by planned.event_id) as frac_truncated,
    avg(planned.frac_clipped order by planned.event_id) as frac_clipped,
    avg(planned.kl_mean order by planned.event_id) as kl_mean,
    avg(planned.entropy_mean order by planned.event_id) as entropy_mean
from planned
group by planned.run_id, planned.iteration, planned.unit
order by planned.run_id, planned.iteration, planned.unit
