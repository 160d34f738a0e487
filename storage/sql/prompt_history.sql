-- Question: how did a run do on each prompt, iteration by iteration?
-- Grain: one row per run, iteration and prompt with at least one attempt.
-- Parameters: $as_of, a commit number.
-- Columns: num_attempts (rollouts), num_scored (with a reward), num_ok (reward of 0.999 or more),
--          mean_value (over the scored ones; NULL when there is none), is_solved (num_ok > 0).
--          The reward is that of the iteration's reward scorer.
select
    attempt.run_id,
    attempt.iteration,
    attempt.prompt_id,
    reward.scorer,
    reward.scorer_version,
    count(*) as num_attempts,
    count(score.value) as num_scored,
    count(*) filter (where score.value >= 0.999) as num_ok,
    avg(score.value order by attempt.event_id) as mean_value,
    count(*) filter (where score.value >= 0.999) > 0 as is_solved
from rollouts($as_of) as attempt
join reward_scorers($as_of) as reward
    on reward.run_id = attempt.run_id
    and reward.iteration = attempt.iteration
left join latest_scores($as_of) as score
    on score.target_id = attempt.event_id
    and score.scorer = reward.scorer
    and score.scorer_version = reward.scorer_version
where attempt.role = 'attempt'
group by
    attempt.run_id, attempt.iteration, attempt.prompt_id, reward.scorer, reward.scorer_version
order by attempt.run_id, attempt.iteration, attempt.prompt_id
