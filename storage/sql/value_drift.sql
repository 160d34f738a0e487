-- Question: how much do two versions of a scorer that followed each other differ?
-- Grain: one row per run whose rollouts or states were judged, scorer, and version that judged some
--        of the same targets as the version before it. Any stream may have judged them.
-- Parameters: $as_of, a commit number.
-- Columns: previous_version (the one that first judged a target of the run before this one did),
--          num_targets (judged by both), mean_change (of the value, newer minus older),
--          mean_abs_change, max_abs_change, num_crossed (0.5 lies between: one is below it, the other
--          is not), correlation (of both values; NULL where either never differs).
with targets as (
    select rollout.event_id, rollout.run_id from rollouts($as_of) as rollout
    union all
    select state.event_id, state.source_run_id from states($as_of) as state
),
judged as materialized (
    select
        target.run_id,
        score.target_id,
        score.scorer,
        score.scorer_version,
        score.value,
        score._commit * 4294967296 + score._row as position
    from latest_scores($as_of) as score
    join targets as target on target.event_id = score.target_id
    where score.value is not null
),
versions as (
    select
        judged.run_id,
        judged.scorer,
        judged.scorer_version,
        min(judged.position) as first_position
    from judged
    group by judged.run_id, judged.scorer, judged.scorer_version
),
successions as (
    select
        version.run_id,
        version.scorer,
        version.scorer_version,
        version.first_position,
        lag(version.scorer_version) over (
            partition by version.run_id, version.scorer order by version.first_position
        ) as previous_version
    from versions as version
),
pairs as (
    select
        succession.run_id,
        succession.scorer,
        succession.scorer_version,
        succession.previous_version,
        succession.first_position,
        newer.position,
        newer.value as newer_value,
        older.value as older_value,
        newer.value - older.value as change
    from successions as succession
    join judged as newer
        on newer.run_id = succession.run_id
        and newer.scorer = succession.scorer
        and newer.scorer_version = succession.scorer_version
    join judged as older
        on older.target_id = newer.target_id
        and older.scorer = succession.scorer
        and older.scorer_version = succession.previous_version
)
select
    pair.run_id,
    pair.scorer,
    pair.scorer_version,
    pair.previous_version,
    count(1) as num_targets,
    avg(pair.change order by pair.position) as mean_change,
    avg(abs(pair.change) order by pair.position) as mean_abs_change,
    max(abs(pair.change)) as max_abs_change,
    count(1) filter (where (pair.newer_value >= 0.5) <> (pair.older_value >= 0.5)) as num_crossed,
    if(
        min(pair.newer_value) = max(pair.newer_value)
        or min(pair.older_value) = max(pair.older_value),
        null,
        corr(pair.newer_value, pair.older_value order by pair.position)
    ) as correlation
from pairs as pair
group by
    pair.run_id, pair.scorer, pair.scorer_version, pair.previous_version, pair.first_position
order by pair.run_id, pair.scorer, pair.first_position
