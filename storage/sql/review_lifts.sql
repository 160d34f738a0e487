-- Question: do second attempts after a review succeed more often than other answers to the prompt?
-- Grain: one row per run, control arm and stratum of the reviews, where a gated prompt has scores of
--        both sides.
-- Parameters: $as_of, a commit number.
-- Columns:
--   arm                      of the controls, as in `review_outcomes`
--   leak                     all, or only second attempts after reviews with this `reviews.leak`
--   num                      gated prompts of an iteration with a scored second attempt and a scored
--                            answer of the arm: the pairs
--   treated, control         mean over the pairs of the mean success of the second attempts, and of
--                            the arm's answers
--   lift, ci_low, ci_high    mean of the paired difference treated - control, and its 95 % interval,
--                            lift +- 1.96 sd / sqrt(num), sd with num - 1; NULL below 30 pairs
with outcomes as materialized (
    select
        outcome.run_id,
        outcome.iteration,
        outcome.prompt_id,
        outcome.arm,
        outcome.leak,
        outcome.is_success::integer as success
    from review_outcomes($as_of) as outcome
    where outcome.is_success is not null
),
treated as (
    select
        stratified.run_id,
        stratified.iteration,
        stratified.prompt_id,
        stratified.leak,
        avg(stratified.success) as success
    from (
        select
            outcome.run_id,
            outcome.iteration,
            outcome.prompt_id,
            outcome.success,
            unnest(['all', outcome.leak]) as leak
        from outcomes as outcome
        where outcome.arm = 'review'
    ) as stratified
    where stratified.leak is not null
    group by stratified.run_id, stratified.iteration, stratified.prompt_id, stratified.leak
),
controls as (
    select
        outcome.run_id,
        outcome.iteration,
        outcome.prompt_id,
        outcome.arm,
        avg(outcome.success) as success
    from outcomes as outcome
    where outcome.arm <> 'review'
    group by outcome.run_id, outcome.iteration, outcome.prompt_id, outcome.arm
),
pairs as (
    select
        control.run_id,
        control.iteration,
        control.prompt_id,
        control.arm,
        treated.leak,
        treated.success as treated,
        control.success as control,
        treated.success - control.success as difference
    from controls as control
    join treated
        on treated.run_id = control.run_id
        and treated.iteration = control.iteration
        and treated.prompt_id = control.prompt_id
),
lifts as (
    select
        pair.run_id,
        pair.arm,
        pair.leak,
        count(*) as num,
        avg(pair.treated order by pair.iteration, pair.prompt_id) as treated,
        avg(pair.control order by pair.iteration, pair.prompt_id) as control,
        if(
            count(*) >= 30,
            avg(pair.difference order by pair.iteration, pair.prompt_id),
            null
        ) as lift,
        1.96 * stddev_samp(pair.difference order by pair.iteration, pair.prompt_id)
        / sqrt(count(*)) as half_width
    from pairs as pair
    group by pair.run_id, pair.arm, pair.leak
)
select
    lifts.run_id,
    lifts.arm,
    lifts.leak,
    lifts.num,
    lifts.treated,
    lifts.control,
    lifts.lift,
    lifts.lift - lifts.half_width as ci_low,
    lifts.lift + lifts.half_width as ci_high
from lifts
order by lifts.run_id, lifts.arm, lifts.leak
