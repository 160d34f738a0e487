-- Question: of what does a run's replay buffer consist?
-- Grain: one row per run, unit, eligibility reason, difficulty and age bucket with an entry.
-- Parameters: $as_of, a commit number; $run and $version, as for `replay_buffer`.
-- Columns: min_age and max_age (the bucket, in policy versions: 0, 1, 2-3, 4-7, 8-15, and so on),
--          num_entries.
select
    entry.run_id,
    entry.unit,
    entry.eligibility_reason,
    entry.difficulty,
    if(entry.age < 1, 0, 2 ^ floor(log2(entry.age)))::integer as min_age,
    if(entry.age < 1, 0, 2 ^ (floor(log2(entry.age)) + 1) - 1)::integer as max_age,
    count(*) as num_entries
from replay_buffer($as_of, run := $run, version := $version) as entry
group by all
order by all
