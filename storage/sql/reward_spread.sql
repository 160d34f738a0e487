-- Question: how sure is the mean reward of an iteration, when the attempts of a prompt go together?
-- Grain: one row per run and iteration with a scored attempt.
-- Parameters: $as_of, a commit number.
-- Columns: num_prompts (with a scored attempt), mean_of_prompts (of the prompts' mean rewards),
--          std_of_prompts (of these means, with n - 1; NULL for one prompt). The standard error of the
--          mean is std_of_prompts / sqrt(num_prompts).
select
    history.run_id,
    history.iteration,
    count(*) as num_prompts,
    avg(history.mean_value order by history.prompt_id) as mean_of_prompts,
    stddev_samp(history.mean_value order by history.prompt_id) as std_of_prompts
from prompt_history($as_of) as history
where history.mean_value is not null
group by history.run_id, history.iteration
order by history.run_id, history.iteration
