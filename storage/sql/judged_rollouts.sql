-- Question: which rollouts of the whole history could be learned from, and what is known of each?
-- Grain: one row per rollout that holds a completion.
-- Parameters: $as_of, a commit number; $scorer and $scorer_version, whose value is the reward (null:
--             the newest reward scorer of the run that sampled it).
-- Columns:
--   split, task              of its prompt
--   base_digest              base model of the run that sampled it, or that its importer was told;
--                            NULL for runs without a policy
--   num_prompt_ids, num_completion_ids  stored token ids; 0 where there are none (text alone)
--   num_logprobs             stored sampler log-probs; NULL where there are none
--   score_id, reward         its newest judgement; score_id is NULL when it was not judged, reward
--                            also when the judgement has no value
--   prompt_tries, prompt_ok  of the prompt's last 16 attempts and retries, of all runs, with a reward
--                            by this scorer version: all, successes (0.999 or more)
--   p_hat                    (prompt_ok + 0.5) / (prompt_tries + 2)
with newest as (
    select
        pin.run_id,
        arg_max(pin.scorer, pin.iteration) as scorer,
        arg_max(pin.scorer_version, pin.iteration) as scorer_version
    from reward_scorers($as_of) as pin
    group by pin.run_id
),
judged as materialized (
    select
        rollout.event_id as rollout_id,
        rollout.run_id,
        rollout.iteration,
        rollout.role,
        rollout.prompt_id,
        rollout.group_id,
        rollout.policy_version,
        rollout.prefix_tokens,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.finish_reason,
        rollout._commit * 4294967296 + rollout._row as position,
        coalesce($scorer, newest.scorer) as scorer,
        coalesce($scorer_version, newest.scorer_version) as scorer_version,
        score.score_id,
        score.value as reward
    from rollouts($as_of) as rollout
    left join newest on newest.run_id = rollout.run_id
    left join latest_scores($as_of) as score
        on score.target_id = rollout.event_id
        and score.scorer = coalesce($scorer, newest.scorer)
        and score.scorer_version = coalesce($scorer_version, newest.scorer_version)
    where rollout.status = 'ok'
),
tried as (
    select
        attempt.prompt_id,
        attempt.scorer,
        attempt.scorer_version,
        least(count(*), 16)::integer as num_tries,
        list_sum(arg_max((attempt.reward >= 0.999)::integer, attempt.position, 16))::integer
            as num_ok
    from judged as attempt
    where attempt.role in ('attempt', 'retry') and attempt.reward is not null
    group by attempt.prompt_id, attempt.scorer, attempt.scorer_version
),
asked as (
    select
        prompt.run_id,
        prompt.prompt_id,
        any_value(prompt.split) as split,
        any_value(prompt.task) as task
    from prompts($as_of) as prompt
    group by prompt.run_id, prompt.prompt_id
),
bases as (
    select policy.run_id, arg_min(policy.base_digest, policy.policy_version) as base_digest
    from policies($as_of) as policy
    group by policy.run_id
    union all
    select part.run_id, any_value(part.base_digest) as base_digest
    from imports($as_of) as part
    where part.base_digest is not null
    group by part.run_id
),
stored as (
    select
        tokens.rollout_id,
        any_value(len(tokens.prompt_ids)) as num_prompt_ids,
        any_value(len(tokens.completion_ids)) as num_completion_ids,
        any_value(len(tokens.sampler_logprobs)) as num_logprobs
    from rollout_tokens($as_of) as tokens
    group by tokens.rollout_id
)
select
    judged.rollout_id,
    judged.run_id,
    judged.iteration,
    judged.role,
    judged.prompt_id,
    asked.split,
    asked.task,
    judged.group_id,
    judged.policy_version,
    bases.base_digest,
    judged.prefix_tokens,
    judged.temperature,
    judged.top_p,
    judged.top_k,
    judged.finish_reason,
    coalesce(stored.num_prompt_ids, 0) as num_prompt_ids,
    coalesce(stored.num_completion_ids, 0) as num_completion_ids,
    stored.num_logprobs,
    judged.scorer,
    judged.scorer_version,
    judged.score_id,
    judged.reward,
    coalesce(tried.num_tries, 0) as prompt_tries,
    coalesce(tried.num_ok, 0) as prompt_ok,
    (coalesce(tried.num_ok, 0) + 0.5) / (coalesce(tried.num_tries, 0) + 2) as p_hat
from judged
left join asked on asked.run_id = judged.run_id and asked.prompt_id = judged.prompt_id
left join bases on bases.run_id = judged.run_id
left join stored on stored.rollout_id = judged.rollout_id
left join tried
    on tried.prompt_id = judged.prompt_id
    and tried.scorer = judged.scorer
    and tried.scorer_version = judged.scorer_version
order by judged.rollout_id
