-- Question: which prompts were solved once and failed later?
-- Grain: one row per lost prompt of the run.
-- Parameters: $run_id.
-- Columns: role, prompt_id, solved_iteration, failed_iteration, is_solved_again.
select role, prompt_id, solved_iteration, failed_iteration, is_solved_again
from lost_prompts where run_id = $run_id order by failed_iteration, role, prompt_id
