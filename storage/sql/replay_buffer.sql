-- Question: what can a training run replay, and what is known about each entry?
-- Grain: one row per candidate of a run's own history: a state (equal states of a prompt count once:
--        the first), a trajectory (a complete success), a prompt with a scored attempt.
-- Parameters: $as_of, a commit number; $run, the only run wanted (null: every training run); $version,
--             the version of the scorer `value` that judges states (null: the run's newest healthy
--             value model; 'none', or where there is no such model: p_hat stands for V).
-- Columns:
--   On-policy attempts are attempts and retries; a success is a reward of 0.999 or more; the reward is
--   that of the run's newest reward scorer, whoever gave it.
--   unit, entry_id           state (`states.event_id`), trajectory (`rollouts.event_id`) or prompt
--   rollout_id, source_run_id  where it comes from; NULL for a prompt
--   prefix_tokens            given tokens of a state; 0 else
--   age                      policy versions published since it was sampled; 0 for a prompt
--   prompt_tries, prompt_ok  the prompt's last 16 on-policy attempts with a reward: all, successes
--   p_hat                    (prompt_ok + 0.5) / (prompt_tries + 2)
--   is_ever_solved           any on-policy attempt of the prompt was a success
--   state_tries, state_ok    the state's last 16 continuations with a reward: all, successes
--   raw_value                V(s) of a state, NULL when it is not judged; else as value
--   raw_prompt_value         V(x) of the prompt; p_hat where it is not judged
--   value                    (state_ok + 2 V(s)) / (state_tries + 2) of a state, the reward of a
--                            trajectory, p_hat of a prompt
--   prompt_value             (prompt_ok + 2 V(x)) / (prompt_tries + 2); p_hat where x is not judged
--   score_id                 the judgement behind raw_value, with its scorer and scorer_version
--   signature                of the rollout's completion
--   signature_count          successes of the prompt that share it; 1 where there are none
--   num_uses                 picks of it that came into an update
--   eligibility_reason       the first that applies: prompt_solved (p_hat of 0.75 or more),
--                            not_judged, not_rare (trajectory, p_hat above 0.25), no_logprobs
--                            (trajectory without stored tokens or their log-probs), cooldown (used
--                            in the newest iteration), retired (used 8 times since its last success
--                            and since its judgement; of a trajectory or prompt the success is any
--                            of the prompt's), mastered (state with a value of 0.75 or more by this
--                            value model and by the run's healthy one before it), eligible
-- Order: none, as it would take longer than the rest.
with training as (
    select event.run_id
    from runs($as_of) as event
    where $run is null or event.run_id = $run
    group by event.run_id
    having coalesce(arg_max(event.kind, event.run_epoch), 'train') = 'train'
),
models as (
    select
        model.run_id,
        model.scorer_version,
        model._commit * 4294967296 + model._row as position
    from value_models($as_of) as model
    where model.verdict = 'healthy'
),
judges as (
    select
        training.run_id,
        case
            when $version = 'none' then null
            else coalesce($version, arg_max(model.scorer_version, model.position))
        end as value_version
    from training
    left join models as model on model.run_id = training.run_id
    group by training.run_id
),
earlier_judges as (
    select judge.run_id, arg_max(model.scorer_version, model.position) as value_version
    from judges as judge
    join value_models($as_of) as chosen on chosen.scorer_version = judge.value_version
    join models as model
        on model.run_id = judge.run_id
        and model.position < chosen._commit * 4294967296 + chosen._row
    group by judge.run_id
),
published as (
    select policy.run_id, max(policy.policy_version) as newest_policy_version
    from policies($as_of) as policy
    group by policy.run_id
),
begun as (
    select
        pin.run_id,
        max(pin.iteration) as newest_iteration,
        arg_max(pin.scorer, pin.iteration) as scorer,
        arg_max(pin.scorer_version, pin.iteration) as scorer_version
    from reward_scorers($as_of) as pin
    group by pin.run_id
),
asked as (  -- the runs with all that is asked about them
    select
        begun.run_id,
        begun.newest_iteration,
        begun.scorer,
        begun.scorer_version,
        judge.value_version,
        earlier.value_version as earlier_version,
        published.newest_policy_version
    from begun
    join judges as judge on judge.run_id = begun.run_id
    left join earlier_judges as earlier on earlier.run_id = begun.run_id
    left join published on published.run_id = begun.run_id
),
wanted as (
    select asked.scorer, asked.scorer_version from asked
    union
    select 'value', asked.value_version from asked where asked.value_version is not null
),
judgements as (
    select
        scored.event_id as score_id,
        scored.target_id,
        scored.scorer,
        scored.scorer_version,
        scored.value,
        scored.signature,
        scored._commit,
        (2147483647 - scored.attempt)::hugeint * 18446744073709551616
        + scored._commit * 4294967296 + scored._row as rank
    from scores($as_of) as scored
    join wanted
        on wanted.scorer = scored.scorer
        and wanted.scorer_version = scored.scorer_version
),
repeated as (
    select
        judgement.target_id,
        judgement.scorer,
        judgement.scorer_version,
        min(judgement.rank) as rank
    from judgements as judgement
    group by judgement.target_id, judgement.scorer, judgement.scorer_version
    having count(*) > 1
),
latest as materialized (  -- as `latest_scores`, at a third of its time: few targets are repeated
    select judgement.*
    from judgements as judgement
    left join repeated
        on repeated.target_id = judgement.target_id
        and repeated.scorer = judgement.scorer
        and repeated.scorer_version = judgement.scorer_version
    where repeated.rank is null or repeated.rank = judgement.rank
),
sampled as materialized (
    select
        rollout.event_id as rollout_id,
        rollout.run_id,
        rollout.iteration as sampled_iteration,
        rollout.role,
        rollout.prompt_id,
        rollout.parent_id,
        rollout.policy_version,
        rollout.finish_reason = 'stop' and rollout.prefix_tokens = 0 as is_complete,
        rollout._commit,
        rollout._commit * 4294967296 + rollout._row as position,
        score.score_id,
        score.scorer,
        score.scorer_version,
        score._commit as judged_commit,
        score.value as reward,
        score.value >= 0.999 as is_ok,
        score.signature
    from rollouts($as_of) as rollout
    join asked on asked.run_id = rollout.run_id
    left join latest as score
        on score.target_id = rollout.event_id
        and score.scorer = asked.scorer
        and score.scorer_version = asked.scorer_version
),
attempts as materialized (
    select sampled.*
    from sampled
    where sampled.role in ('attempt', 'retry') and sampled.reward is not null
),
tried as (
    select
        attempt.run_id,
        attempt.prompt_id,
        least(count(*), 16)::integer as num_tries,
        list_sum(arg_max(attempt.is_ok::integer, attempt.position, 16))::integer as num_ok,
        bool_or(attempt.is_ok) as is_ever_solved,
        max(attempt._commit) filter (where attempt.is_ok) as ok_commit
    from attempts as attempt
    group by attempt.run_id, attempt.prompt_id
),
solutions as (
    select attempt.run_id, attempt.prompt_id, attempt.signature, count(*)::integer as num_same
    from attempts as attempt
    where attempt.is_ok and attempt.signature is not null
    group by attempt.run_id, attempt.prompt_id, attempt.signature
),
uses as (
    select
        pick.run_id,
        pick.unit,
        pick.entry_id,
        count(*)::integer as num_uses,
        max(pick.iteration) as last_used_iteration,
        max(pick._commit, 8)[8] as eighth_use_commit
    from picks($as_of) as pick
    where pick.event_id in (
        select replay.pick_id
        from replays($as_of) as replay
        join updates($as_of) as step
            on step.run_id = replay.run_id
            and step.iteration = replay.iteration
            and step.step = replay.step
            and step.batch_id = replay.batch_id
    )
    group by pick.run_id, pick.unit, pick.entry_id
),
state_facts as materialized (  -- of the few states that have any: joined to states once
    select
        part.state_id,
        max(part.num_tries) as state_tries,
        max(part.num_ok) as state_ok,
        max(part.ok_commit) as ok_commit,
        max(part.earlier_value) as earlier_value,
        max(part.num_uses) as num_uses,
        max(part.last_used_iteration) as last_used_iteration,
        max(part.eighth_use_commit) as eighth_use_commit
    from (
        select
            sampled.parent_id as state_id,
            least(count(*), 16)::integer as num_tries,
            list_sum(arg_max(sampled.is_ok::integer, sampled.position, 16))::integer as num_ok,
            max(sampled._commit) filter (where sampled.is_ok) as ok_commit
        from sampled
        where sampled.role = 'continuation' and sampled.reward is not null
        group by sampled.parent_id
        union all by name
        select
            latest.target_id as state_id,
            arg_max_null(
                score.value, (score.attempt, -score._commit, -score._row)
            ) as earlier_value
        from latest
        join asked on asked.value_version = latest.scorer_version
        join scores($as_of) as score
            on score.target_id = latest.target_id
            and score.scorer = 'value'
            and score.scorer_version = asked.earlier_version
        where latest.scorer = 'value'
        group by latest.target_id
        union all by name
        select
            used.entry_id as state_id,
            used.num_uses,
            used.last_used_iteration,
            used.eighth_use_commit
        from uses as used
        where used.unit = 'state'
    ) as part
    group by part.state_id
),
cuts as not materialized (
    select
        state.event_id as state_id,
        state.source_run_id,
        state.prompt_id,
        state.prefix_sha256,
        state.rollout_id,
        state.prefix_tokens,
        state._commit * 4294967296 + state._row as position,
        asked.value_version
    from states($as_of) as state
    join asked on asked.run_id = state.source_run_id
    where state.prefix_tokens > 0
),
equal_cuts as (
    select cut.source_run_id, cut.prompt_id, cut.prefix_sha256, min(cut.position) as position
    from cuts as cut
    group by cut.source_run_id, cut.prompt_id, cut.prefix_sha256
    having count(*) > 1
),
known_cuts as materialized (
    select
        cut.state_id,
        cut.rollout_id,
        cut.prefix_tokens,
        score.score_id,
        score.scorer,
        score.scorer_version,
        score._commit as judged_commit,
        score.value as own_value,
        known.state_tries,
        known.state_ok,
        known.ok_commit,
        known.earlier_value,
        known.num_uses,
        known.last_used_iteration,
        known.eighth_use_commit,
        coalesce(equal.position, cut.position) = cut.position as is_first
    from cuts as cut
    left join state_facts as known on known.state_id = cut.state_id
    left join latest as score
        on score.target_id = cut.state_id
        and score.scorer = 'value'
        and score.scorer_version = cut.value_version
    left join equal_cuts as equal
        on equal.source_run_id = cut.source_run_id
        and equal.prompt_id = cut.prompt_id
        and equal.prefix_sha256 = cut.prefix_sha256
),
openings as (
    select
        state.source_run_id,
        state.prompt_id,
        arg_min(score.value, state._commit * 4294967296 + state._row) as value
    from states($as_of) as state
    join asked on asked.run_id = state.source_run_id
    join latest as score
        on score.target_id = state.event_id
        and score.scorer = 'value'
        and score.scorer_version = asked.value_version
    where state.prefix_tokens = 0
    group by state.source_run_id, state.prompt_id
),
prompt_facts as materialized (
    select
        seen.run_id,
        seen.prompt_id,
        prompt.difficulty,
        coalesce(tried.num_tries, 0) as prompt_tries,
        coalesce(tried.num_ok, 0) as prompt_ok,
        (coalesce(tried.num_ok, 0) + 0.5) / (coalesce(tried.num_tries, 0) + 2) as p_hat,
        coalesce(tried.is_ever_solved, false) as is_ever_solved,
        tried.ok_commit as prompt_ok_commit,
        opening.value as own_prompt_value,
        asked.value_version is not null as has_model,
        asked.newest_iteration,
        asked.newest_policy_version
    from (select distinct sampled.run_id, sampled.prompt_id from sampled) as seen
    join asked on asked.run_id = seen.run_id
    left join tried on tried.run_id = seen.run_id and tried.prompt_id = seen.prompt_id
    left join openings as opening
        on opening.source_run_id = seen.run_id
        and opening.prompt_id = seen.prompt_id
    left join prompts($as_of) as prompt
        on prompt.run_id = seen.run_id
        and prompt.prompt_id = seen.prompt_id
),
sources as materialized (  -- rollouts with what is known of their prompt: joined to states once
    select
        fact.*,
        sampled.rollout_id,
        sampled.sampled_iteration,
        sampled.policy_version,
        sampled.signature,
        coalesce(solution.num_same, 1) as signature_count
    from sampled
    join prompt_facts as fact
        on fact.run_id = sampled.run_id
        and fact.prompt_id = sampled.prompt_id
    left join solutions as solution
        on solution.run_id = sampled.run_id
        and solution.prompt_id = sampled.prompt_id
        and solution.signature = sampled.signature
),
candidates as (
    select
        source.*,
        'state' as unit,
        cut.state_id as entry_id,
        cut.prefix_tokens,
        cut.score_id,
        cut.scorer,
        cut.scorer_version,
        cut.judged_commit,
        cut.own_value,
        coalesce(cut.state_tries, 0) as state_tries,
        coalesce(cut.state_ok, 0) as state_ok,
        cut.ok_commit,
        cut.earlier_value,
        cut.num_uses,
        cut.last_used_iteration,
        cut.eighth_use_commit,
        true as has_logprobs
    from known_cuts as cut
    join sources as source on source.rollout_id = cut.rollout_id
    where cut.is_first
    union all by name
    select
        source.*,
        'trajectory' as unit,
        attempt.rollout_id as entry_id,
        0 as prefix_tokens,
        attempt.score_id,
        attempt.scorer,
        attempt.scorer_version,
        attempt.judged_commit,
        attempt.reward as own_value,
        0 as state_tries,
        0 as state_ok,
        source.prompt_ok_commit as ok_commit,
        used.num_uses,
        used.last_used_iteration,
        used.eighth_use_commit,
        attempt.rollout_id in (
            select token.rollout_id
            from rollout_tokens($as_of) as token
            where token.logprobs_reason is null
        ) as has_logprobs
    from attempts as attempt
    join sources as source on source.rollout_id = attempt.rollout_id
    left join uses as used
        on used.run_id = attempt.run_id
        and used.unit = 'trajectory'
        and used.entry_id = attempt.rollout_id
    where attempt.is_ok and attempt.is_complete
    union all by name
    select
        fact.*,
        'prompt' as unit,
        fact.prompt_id as entry_id,
        0 as prefix_tokens,
        fact.p_hat as own_value,
        0 as state_tries,
        0 as state_ok,
        fact.prompt_ok_commit as ok_commit,
        1 as signature_count,
        used.num_uses,
        used.last_used_iteration,
        used.eighth_use_commit,
        true as has_logprobs
    from prompt_facts as fact
    left join uses as used
        on used.run_id = fact.run_id
        and used.unit = 'prompt'
        and used.entry_id = fact.prompt_id
    where fact.prompt_tries > 0
),
estimates as (
    select
        candidate.*,
        if(candidate.unit = 'prompt', null, candidate.run_id) as source_run_id,
        coalesce(candidate.newest_policy_version - candidate.policy_version, 0) as age,
        if(
            candidate.unit = 'state' and not candidate.has_model,
            candidate.p_hat,
            candidate.own_value
        ) as raw_value,
        coalesce(candidate.own_prompt_value, candidate.p_hat) as raw_prompt_value,
        if(
            candidate.unit = 'state',
            (candidate.state_ok + 2 * raw_value) / (candidate.state_tries + 2),
            raw_value
        ) as value,
        if(
            candidate.own_prompt_value is null,
            candidate.p_hat,
            (candidate.prompt_ok + 2 * candidate.own_prompt_value) / (candidate.prompt_tries + 2)
        ) as prompt_value,
        (candidate.state_ok + 2 * candidate.earlier_value)
        / (candidate.state_tries + 2) as earlier_estimate,
        greatest(candidate.ok_commit, candidate.judged_commit, 0) as renewed_commit
    from candidates as candidate
)
select
    estimate.run_id,
    estimate.unit,
    estimate.entry_id,
    estimate.prompt_id,
    estimate.difficulty,
    estimate.rollout_id,
    estimate.source_run_id,
    estimate.prefix_tokens,
    estimate.sampled_iteration,
    estimate.policy_version,
    estimate.age,
    estimate.prompt_tries,
    estimate.prompt_ok,
    estimate.p_hat,
    estimate.is_ever_solved,
    estimate.state_tries,
    estimate.state_ok,
    estimate.raw_value,
    estimate.raw_prompt_value,
    estimate.value,
    estimate.prompt_value,
    estimate.score_id,
    estimate.scorer,
    estimate.scorer_version,
    estimate.signature,
    estimate.signature_count,
    coalesce(estimate.num_uses, 0) as num_uses,
    estimate.last_used_iteration,
    case
        when estimate.p_hat >= 0.75 then 'prompt_solved'
        when estimate.raw_value is null then 'not_judged'
        when estimate.unit = 'trajectory' and estimate.p_hat > 0.25 then 'not_rare'
        when not estimate.has_logprobs then 'no_logprobs'
        when estimate.last_used_iteration = estimate.newest_iteration then 'cooldown'
        when estimate.eighth_use_commit > estimate.renewed_commit then 'retired'
        when estimate.value >= 0.75 and estimate.earlier_estimate >= 0.75 then 'mastered'
        else 'eligible'
    end as eligibility_reason
from estimates as estimate
