-- Question: what came of each review, and what of the answers it is compared with?
-- Grain: one row per second attempt and per answer of a control arm that holds a completion.
-- Parameters: $as_of, a commit number.
-- Columns:
--   attempt_id               the failed attempt that was reviewed, or answered once more
--   arm                      review for a second attempt; retry, no_memory, blank, raw_feedback or
--                            random_review for a control
--   rollout_id               the answer
--   review_id                the review that was sampled for it; NULL for the controls but no_memory
--   review_status, leak      of that review, as in `reviews`
--   num_memory               earlier reviews that it was shown
--   reward, is_success       by the run's newest reward scorer (a success is 0.999 or more); NULL
--                            where there is none
--   num_tokens, num_review_tokens  tokens sampled for the answer, and for its review
--   is_distilled             it was planned as a target for its prompt alone
--   policy_version           that of the answer
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
        rollout.event_id as review_id,
        rollout.parent_id as attempt_id,
        rollout.num_completion_tokens as num_tokens
    from rollouts($as_of) as rollout
    where rollout.role = 'review' or rollout.arm = 'no_memory_review'
)
select
    answer.run_id,
    answer.iteration,
    answer.prompt_id,
    coalesce(asked.attempt_id, answer.parent_id) as attempt_id,
    if(answer.role = 'second_attempt', 'review', answer.arm) as arm,
    answer.event_id as rollout_id,
    asked.review_id,
    note.status as review_status,
    note.leak,
    json_array_length(note.memory_json)::integer as num_memory,
    score.value as reward,
    score.value >= 0.999 as is_success,
    answer.num_completion_tokens as num_tokens,
    asked.num_tokens as num_review_tokens,
    answer.event_id in (
        select distilled.rollout_id from distillations($as_of) as distilled
    ) as is_distilled,
    answer.policy_version
from rollouts($as_of) as answer
left join reward on reward.run_id = answer.run_id
left join latest_scores($as_of) as score
    on score.target_id = answer.event_id
    and score.scorer = reward.scorer
    and score.scorer_version = reward.scorer_version
left join asked on asked.review_id = answer.parent_id
left join reviews($as_of) as note on note.rollout_id = asked.review_id
where
    answer.status = 'ok'
    and (
        answer.role = 'second_attempt'
        or (answer.role = 'control' and answer.arm <> 'no_memory_review')
    )
order by answer.run_id, answer.iteration, answer.prompt_id, arm, answer.event_id
