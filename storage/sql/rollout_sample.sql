-- Question: which rollouts does a person look at first, when not all of them can be shown?
-- Grain: one row per run and rollout chosen of those it sampled or learned from.
-- Parameters: $as_of, a commit number; $run, the only run wanted (null: every run); $num, the most
--             rollouts of a run (null: all).
-- Columns:
--   source_run_id            the run that sampled it
--   why                      what it was chosen as: newest_evaluation (all of them come first), then
--                            replayed (picked by the run, itself or a state of it; at most two fifths
--                            of $num), failed (nothing was sampled, or no score has a value; at most
--                            a fifth), even (the others, and those beyond their share)
--   rank                     1 is looked at first. Within each kind the iterations and roles of the
--                            run take turns; which rollout has the turn is decided by its id, a hash
--   reward                   by the newest reward scorer of the run that sampled it
--   score_status             of that judgement; NULL where there is none
--   num_picks                picks of it, or of a state of it, by the run
--   num_steps                steps of the run it was planned into
--   num_rollouts             how many there are to choose from
with newest as (
    select
        pin.run_id,
        arg_max(pin.scorer, pin.iteration) as scorer,
        arg_max(pin.scorer_version, pin.iteration) as scorer_version
    from reward_scorers($as_of) as pin
    group by pin.run_id
),
planned as (
    select
        replay.run_id,
        coalesce(distilled.rollout_id, replay.rollout_id) as rollout_id,
        count(*)::integer as num_steps
    from replays($as_of) as replay
    left join distillations($as_of) as distilled on distilled.event_id = replay.rollout_id
    where $run is null or replay.run_id = $run
    group by replay.run_id, coalesce(distilled.rollout_id, replay.rollout_id)
),
picked as (
    select pick.run_id, pick.rollout_id, count(*)::integer as num_picks
    from picks($as_of) as pick
    where ($run is null or pick.run_id = $run) and pick.rollout_id is not null
    group by pick.run_id, pick.rollout_id
),
candidates as materialized (
    select rollout.run_id, rollout.event_id as rollout_id
    from rollouts($as_of) as rollout
    where $run is null or rollout.run_id = $run
    union
    select planned.run_id, planned.rollout_id from planned
    union
    select picked.run_id, picked.rollout_id from picked
),
known as materialized (
    select
        candidate.run_id,
        candidate.rollout_id,
        rollout.run_id as source_run_id,
        rollout.iteration,
        rollout.role,
        rollout.status,
        ('0x' || substr(rollout.event_id, 3, 15))::bigint as chance,
        score.value as reward,
        score.status as score_status,
        coalesce(picked.num_picks, 0) as num_picks,
        coalesce(planned.num_steps, 0) as num_steps
    from candidates as candidate
    join rollouts($as_of) as rollout on rollout.event_id = candidate.rollout_id
    left join newest on newest.run_id = rollout.run_id
    left join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = newest.scorer
        and score.scorer_version = newest.scorer_version
    left join planned
        on planned.run_id = candidate.run_id
        and planned.rollout_id = candidate.rollout_id
    left join picked
        on picked.run_id = candidate.run_id
        and picked.rollout_id = candidate.rollout_id
),
evaluated as (
    select known.run_id, max(known.iteration) as iteration
    from known
    where known.role = 'evaluation' and known.source_run_id = known.run_id
    group by known.run_id
),
numbered as materialized (  -- windows go over numbers: over texts they take several times the memory
    select
        known.rollout_id,
        known.chance,
        dense_rank() over (order by known.run_id) as run_number,
        dense_rank() over (order by known.iteration, known.role) as place,
        case
            when known.role = 'evaluation' and known.iteration = evaluated.iteration then 1
            when known.num_picks > 0 then 2
            when known.status <> 'ok' or coalesce(known.score_status, 'ok') <> 'ok' then 3
            else 4
        end as kind
    from known
    left join evaluated on evaluated.run_id = known.run_id
),
turned as (
    select
        numbered.run_number,
        numbered.rollout_id,
        numbered.chance,
        numbered.kind,
        row_number() over (
            partition by numbered.run_number, numbered.kind, numbered.place order by numbered.chance
        ) as turn
    from numbered
),
limited as (
    select
        turned.run_number,
        turned.rollout_id,
        turned.chance,
        turned.turn,
        case
            when turned.kind = 2 and row_number() over of_kind > $num * 2 // 5 then 4
            when turned.kind = 3 and row_number() over of_kind > $num // 5 then 4
            else turned.kind
        end as kind
    from turned
    window of_kind as (
        partition by turned.run_number, turned.kind order by turned.turn, turned.chance
    )
),
ranked as (
    select
        limited.run_number,
        limited.rollout_id,
        limited.kind,
        row_number() over (
            partition by limited.run_number order by limited.kind, limited.turn, limited.chance
        ) as rank,
        count(*) over (partition by limited.run_number) as num_rollouts
    from limited
),
runs_by_number as (
    select known.run_id, dense_rank() over (order by known.run_id) as run_number
    from (select distinct known.run_id from known) as known
)
select
    runs_by_number.run_id,
    ranked.rank::integer as rank,
    ranked.rollout_id,
    known.source_run_id,
    ['newest_evaluation', 'replayed', 'failed', 'even'][ranked.kind] as why,
    known.reward,
    known.score_status,
    known.num_picks,
    known.num_steps,
    ranked.num_rollouts
from ranked
join runs_by_number on runs_by_number.run_number = ranked.run_number
join known
    on known.run_id = runs_by_number.run_id
    and known.rollout_id = ranked.rollout_id
where $num is null or ranked.rank <= $num
order by runs_by_number.run_id, ranked.rank
