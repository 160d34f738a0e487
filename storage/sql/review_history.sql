-- Question: how did self-review go, iteration by iteration?
-- Grain: one row per run and iteration with attempts, from the run's first iteration with a review on.
-- Parameters: $as_of, a commit number.
-- Columns:
--   Rewards are by the run's newest reward scorer; a success is 0.999 or more.
--   num_attempted, num_failed_prompts, num_gated  prompts with an attempt, with a failed one, with a
--                            review (controls aside); a reviewed failure of an import is none, but
--                            counts in the columns about reviews and second attempts
--   trigger_rate             num_gated / num_attempted
--   num_reviews              reviews that were read; num_ok, num_malformed, num_empty, num_truncated
--                            and num_parrot of them have that status
--   frac_malformed           num_malformed / num_reviews
--   leak_answer, leak_gold   reviews that state an answer, and the reference answer
--   leak_rate                both / num_reviews
--   num_second_attempts      second attempts that hold a completion
--   success_rate             successes among those with a reward
--   hit_rate                 share of the reviews that were shown an earlier one
--   num_distilled            second attempts planned as targets
--   internalised_rate        successes among the attempts, with a reward, at prompts that an earlier
--                            iteration of the run's `lineage` distilled
--   memory_size              verified reviews of earlier iterations of the run's lineage; of other
--                            runs none, whatever its reviews may be shown
with reward as (
    select
        scorers.run_id,
        arg_max(scorers.scorer, scorers.iteration) as scorer,
        arg_max(scorers.scorer_version, scorers.iteration) as scorer_version
    from reward_scorers($as_of) as scorers
    group by scorers.run_id
),
asked as (
    select
        rollout.run_id,
        rollout.iteration,
        count(distinct rollout.prompt_id) filter (attempt.event_id is not null) as num_gated
    from rollouts($as_of) as rollout
    left join rollouts($as_of) as attempt
        on attempt.event_id = rollout.parent_id
        and attempt.run_id = rollout.run_id
    where rollout.role = 'review'
    group by rollout.run_id, rollout.iteration
),
begun as (
    select asked.run_id, min(asked.iteration) as first_iteration
    from asked
    group by asked.run_id
),
attempts as materialized (
    select
        rollout.run_id,
        rollout.iteration,
        rollout.prompt_id,
        score.value >= 0.999 as is_ok
    from rollouts($as_of) as rollout
    join begun on begun.run_id = rollout.run_id and begun.first_iteration <= rollout.iteration
    left join reward on reward.run_id = rollout.run_id
    left join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    where rollout.role = 'attempt' and rollout.status = 'ok'
),
attempted as (
    select
        attempt.run_id,
        attempt.iteration,
        count(distinct attempt.prompt_id) as num_attempted,
        count(distinct attempt.prompt_id) filter (where not attempt.is_ok) as num_failed_prompts
    from attempts as attempt
    group by attempt.run_id, attempt.iteration
),
notes as (
    select
        note.run_id,
        note.iteration,
        count(*) as num_reviews,
        count(*) filter (where note.status = 'ok') as num_ok,
        count(*) filter (where note.status = 'malformed') as num_malformed,
        count(*) filter (where note.status = 'empty') as num_empty,
        count(*) filter (where note.status = 'truncated') as num_truncated,
        count(*) filter (where note.status = 'parrot') as num_parrot,
        count(*) filter (where note.leak = 'answer') as leak_answer,
        count(*) filter (where note.leak = 'gold') as leak_gold,
        count(*) filter (where json_array_length(note.memory_json) > 0) as num_hits
    from reviews($as_of) as note
    join rollouts($as_of) as sampled
        on sampled.event_id = note.rollout_id
        and sampled.role = 'review'
    group by note.run_id, note.iteration
),
seconds as (
    select
        outcome.run_id,
        outcome.iteration,
        count(*) as num_second_attempts,
        avg(outcome.is_success::integer) as success_rate
    from review_outcomes($as_of) as outcome
    where outcome.arm = 'review'
    group by outcome.run_id, outcome.iteration
),
distilled as (
    select target.run_id, target.iteration, count(*) as num_distilled
    from distillations($as_of) as target
    group by target.run_id, target.iteration
),
taught as (
    select history.run_id, target.prompt_id, min(target.iteration) as iteration
    from distillations($as_of) as target
    join lineage($as_of) as history
        on history.source_run_id = target.run_id
        and target.iteration <= history.last_iteration
        and target._commit <= history.last_commit
    group by history.run_id, target.prompt_id
),
internalised as (
    select
        attempt.run_id,
        attempt.iteration,
        avg(attempt.is_ok::integer) as internalised_rate
    from attempts as attempt
    join taught
        on taught.run_id = attempt.run_id
        and taught.prompt_id = attempt.prompt_id
        and taught.iteration < attempt.iteration
    group by attempt.run_id, attempt.iteration
),
verified as (
    select history.run_id, entry.iteration, count(*) as num_verified
    from memory($as_of) as entry
    join lineage($as_of) as history
        on history.source_run_id = entry.run_id
        and entry.iteration <= history.last_iteration
    group by history.run_id, entry.iteration
),
sizes as (
    select
        attempted.run_id,
        attempted.iteration,
        sum(verified.num_verified)::bigint as memory_size
    from attempted
    join verified
        on verified.run_id = attempted.run_id
        and verified.iteration < attempted.iteration
    group by attempted.run_id, attempted.iteration
)
select
    attempted.run_id,
    attempted.iteration,
    attempted.num_attempted,
    attempted.num_failed_prompts,
    coalesce(asked.num_gated, 0) as num_gated,
    coalesce(asked.num_gated, 0) / attempted.num_attempted as trigger_rate,
    coalesce(notes.num_reviews, 0) as num_reviews,
    coalesce(notes.num_ok, 0) as num_ok,
    coalesce(notes.num_malformed, 0) as num_malformed,
    coalesce(notes.num_empty, 0) as num_empty,
    coalesce(notes.num_truncated, 0) as num_truncated,
    coalesce(notes.num_parrot, 0) as num_parrot,
    notes.num_malformed / notes.num_reviews as frac_malformed,
    coalesce(notes.leak_answer, 0) as leak_answer,
    coalesce(notes.leak_gold, 0) as leak_gold,
    (notes.leak_answer + notes.leak_gold) / notes.num_reviews as leak_rate,
    coalesce(seconds.num_second_attempts, 0) as num_second_attempts,
    seconds.success_rate,
    notes.num_hits / notes.num_reviews as hit_rate,
    coalesce(distilled.num_distilled, 0) as num_distilled,
    internalised.internalised_rate,
    coalesce(sizes.memory_size, 0) as memory_size
from attempted
left join asked
    on asked.run_id = attempted.run_id and asked.iteration = attempted.iteration
left join notes
    on notes.run_id = attempted.run_id and notes.iteration = attempted.iteration
left join seconds
    on seconds.run_id = attempted.run_id and seconds.iteration = attempted.iteration
left join distilled
    on distilled.run_id = attempted.run_id and distilled.iteration = attempted.iteration
left join internalised
    on internalised.run_id = attempted.run_id and internalised.iteration = attempted.iteration
left join sizes
    on sizes.run_id = attempted.run_id and sizes.iteration = attempted.iteration
order by attempted.run_id, attempted.iteration
