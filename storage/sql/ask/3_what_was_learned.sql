-- Question: which samples did the last steps learn from, and how old was the policy behind them?
-- Grain: one row per learned sample of the run, newest first, twenty at most.
-- Parameters: $run_id.
-- Columns: iteration, step, rollout_id, reward, advantage, age, importance_mean.
select iteration, step, rollout_id, reward, advantage, age, importance_mean
from replay_audit where run_id = $run_id and state = 'learned'
order by iteration desc, step desc, position limit 20
