-- Question: where in the log is what a slice has left to be judged?
-- Grain: one row per commit, block of $block_rows rows in it, and reason.
-- Parameters: $block_rows.
-- Columns: num_rollouts, num_judged, num_left; first_row and last_row of those left (NULL: none).
select
    sliced._commit,
    sliced._row // $block_rows as block,
    sliced.reason,
    count(*) as num_rollouts,
    count(*) filter (where sliced.is_judged) as num_judged,
    count(*) filter (where sliced.is_left) as num_left,
    min(sliced._row) filter (where sliced.is_left) as first_row,
    max(sliced._row) filter (where sliced.is_left) as last_row
from sliced() as sliced
group by all
order by sliced._commit, block, sliced.reason
