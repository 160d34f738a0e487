-- Question: how varied are a run's attempts at a prompt, iteration by iteration?
-- Grain: one row per run, iteration and prompt with at least one attempt that was sampled.
-- Parameters: $as_of, a commit number.
-- Columns: num_attempts, num_texts (different completions),
--          distinct_2 (different pairs of neighbouring words over all pairs, of all attempts; NULL
--          where no attempt has two words), self_similarity (mean over the pairs of attempts of the
--          share of words they have in common, 1 = the same words, 0 where both have none; NULL for
--          one attempt),
--          num_ok (reward of 0.999 or more), num_solutions (different signatures among those).
--          Words stand between white space; capitals do not matter. What grows with the number of
--          attempts is to be compared between equal numbers.
with attempts as (
    select
        attempt.run_id,
        attempt.iteration,
        attempt.prompt_id,
        attempt.event_id,
        hash(attempt.completion) as text_hash,
        list_filter(
            string_split_regex(lower(attempt.completion), '\s+'), lambda word : word <> ''
        ) as words
    from rollouts($as_of) as attempt
    where attempt.role = 'attempt' and attempt.status = 'ok'
),
vocabularies as (
    select
        attempts.run_id,
        attempts.iteration,
        attempts.prompt_id,
        attempts.event_id,
        list_distinct(attempts.words) as words
    from attempts
),
pairs as (
    select
        one.run_id,
        one.iteration,
        one.prompt_id,
        one.event_id as one_id,
        other.event_id as other_id,
        len(list_intersect(one.words, other.words)) as num_shared,
        len(one.words) + len(other.words) as num_both
    from vocabularies as one
    join vocabularies as other
        on other.run_id = one.run_id
        and other.iteration = one.iteration
        and other.prompt_id = one.prompt_id
        and other.event_id > one.event_id
),
similarities as (
    select
        pairs.run_id,
        pairs.iteration,
        pairs.prompt_id,
        avg(
            coalesce(pairs.num_shared / nullif(pairs.num_both - pairs.num_shared, 0), 0)
            order by pairs.one_id, pairs.other_id
        ) as self_similarity
    from pairs
    group by pairs.run_id, pairs.iteration, pairs.prompt_id
),
neighbours as (
    select
        attempts.run_id,
        attempts.iteration,
        attempts.prompt_id,
        unnest(
            list_transform(
                range(1, len(attempts.words)),
                lambda place : attempts.words[place] || ' ' || attempts.words[place + 1]
            )
        ) as two_words
    from attempts
),
bigrams as (
    select
        neighbours.run_id,
        neighbours.iteration,
        neighbours.prompt_id,
        count(distinct neighbours.two_words) / count(*) as distinct_2
    from neighbours
    group by neighbours.run_id, neighbours.iteration, neighbours.prompt_id
),
counted as (
    select
        attempts.run_id,
        attempts.iteration,
        attempts.prompt_id,
        count(*) as num_attempts,
        count(distinct attempts.text_hash) as num_texts,
        count(*) filter (where score.value >= 0.999) as num_ok,
        count(distinct score.signature) filter (where score.value >= 0.999) as num_solutions
    from attempts
    left join reward_scorers($as_of) as reward
        on reward.run_id = attempts.run_id
        and reward.iteration = attempts.iteration
    left join latest_scores($as_of) as score
        on score.target_id = attempts.event_id
        and score.scorer = reward.scorer
        and score.scorer_version = reward.scorer_version
    group by attempts.run_id, attempts.iteration, attempts.prompt_id
)
select
    counted.run_id,
    counted.iteration,
    counted.prompt_id,
    counted.num_attempts,
    counted.num_texts,
    bigrams.distinct_2,
    similarities.self_similarity,
    counted.num_ok,
    counted.num_solutions
from counted
left join bigrams
    on bigrams.run_id = counted.run_id
    and bigrams.iteration = counted.iteration
    and bigrams.prompt_id = counted.prompt_id
left join similarities
    on similarities.run_id = counted.run_id
    and similarities.iteration = counted.iteration
    and similarities.prompt_id = counted.prompt_id
order by counted.run_id, counted.iteration, counted.prompt_id
