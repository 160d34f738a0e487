-- Question: which token ids do the responses of a shard have?
-- Grain: one row per rollout that is left to be judged, in the order of their commits.
-- Parameters: none.
-- Columns: prompt_ids and completion_ids (NULL: they are not in a commit of the shard), and the
--          sampled_bounds of an episode of several turns.
select
    sliced.event_id,
    rollouts.run_id,
    sliced.prompt_id,
    token.prompt_ids,
    token.completion_ids,
    token.sampled_bounds
from sliced() as sliced
join sliced_rollouts() as rollouts on rollouts.event_id = sliced.event_id
left join sliced_tokens() as token on token.rollout_id = sliced.event_id
where sliced.is_left
order by sliced._commit, sliced._row
