-- Question: did the reward rise, and how many groups still had something to teach?
-- Grain: one row per iteration of the run.
-- Parameters: $run_id.
-- Columns: mean_reward, num_rollouts, frac_groups_all_wrong, num_learned_samples.
select iteration, mean_reward, num_rollouts, frac_groups_all_wrong, num_learned_samples
from training_history where run_id = $run_id order by iteration
