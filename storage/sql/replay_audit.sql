-- Question: what was each optimizer step given to learn from, and did it learn from it?
-- Grain: one row per planned sample of a step.
-- Parameters: $as_of, a commit number.
-- Columns: state (learned when the step of this batch was taken, else planned), rollout_id (that of
--          `replays`: of a distilled second attempt it is the `distillations.event_id`),
--          distilled_rollout_id (the second attempt; NULL for others), policy_version (the one that
--          sampled the rollout), age (policy versions since), reward and scorer_version (those it was
--          chosen under), advantage, weight (of its term in the loss; NULL stands for 1),
--          prefix_tokens and prefix_advantage (of the given tokens of a response), pick_id and pick_*
--          (the pick that brought it, what it was picked by, and the judgement behind its value; NULL
--          for fresh samples),
--          importance_mean and ratio_mean (weights in the loss; NULL unless learned).
select
    planned.run_id,
    planned.iteration,
    planned.step,
    planned.position,
    case when step.event_id is null then 'planned' else 'learned' end as state,
    planned.rollout_id,
    distilled.rollout_id as distilled_rollout_id,
    planned.group_id,
    rollout.prompt_id,
    rollout.role,
    planned.source_run_id,
    rollout.policy_version,
    planned.age,
    planned.score_id,
    planned.reward,
    score.scorer,
    score.scorer_version,
    planned.unit,
    planned.pick_kind,
    planned.priority,
    planned.probability,
    planned.advantage,
    planned.weight,
    planned.prefix_tokens,
    planned.prefix_advantage,
    planned.pick_id,
    pick.value as pick_value,
    pick.prompt_value as pick_prompt_value,
    pick.base as pick_base,
    pick.probability as pick_probability,
    pick.score_id as pick_score_id,
    pick.scorer_version as pick_scorer_version,
    sample.num_loss_tokens,
    sample.importance_mean,
    sample.ratio_mean,
    sample.frac_clipped,
    sample.frac_truncated
from replays($as_of) as planned
left join updates($as_of) as step
    on step.run_id = planned.run_id
    and step.iteration = planned.iteration
    and step.step = planned.step
    and step.batch_id = planned.batch_id
    and not step.is_skipped
left join learned_samples($as_of) as sample
    on sample.run_id = planned.run_id
    and sample.iteration = planned.iteration
    and sample.step = planned.step
    and sample.rollout_id = planned.rollout_id
    and step.event_id is not null
left join distillations($as_of) as distilled on distilled.event_id = planned.rollout_id
left join rollouts($as_of) as rollout
    on rollout.event_id = coalesce(distilled.rollout_id, planned.rollout_id)
left join scores($as_of) as score on score.event_id = planned.score_id
left join picks($as_of) as pick on pick.event_id = planned.pick_id
order by
    planned.run_id, planned.iteration, planned.step, planned.position, planned.rollout_id
