-- Question: of which runs' events does a run's history consist?
-- Grain: one row per training run (of kind train or recorded) and run whose history it has: itself,
--        and when it was forked its parent, the parent's parent, and so on.
-- Parameters: $as_of, a commit number.
-- Columns: last_iteration and last_commit bound what of source_run_id belongs to the history.
with recursive forks as (
    select
        event.run_id,
        arg_min(event.parent_run_id, event.run_epoch) as parent_run_id,
        arg_min(event.parent_iteration, event.run_epoch) as parent_iteration,
        arg_min(event.parent_as_of, event.run_epoch) as parent_as_of
    from runs($as_of) as event
    group by event.run_id
    having coalesce(arg_min(event.kind, event.run_epoch), 'train') in ('train', 'recorded')
),
ancestry as (
    select
        fork.run_id,
        fork.run_id as source_run_id,
        2147483647 as last_iteration,
        9223372036854775807 as last_commit
    from forks as fork
    union
    select
        ancestry.run_id,
        fork.parent_run_id as source_run_id,
        least(ancestry.last_iteration, fork.parent_iteration) as last_iteration,
        least(ancestry.last_commit, fork.parent_as_of) as last_commit
    from ancestry
    join forks as fork on fork.run_id = ancestry.source_run_id
    where fork.parent_run_id is not null
)
select
    ancestry.run_id,
    ancestry.source_run_id,
    ancestry.last_iteration,
    ancestry.last_commit
from ancestry
order by ancestry.run_id, ancestry.last_iteration desc, ancestry.source_run_id
