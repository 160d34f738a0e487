-- Question: which scorer's value is the reward of an iteration?
-- Grain: one row per run and iteration that was begun (has a pin).
-- Parameters: $as_of, a commit number.
-- Columns: scorer and scorer_version, the first pair of the pin's `scorer_versions_json`.
select
    pin.run_id,
    pin.iteration,
    map_keys(pin.scorer_versions_json::json::map(varchar, varchar))[1] as scorer,
    map_values(pin.scorer_versions_json::json::map(varchar, varchar))[1] as scorer_version
from views_pinned($as_of) as pin
order by pin.run_id, pin.iteration
