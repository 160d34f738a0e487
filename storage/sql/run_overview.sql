-- Question: which runs are there, and how far did they come?
-- Grain: one row per run.
-- Parameters: $as_of, a commit number.
-- Columns: kind (as in `runs`), opened_at (first time), last_event_at, epoch (times it was
--          opened), state (finished, interrupted or failed as its newest epoch says; open when that
--          says nothing: it goes on or was killed), last_iteration (begun), last_learned_iteration
--          (with a step taken), last_mean_reward (of the last iteration with one),
--          planned_iterations.
with epochs as (
    select
        event.run_id,
        coalesce(arg_max(event.kind, event.run_epoch), 'train') as kind,
        max(event.run_epoch) as epoch,
        min(event.recorded_at) as opened_at,
        arg_max(event.planned_iterations, event.run_epoch) as planned_iterations,
        arg_max(event.what, (event.run_epoch, event.what <> 'opened', event._commit)) as what
    from runs($as_of) as event
    group by event.run_id
),
moments as (
    select run_id, max(recorded_at) as last_at from runs($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from rollouts($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from scores($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from updates($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from policies($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from evaluations($as_of) group by run_id
    union all
    select run_id, max(recorded_at) as last_at from failures($as_of) group by run_id
),
last_moments as (
    select moments.run_id, max(moments.last_at) as last_event_at
    from moments
    group by moments.run_id
),
progress as (
    select
        history.run_id,
        max(history.iteration) as last_iteration,
        max(history.iteration) filter (where history.num_steps > 0) as last_learned_iteration,
        arg_max(history.mean_reward, history.iteration) as last_mean_reward
    from training_history($as_of) as history
    group by history.run_id
)
select
    epochs.run_id,
    epochs.kind,
    epochs.opened_at,
    last_moments.last_event_at,
    epochs.epoch,
    case when epochs.what = 'opened' then 'open' else epochs.what end as state,
    progress.last_iteration,
    progress.last_learned_iteration,
    epochs.planned_iterations,
    progress.last_mean_reward
from epochs
join last_moments on last_moments.run_id = epochs.run_id
left join progress on progress.run_id = epochs.run_id
order by epochs.opened_at, epochs.run_id
