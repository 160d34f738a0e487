-- Question: how much of what a run once solved is lost, and what came back?
-- Grain: one row per run and iteration that was begun (has a pin).
-- Parameters: $as_of, a commit number.
-- Columns:
--   All are as of the end of the iteration, over the on-policy attempts (attempts and retries) that
--   have a reward by the run's newest reward scorer; a success is a reward of 0.999 or more.
--   num_prompts_seen         prompts with such an attempt
--   num_ever_solved          those with a success
--   num_lost                 those of them whose last 16 attempts all failed: the upper end of the
--                            95 % Wilson interval of 0 of 16 is 0.194, below 0.2; of 0 of 15, 0.204
--   num_recovered            those that were lost at the end of an earlier iteration and are not now
--   num_recovered_by_replay  those of them that replay brought back: the first success after the
--                            newest loss was a continuation or a retry, or the prompt was picked
--                            since the iteration in which it was tried last before it
--   lost_rate                num_lost / num_ever_solved; NULL before the first success
with reward as (
    select
        scorers.run_id,
        arg_max(scorers.scorer, scorers.iteration) as scorer,
        arg_max(scorers.scorer_version, scorers.iteration) as scorer_version
    from reward_scorers($as_of) as scorers
    group by scorers.run_id
),
sampled as materialized (
    select
        rollout.run_id,
        rollout.prompt_id,
        rollout.iteration,
        rollout.role,
        rollout._commit * 4294967296 + rollout._row as position,
        score.value >= 0.999 as is_ok
    from rollouts($as_of) as rollout
    join reward on reward.run_id = rollout.run_id
    join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    where rollout.role in ('attempt', 'retry', 'continuation') and score.value is not null
),
seen as materialized (  -- windows go over numbers: over texts they take several times the memory
    select
        known.run_id,
        known.prompt_id,
        row_number() over (order by known.run_id, known.prompt_id) as prompt
    from (select distinct sampled.run_id, sampled.prompt_id from sampled) as known
),
outcomes as materialized (
    select seen.prompt, sampled.iteration, sampled.role, sampled.position, sampled.is_ok
    from sampled
    join seen on seen.run_id = sampled.run_id and seen.prompt_id = sampled.prompt_id
),
counted as (
    select
        outcome.prompt,
        outcome.iteration,
        outcome.is_ok,
        row_number() over (partition by outcome.prompt order by outcome.position) as number
    from outcomes as outcome
    where outcome.role <> 'continuation'
),
tries as (  -- of a prompt up to an iteration: all, and up to its last success
    select
        counted.prompt,
        counted.iteration,
        max(counted.number) as num_tries,
        max(max(counted.number) filter (where counted.is_ok)) over (
            partition by counted.prompt order by counted.iteration
        ) as num_until_ok
    from counted
    group by counted.prompt, counted.iteration
),
ends as (
    select
        tries.prompt,
        tries.iteration,
        tries.num_until_ok is not null as is_solved,
        coalesce(tries.num_tries - tries.num_until_ok >= 16, false) as is_lost,
        lag(tries.iteration) over history as tried_before,
        coalesce(lag(tries.num_tries - tries.num_until_ok >= 16) over history, false) as was_lost
    from tries
    window history as (partition by tries.prompt order by tries.iteration)
),
turns as materialized (
    select
        ends.prompt,
        ends.iteration,
        ends.is_solved,
        ends.is_lost,
        ends.tried_before,
        ends.was_lost and not ends.is_lost as is_recovery,
        max(if(ends.is_lost and not ends.was_lost, ends.iteration, null)) over (
            partition by ends.prompt order by ends.iteration
        ) as lost_in
    from ends
),
picked as (
    select seen.prompt, pick.iteration
    from picks($as_of) as pick
    join seen on seen.run_id = pick.run_id and seen.prompt_id = pick.prompt_id
),
returns as (
    select
        turn.prompt,
        turn.iteration,
        arg_min(outcome.role, outcome.position) <> 'attempt'
        or exists (
            from picked
            where
                picked.prompt = turn.prompt
                and picked.iteration between turn.tried_before and turn.iteration
        ) as is_by_replay
    from turns as turn
    join outcomes as outcome
        on outcome.prompt = turn.prompt
        and outcome.iteration > turn.lost_in
        and outcome.iteration <= turn.iteration
        and outcome.is_ok
    where turn.is_recovery
    group by turn.prompt, turn.iteration, turn.tried_before
),
standings as (
    select
        turn.prompt,
        turn.iteration,
        1 as seen,
        turn.is_solved::integer as solved,
        turn.is_lost::integer as lost,
        (turn.lost_in is not null and not turn.is_lost)::integer as recovered,
        (
            not turn.is_lost
            and coalesce(
                last_value(returned.is_by_replay ignore nulls) over (
                    partition by turn.prompt order by turn.iteration
                ),
                false
            )
        )::integer as recovered_by_replay
    from turns as turn
    left join returns as returned
        on returned.prompt = turn.prompt
        and returned.iteration = turn.iteration
),
changes as (  -- from one iteration with the prompt to the next: sums of them are counts
    select
        standing.prompt,
        standing.iteration,
        standing.seen - coalesce(lag(standing.seen) over history, 0) as seen,
        standing.solved - coalesce(lag(standing.solved) over history, 0) as solved,
        standing.lost - coalesce(lag(standing.lost) over history, 0) as lost,
        standing.recovered - coalesce(lag(standing.recovered) over history, 0) as recovered,
        standing.recovered_by_replay
        - coalesce(lag(standing.recovered_by_replay) over history, 0) as recovered_by_replay
    from standings as standing
    window history as (partition by standing.prompt order by standing.iteration)
),
totals as (
    select
        seen.run_id,
        change.iteration,
        sum(change.seen) as seen,
        sum(change.solved) as solved,
        sum(change.lost) as lost,
        sum(change.recovered) as recovered,
        sum(change.recovered_by_replay) as recovered_by_replay
    from changes as change
    join seen on seen.prompt = change.prompt
    group by seen.run_id, change.iteration
),
counts as (
    select
        begun.run_id,
        begun.iteration,
        coalesce(sum(total.seen) over history, 0)::bigint as num_prompts_seen,
        coalesce(sum(total.solved) over history, 0)::bigint as num_ever_solved,
        coalesce(sum(total.lost) over history, 0)::bigint as num_lost,
        coalesce(sum(total.recovered) over history, 0)::bigint as num_recovered,
        coalesce(
            sum(total.recovered_by_replay) over history, 0
        )::bigint as num_recovered_by_replay
    from reward_scorers($as_of) as begun
    left join totals as total
        on total.run_id = begun.run_id
        and total.iteration = begun.iteration
    window history as (partition by begun.run_id order by begun.iteration)
)
select
    counts.run_id,
    counts.iteration,
    counts.num_prompts_seen,
    counts.num_ever_solved,
    counts.num_lost,
    counts.num_recovered,
    counts.num_recovered_by_replay,
    counts.num_lost / nullif(counts.num_ever_solved, 0) as lost_rate
from counts
order by counts.run_id, counts.iteration
