-- Question: what can a training run replay, and what is known about each entry?
-- Grain: one row per candidate of a run's own history: a state (equal states of a prompt count once:
--        the first), a trajectory (a complete success), a prompt with a scored attempt.
-- Parameters: $as_of, a commit number; $run, the only run wanted (null: every training run); $version,
--             the version of the scorer `value` that judges states (null: the run's newest healthy
--             value model; 'none', or where there is no such model: p_hat stands for V).
-- Columns: a run's own history is its `lineage`. Of states and of their judgements only those of its own
--          streams count, unless the version is another stream's; of rewards its own go before others,
--          so that judging from outside changes nothing for a run.
--          Responses of the imports that the run's `replay.imports` names, to prompts it tried itself,
--          are states and trajectories too, as old as the run; they are no attempts.
--          On-policy attempts are attempts and retries, a success is a reward of 0.999 or more, and
--          the reward is that of the run's newest reward scorer.
--   unit, entry_id           state (`states.event_id`), trajectory (`rollouts.event_id`) or prompt
--   entry_key                the same for a fork as for its original: prompt and hash of the given
--                            tokens, prompt and seed of the rollout, or the prompt
--   rollout_id, source_run_id  the rollout it comes from, and its run; of a prompt the newest attempt
--   prefix_tokens            given tokens of a state; 0 else
--   age                      policy versions published since it was sampled; 0 for a prompt
--   prompt_tries, prompt_ok  the prompt's last 16 on-policy attempts with a reward: all, successes
--   p_hat                    (prompt_ok + 0.5) / (prompt_tries + 2)
--   prompt_mean_reward       mean reward of these attempts
--   is_ever_solved           an on-policy attempt of the prompt succeeded once
--   state_tries, state_ok    of the state's last 16 scored continuations: all, successes
--   raw_value                V(s) of a state, NULL when not judged; value of other units
--   raw_prompt_value         V(x) of the prompt; p_hat where it was not judged
--   value                    (state_ok + 2 V(s)) / (state_tries + 2); reward of a trajectory; p_hat
--                            of a prompt
--   prompt_value             (prompt_ok + 2 V(x)) / (prompt_tries + 2); p_hat where V(x) is missing
--   score_id                 the judgement behind value: of a state, the reward of a trajectory
--   signature                of the rollout's completion
--   signature_count          successes of the prompt that share it; 1 where there are none
--   prompt_state_id, prompt_state_iteration  the state of the prompt alone, and the iteration that
--                            sampled the rollout it comes from
--   num_uses                 picks of it that came into a step, or that an iteration published
--                            without: their group taught nothing (dynamic sampling drops equal
--                            rewards; nobody could score it). A pick of an iteration that was
--                            not ended is none.
--   eligibility_reason       the first that applies: prompt_solved (p_hat of 0.75 or more),
--                            not_judged, not_rare (trajectory, p_hat above 0.25), no_logprobs
--                            (trajectory without stored tokens or their log-probs), unfit_import
--                            (imported trajectory whose log-probs no correction holds for: of
--                            another base model or of none that is named, greedy or of an unknown
--                            temperature, cut by top_p or top_k), cooldown (used
--                            in the newest iteration), retired (used 8 times since its last success
--                            and since its judgement; of a trajectory or prompt the success is any
--                            of the prompt's), mastered (state with a value of 0.75 or more by this
--                            value model and by the run's healthy one before it), eligible
-- Order: none, as it would take longer than the rest.
with own as materialized (
    select history.run_id, history.source_run_id, history.last_iteration, history.last_commit
    from lineage($as_of) as history
    where $run is null or history.run_id = $run
),
told as (  -- the imports that a run was told to go back to
    select distinct
        event.run_id,
        unnest(json_extract_string(event.config_json, '$.replay.imports[*]')) as source_run_id
    from runs($as_of) as event
    where event.run_id in (select own.run_id from own)
),
sources as materialized (
    select own.run_id, own.source_run_id, own.last_iteration, own.last_commit from own
    union all
    select told.run_id, told.source_run_id, 2147483647, 9223372036854775807
    from told
    where told.source_run_id in (
        select event.run_id from runs($as_of) as event where event.kind = 'import'
    )
),
bases as (
    select own.run_id, arg_min(policy.base_digest, policy.policy_version) as base_digest
    from policies($as_of) as policy
    join own on own.source_run_id = policy.run_id
    group by own.run_id
),
fit_imports as (  -- whose token ids are those of the run
    select told.run_id, told.source_run_id
    from told
    join bases on bases.run_id = told.run_id
    join imports($as_of) as part
        on part.run_id = told.source_run_id
        and part.base_digest = bases.base_digest
    group by told.run_id, told.source_run_id
),
fitted as (
    select
        source.run_id,
        model.scorer_version,
        model.verdict = 'healthy' as is_healthy,
        model._commit * 4294967296 + model._row as position
    from value_models($as_of) as model
    join sources as source
        on source.source_run_id = model.run_id
        and model.iteration <= source.last_iteration
        and model._commit <= source.last_commit
),
judges as (
    select
        training.run_id,
        case
            when $version = 'none' then null
            else coalesce(
                $version,
                arg_max(fitted.scorer_version, fitted.position) filter (where fitted.is_healthy)
            )
        end as value_version
    from (select distinct source.run_id from sources as source) as training
    left join fitted on fitted.run_id = training.run_id
    group by training.run_id
),
earlier_judges as (
    select judge.run_id, arg_max(fitted.scorer_version, fitted.position) as value_version
    from judges as judge
    join fitted as chosen
        on chosen.run_id = judge.run_id
        and chosen.scorer_version = judge.value_version
    join fitted
        on fitted.run_id = judge.run_id
        and fitted.is_healthy
        and fitted.position < chosen.position
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
        published.newest_policy_version,
        judge.value_version is not null
        and not exists (
            from fitted
            where
                fitted.run_id = judge.run_id
                and fitted.scorer_version = judge.value_version
        ) as is_open
    from begun
    join judges as judge on judge.run_id = begun.run_id
    left join earlier_judges as earlier on earlier.run_id = begun.run_id
    left join published on published.run_id = begun.run_id
),
wanted as (
    select asked.scorer, asked.scorer_version, true as is_open from asked
    union
    select 'value', asked.value_version, bool_or(asked.is_open)
    from asked
    where asked.value_version is not null
    group by asked.value_version
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
        (
            if(scored.run_id in (select source.source_run_id from sources as source), 0, 8589934592)
            + if(scored.status in ('ok', 'unscorable'), 2147483647, 4294967295) - scored.attempt
        )::hugeint * 18446744073709551616
        + scored._commit * 4294967296 + scored._row as rank
    from scores($as_of) as scored
    join wanted
        on wanted.scorer = scored.scorer
        and wanted.scorer_version = scored.scorer_version
    where wanted.is_open or scored.run_id in (select source.source_run_id from sources as source)
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
latest as materialized (  -- as `latest_scores` but own first, at a third of its time: few repeat
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
        asked.run_id,
        rollout.run_id as source_run_id,
        rollout.seed,
        rollout.iteration as sampled_iteration,
        rollout.role,
        rollout.prompt_id,
        rollout.parent_id,
        rollout.policy_version,
        rollout.prefix_tokens = 0 and (
            rollout.finish_reason = 'stop'
            or rollout.role = 'imported' and rollout.finish_reason = 'unknown'
        ) as is_complete,
        rollout.role <> 'imported' or (
            (source.run_id, rollout.run_id) in (
                select (fit.run_id, fit.source_run_id) from fit_imports as fit
            )
            and rollout.temperature > 0
            and (rollout.top_p <= 0 or rollout.top_p >= 1)
            and rollout.top_k <= 0
        ) as is_fit,
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
    join sources as source
        on source.source_run_id = rollout.run_id
        and rollout.iteration <= source.last_iteration
        and rollout._commit <= source.last_commit
    join asked on asked.run_id = source.run_id
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
        list_avg(arg_max(attempt.reward, attempt.position, 16)) as mean_reward,
        arg_max(attempt.rollout_id, attempt.position) as newest_rollout_id,
        arg_max(attempt.source_run_id, attempt.position) as newest_source_run_id,
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
        source.run_id,
        pick.unit,
        pick.entry_id,
        count(*)::integer as num_uses,
        max(pick.iteration) as last_used_iteration,
        max(pick._commit, 8)[8] as eighth_use_commit
    from picks($as_of) as pick
    join sources as source
        on source.source_run_id = pick.run_id
        and pick.iteration <= source.last_iteration
        and pick._commit <= source.last_commit
    where pick.event_id in (
        select replay.pick_id
        from replays($as_of) as replay
        join updates($as_of) as step
            on step.run_id = replay.run_id
            and step.iteration = replay.iteration
            and step.step = replay.step
            and step.batch_id = replay.batch_id
    )
    or (pick.run_id, pick.iteration) in (
        select (policy.run_id, policy.iteration) from policies($as_of) as policy
    )
    group by source.run_id, pick.unit, pick.entry_id
),
state_facts as materialized (  -- of the few states that have any: joined to states once
    select
        part.run_id,
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
            sampled.run_id,
            sampled.parent_id as state_id,
            least(count(*), 16)::integer as num_tries,
            list_sum(arg_max(sampled.is_ok::integer, sampled.position, 16))::integer as num_ok,
            max(sampled._commit) filter (where sampled.is_ok) as ok_commit
        from sampled
        where sampled.role = 'continuation' and sampled.reward is not null
        group by sampled.run_id, sampled.parent_id
        union all by name
        select
            asked.run_id,
            latest.target_id as state_id,
            arg_min_null(
                score.value,
                (
                    score.status not in ('ok', 'unscorable'),
                    -score.attempt,
                    score._commit,
                    score._row
                )
            ) as earlier_value
        from latest
        join asked on asked.value_version = latest.scorer_version
        join scores($as_of) as score
            on score.target_id = latest.target_id
            and score.scorer = 'value'
            and score.scorer_version = asked.earlier_version
        where latest.scorer = 'value'
        group by asked.run_id, latest.target_id
        union all by name
        select
            used.run_id,
            used.entry_id as state_id,
            used.num_uses,
            used.last_used_iteration,
            used.eighth_use_commit
        from uses as used
        where used.unit = 'state'
    ) as part
    group by part.run_id, part.state_id
),
cuts as not materialized (
    select
        state.event_id as state_id,
        asked.run_id,
        state.prompt_id,
        state.prefix_sha256,
        state.rollout_id,
        state.prefix_tokens,
        state._commit * 4294967296 + state._row as position,
        asked.value_version
    from states($as_of) as state
    join sources as source on source.source_run_id = state.source_run_id
    join asked on asked.run_id = source.run_id
    left join sources as cutter
        on cutter.run_id = source.run_id
        and cutter.source_run_id = state.run_id
        and state.iteration <= cutter.last_iteration
        and state._commit <= cutter.last_commit
    where asked.is_open or cutter.run_id is not null
),
equal_cuts as (
    select cut.run_id, cut.prompt_id, cut.prefix_sha256, min(cut.position) as position
    from cuts as cut
    where cut.prefix_tokens > 0
    group by cut.run_id, cut.prompt_id, cut.prefix_sha256
    having count(*) > 1
),
known_cuts as materialized (
    select
        cut.state_id,
        cut.run_id,
        cut.rollout_id,
        cut.prefix_tokens,
        cut.prefix_sha256,
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
    left join state_facts as known
        on known.state_id = cut.state_id
        and known.run_id = cut.run_id
    left join latest as score
        on score.target_id = cut.state_id
        and score.scorer = 'value'
        and score.scorer_version = cut.value_version
    left join equal_cuts as equal
        on equal.run_id = cut.run_id
        and equal.prompt_id = cut.prompt_id
        and equal.prefix_sha256 = cut.prefix_sha256
    where cut.prefix_tokens > 0
),
openings as (
    select
        cut.run_id,
        cut.prompt_id,
        arg_min(score.value, cut.position) as value,
        arg_min(cut.state_id, cut.position) as state_id,
        arg_min(sampled.sampled_iteration, cut.position) as sampled_iteration
    from cuts as cut
    join sampled on sampled.rollout_id = cut.rollout_id and sampled.run_id = cut.run_id
    left join latest as score
        on score.target_id = cut.state_id
        and score.scorer = 'value'
        and score.scorer_version = cut.value_version
    where cut.prefix_tokens = 0
    group by cut.run_id, cut.prompt_id
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
        tried.mean_reward as prompt_mean_reward,
        tried.newest_rollout_id,
        tried.newest_source_run_id,
        tried.ok_commit as prompt_ok_commit,
        opening.value as own_prompt_value,
        opening.state_id as prompt_state_id,
        opening.sampled_iteration as prompt_state_iteration,
        asked.value_version is not null as has_model,
        asked.newest_iteration,
        asked.newest_policy_version
    from (select distinct sampled.run_id, sampled.prompt_id from sampled) as seen
    join asked on asked.run_id = seen.run_id
    left join tried on tried.run_id = seen.run_id and tried.prompt_id = seen.prompt_id
    left join openings as opening
        on opening.run_id = seen.run_id
        and opening.prompt_id = seen.prompt_id
    left join (
        select source.run_id, prompt.prompt_id, any_value(prompt.difficulty) as difficulty
        from prompts($as_of) as prompt
        join sources as source on source.source_run_id = prompt.run_id
        group by source.run_id, prompt.prompt_id
    ) as prompt
        on prompt.run_id = seen.run_id
        and prompt.prompt_id = seen.prompt_id
),
rollout_facts as materialized (  -- rollouts with what is known of their prompt: joined to states once
    select
        fact.*,
        sampled.rollout_id,
        sampled.source_run_id,
        sampled.seed,
        sampled.sampled_iteration,
        sampled.policy_version,
        sampled.signature,
        sampled.role = 'imported' as is_imported,
        sampled.is_fit,
        coalesce(solution.num_same, 1) as signature_count
    from sampled
    join prompt_facts as fact
        on fact.run_id = sampled.run_id
        and fact.prompt_id = sampled.prompt_id
    left join solutions as solution
        on solution.run_id = sampled.run_id
        and solution.prompt_id = sampled.prompt_id
        and solution.signature = sampled.signature
    where sampled.role <> 'imported' or fact.prompt_tries > 0
),
successes as (
    select sampled.*
    from sampled
    where sampled.role in ('attempt', 'retry', 'imported') and sampled.is_ok and sampled.is_complete
),
candidates as (
    select
        source.*,
        'state' as unit,
        cut.state_id as entry_id,
        cut.prefix_tokens,
        cut.prefix_sha256,
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
    join rollout_facts as source
        on source.rollout_id = cut.rollout_id
        and source.run_id = cut.run_id
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
    from successes as attempt
    join rollout_facts as source
        on source.rollout_id = attempt.rollout_id
        and source.run_id = attempt.run_id
    left join uses as used
        on used.run_id = attempt.run_id
        and used.unit = 'trajectory'
        and used.entry_id = attempt.rollout_id
    union all by name
    select
        fact.*,
        'prompt' as unit,
        fact.prompt_id as entry_id,
        fact.newest_rollout_id as rollout_id,
        fact.newest_source_run_id as source_run_id,
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
        case candidate.unit
            when 'state' then candidate.prompt_id || ':' || candidate.prefix_sha256
            when 'trajectory'
                then candidate.prompt_id || ':'
                    || if(candidate.is_imported, candidate.rollout_id, candidate.seed::varchar)
            else candidate.prompt_id
        end as entry_key,
        coalesce(
            candidate.newest_policy_version
            - if(coalesce(candidate.is_imported, false), 0, candidate.policy_version),
            0
        ) as age,
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
    estimate.entry_key,
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
    estimate.prompt_mean_reward,
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
    estimate.prompt_state_id,
    estimate.prompt_state_iteration,
    coalesce(estimate.num_uses, 0) as num_uses,
    estimate.last_used_iteration,
    case
        when estimate.p_hat >= 0.75 then 'prompt_solved'
        when estimate.raw_value is null then 'not_judged'
        when estimate.unit = 'trajectory' and estimate.p_hat > 0.25 then 'not_rare'
        when not estimate.has_logprobs then 'no_logprobs'
        when estimate.unit = 'trajectory' and not estimate.is_fit then 'unfit_import'
        when estimate.last_used_iteration = estimate.newest_iteration then 'cooldown'
        when estimate.eighth_use_commit > estimate.renewed_commit then 'retired'
        when estimate.value >= 0.75 and estimate.earlier_estimate >= 0.75 then 'mastered'
        else 'eligible'
    end as eligibility_reason
from estimates as estimate
