-- Question: what has a scorer to know of the rollouts of a shard?
-- Grain: one row per rollout that is left to be judged, in the order of their commits.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version.
-- Columns: of the rollout, and of its prompt; attempt, the number of judgements that were not final.
with tried as (
    select score.target_id, max(score.attempt) + 1 as attempt
    from scores($as_of) as score
    semi join sliced() as sliced on sliced.event_id = score.target_id
    where score.scorer = $scorer and score.scorer_version = $scorer_version
    group by score.target_id
)
select
    sliced.event_id,
    rollouts.completion,
    rollouts.run_id,
    rollouts.iteration,
    rollouts.role,
    rollouts.group_id,
    rollouts.prefix_tokens,
    rollouts.num_completion_tokens,
    rollouts.max_tokens,
    sliced.prompt_id,
    prompt.task,
    prompt.split,
    prompt.messages_json,
    prompt.answer,
    prompt.difficulty,
    prompt.meta_json,
    coalesce(tried.attempt, 0) as attempt
from sliced() as sliced
join sliced_rollouts() as rollouts on rollouts.event_id = sliced.event_id
join prompts($as_of) as prompt
    on prompt.run_id = rollouts.run_id and prompt.prompt_id = sliced.prompt_id
left join tried on tried.target_id = sliced.event_id
where sliced.is_left
order by sliced._commit, sliced._row
