-- Question: at which rollout does a slice meet each prompt first, of the rollouts left to be judged?
-- Grain: one row per prompt.
-- Parameters: none.
-- Columns: rollout_id.
select sliced.prompt_id, arg_min(sliced.event_id, (sliced._commit, sliced._row)) as rollout_id
from sliced() as sliced
where sliced.is_left
group by sliced.prompt_id
order by sliced.prompt_id
