-- Question: which reviews led to a success, and did those whom they were shown to succeed?
-- Grain: one row per verified review: it is well formed (status ok), and a second attempt after it has
--        a reward of 0.999 or more by the newest reward scorer of the run that sampled it.
-- Parameters: $as_of, a commit number; $run, the run whose `lineage` alone counts, for entries and for
--             uses, so that other runs change nothing for it (null: all training runs).
-- Columns:
--   position                 0, 1, 2 ... in the order the reviews were committed; compaction keeps it
--   review_id, attempt_id, second_attempt_id  rollouts: the review, the failed attempt, the first
--                            success after the review
--   task, messages_json      of the prompt
--   what_went_wrong, what_to_do, review, leak  as in `reviews`
--   num_tokens               tokens sampled for the review
--   policy_version           that of the review
--   num_shown                later reviews that were shown it
--   num_helpful, num_harmful the second attempts after those that succeeded, and that failed
with sources as materialized (
    select
        history.source_run_id,
        max(history.last_iteration) as last_iteration,
        max(history.last_commit) as last_commit
    from lineage($as_of) as history
    where $run is null or history.run_id = $run
    group by history.source_run_id
),
reward as (
    select
        scorers.run_id,
        arg_max(scorers.scorer, scorers.iteration) as scorer,
        arg_max(scorers.scorer_version, scorers.iteration) as scorer_version
    from reward_scorers($as_of) as scorers
    group by scorers.run_id
),
known as materialized (
    select
        note.rollout_id as review_id,
        note.status,
        note.memory_json,
        note._commit * 4294967296 + note._row as place
    from reviews($as_of) as note
    join sources as source
        on source.source_run_id = note.run_id
        and note.iteration <= source.last_iteration
        and note._commit <= source.last_commit
),
judged as materialized (  -- the reviews with a second attempt that has a reward
    select
        second.parent_id as review_id,
        count(*) filter (where score.value >= 0.999) as num_ok,
        count(*) filter (where score.value < 0.999) as num_failed,
        arg_min(second.event_id, second._commit * 4294967296 + second._row) filter (
            where score.value >= 0.999
        ) as second_attempt_id
    from rollouts($as_of) as second
    join reward on reward.run_id = second.run_id
    join latest_scores($as_of) as score
        on score.target_id = second.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    where second.role = 'second_attempt' and score.value is not null
    group by second.parent_id
),
shown as (
    select
        known.review_id as shown_to,
        unnest(json_extract_string(known.memory_json, '$[*].review_id')) as review_id
    from known
    where known.memory_json <> '[]'
),
uses as (
    select
        shown.review_id,
        count(*) as num_shown,
        sum(judged.num_ok) as num_helpful,
        sum(judged.num_failed) as num_harmful
    from shown
    left join judged on judged.review_id = shown.shown_to
    group by shown.review_id
),
entries as materialized (  -- numbers and ids; texts are joined last
    select
        known.review_id,
        judged.second_attempt_id,
        row_number() over (order by known.place) - 1 as position,
        coalesce(used.num_helpful, 0)::bigint as num_helpful,
        coalesce(used.num_harmful, 0)::bigint as num_harmful,
        coalesce(used.num_shown, 0) as num_shown
    from known
    join judged on judged.review_id = known.review_id
    left join uses as used on used.review_id = known.review_id
    where known.status = 'ok' and judged.num_ok > 0
)
select
    note.run_id,
    note.iteration,
    entry.position,
    entry.review_id,
    note.prompt_id,
    prompt.task,
    prompt.messages_json,
    note.attempt_id,
    entry.second_attempt_id,
    note.what_went_wrong,
    note.what_to_do,
    note.review,
    note.leak,
    sampled.num_completion_tokens as num_tokens,
    sampled.policy_version,
    entry.num_helpful,
    entry.num_harmful,
    entry.num_shown
from entries as entry
join reviews($as_of) as note on note.rollout_id = entry.review_id
left join rollouts($as_of) as sampled
    on sampled.event_id = entry.review_id
    and sampled.role = 'review'
left join prompts($as_of) as prompt
    on prompt.run_id = note.run_id
    and prompt.prompt_id = note.prompt_id
order by entry.position
