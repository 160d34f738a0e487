-- Question: which prompts did a run solve once and fail later?
-- Grain: one row per run, role (attempt or evaluation) and prompt that was lost.
-- Parameters: $as_of, a commit number.
-- Columns: solved_iteration (the first with a reward of 0.999 or more), failed_iteration (the first
--          after it in which every reward was lower), is_solved_again (in a later one).
--          The reward is that of the run's newest reward scorer.
with reward as (
    select
        scorers.run_id,
        arg_max(scorers.scorer, scorers.iteration) as scorer,
        arg_max(scorers.scorer_version, scorers.iteration) as scorer_version
    from reward_scorers($as_of) as scorers
    group by scorers.run_id
),
outcomes as (
    select
        rollout.run_id,
        rollout.role,
        rollout.prompt_id,
        rollout.iteration,
        max(score.value) >= 0.999 as is_solved
    from rollouts($as_of) as rollout
    join reward on reward.run_id = rollout.run_id
    join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    where rollout.role in ('attempt', 'evaluation') and score.value is not null
    group by rollout.run_id, rollout.role, rollout.prompt_id, rollout.iteration
),
solved as (
    select
        outcomes.run_id,
        outcomes.role,
        outcomes.prompt_id,
        min(outcomes.iteration) as first_iteration,
        max(outcomes.iteration) as last_iteration
    from outcomes
    where outcomes.is_solved
    group by outcomes.run_id, outcomes.role, outcomes.prompt_id
)
select
    solved.run_id,
    solved.role,
    solved.prompt_id,
    solved.first_iteration as solved_iteration,
    min(outcomes.iteration) as failed_iteration,
    solved.last_iteration > min(outcomes.iteration) as is_solved_again
from solved
join outcomes
    on outcomes.run_id = solved.run_id
    and outcomes.role = solved.role
    and outcomes.prompt_id = solved.prompt_id
    and outcomes.iteration > solved.first_iteration
    and not outcomes.is_solved
group by
    solved.run_id, solved.role, solved.prompt_id, solved.first_iteration, solved.last_iteration
order by solved.run_id, solved.role, solved.prompt_id
