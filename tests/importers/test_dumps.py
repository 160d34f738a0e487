"""Real files of other frameworks. What is expected was read off the files by eye, wc and grep."""

import json
from pathlib import Path

import pytest

import storage
from storage.importers.formats import ImporterError
from tests.importers.imported import ask, import_here

DUMPS = Path(__file__).parents[2] / "../shared/data/rollout_dumps"
pytestmark = pytest.mark.skipif(
    not DUMPS.is_dir(), reason="the rollout dumps are not at ../shared/data/rollout_dumps"
)


def test_verl_of_an_old_version(store: storage.Store):
    """128 lines, all of step 1, each with a prompt of its own; lines 80 and 88 have score 1.0.

    wc -c and sha256sum say how large the file is, and what its hash.
    """
    done = import_here(store, "verl", DUMPS / "verl_1.jsonl")
    assert (done.num_lines, done.num_rollouts, done.num_failures) == (128, 128, 0)
    assert (done.num_token_rollouts, done.num_guessed_groups) == (0, 128)
    assert ask(store, "select count(*), sum(value), min(value) from scores") == [(128, 2.0, 0.0)]
    right = ask(
        store,
        """
        select prompt.messages_json, rollout.policy_version, prompt.answer
        from rollouts as rollout
        join prompts as prompt using (run_id, prompt_id)
        join scores as score on score.target_id = rollout.event_id
        where score.value = 1 order by rollout._row
        """,
    )
    texts = [json.loads(messages)[0]["content"] for messages, *_ in right]
    opening = "system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\nuser\n"
    assert texts[0].startswith(f"{opening}On a mall-wide sale, Andre bought a $1350 treadmill")
    assert texts[1].startswith(f"{opening}Gretchen is a scuba diver.")
    assert [row[1:] for row in right] == [(1, None), (1, None)]
    assert ask(
        store,
        "select sha256, position, first_line, num_lines, num_rollouts, num_failures from imports",
    ) == [
        ("32091b8f37d99ba0fd63b918a0283a105082b730c2acb31e1427988672550716", 186404, 1, 128, 128, 0)
    ]
    [(last,)] = ask(store, "select completion from rollouts order by _row desc limit 1")
    assert last.endswith("Dan made **$90.00** more doing the work compared to the lower-paid work.")
    assert not storage.verify(store, deep=True)


def test_verl_with_reference_answers(store: storage.Store):
    """Two lines of step 13: gts 45 with score 1.0, gts 12 with score 0.0."""
    import_here(store, "verl", DUMPS / "verl_13_gts.jsonl")
    found = ask(
        store,
        """
        select answer, value, policy_version, completion like '%#### 45' from rollouts
        join prompts using (run_id, prompt_id) join scores on target_id = rollouts.event_id
        order by rollouts._row
        """,
    )
    assert found == [("45", 1.0, 13, True), ("12", 0.0, 13, False)]


def test_verifiers_without_ids(store: storage.Store):
    """Four lines, two prompts in turn (so no neighbours are equal), all right: non-toxic, 1.0."""
    done = import_here(store, "verifiers", DUMPS / "verifiers_no_id.jsonl")
    assert (done.num_rollouts, done.num_guessed_groups) == (4, 4)
    assert ask(store, "select answer, count(*) from prompts group by all") == [("non-toxic", 2)]
    rows = ask(store, "select prompt_id, sample_index, group_id from rollouts order by _row")
    assert [rows[n][0] for n in (0, 1)] == [rows[n][0] for n in (2, 3)]
    assert [row[1] for row in rows] == [0, 0, 1, 1]  # of a prompt in a part, no index comes twice
    assert len({row[2] for row in rows}) == 4
    assert all(row[2].startswith("guessed-") for row in rows)
    assert (
        ask(store, "select value, scorer, scorer_version from scores")
        == [(1.0, "reward", "imported")] * 4
    )


def test_verifiers_with_plain_strings(store: storage.Store):
    """Ids 0, 0, 0, 1, ... stand at five prompts in turn: no two lines share id and prompt."""
    done = import_here(store, "verifiers", DUMPS / "verifiers_plain_strings.jsonl")
    assert (done.num_rollouts, done.num_guessed_groups, done.num_scores) == (15, 0, 30)
    assert ask(
        store, "select count(distinct prompt_id), count(distinct group_id) from rollouts"
    ) == [(5, 15)]
    assert ask(
        store, "select value, count(*) from scores where scorer = 'reward' group by all order by 1"
    ) == [(0.25, 3), (0.5, 2), (0.75, 9), (1.0, 1)]
    [(first,)] = ask(store, "select completion from rollouts order by _row limit 1")
    assert first.startswith(" and cyclin-deficient strains, leading the authors to propose")


def test_an_aborted_run_is_placeholders_only(store: storage.Store):
    """150 lines, each with a completion of no messages."""
    with pytest.raises(ImporterError, match=r"150 of 150 lines .* \(lines 1, 2, 3, 4, 5, \.\.\.\)"):
        import_here(store, "verifiers", DUMPS / "verifiers_gsm8k_aborted.jsonl")
    assert store.head().number == 0


def test_verifiers_of_many_turns(store: storage.Store):
    """Example ids 0 to 4, three times; one prompt text, five answers; metrics as columns.

    Line 3 has reward 1.45 and was right after 3 guesses: 1 + 0.25 + 0.2.
    """
    done = import_here(store, "verifiers", DUMPS / "verifiers_wordle.jsonl")
    assert (done.num_rollouts, done.num_guessed_groups, done.num_scores) == (15, 0, 75)
    assert ask(
        store, "select count(distinct messages_json), count(distinct answer) from prompts"
    ) == [(1, 5)]
    sizes = "select group_id, count(*) as n, max(sample_index) as last from rollouts group by all"
    assert ask(store, f"select n, last, count(*) from ({sizes}) group by all") == [(3, 2, 5)]
    third = ask(
        store,
        "select scorer, value from scores where target_id = "
        "(select event_id from rollouts where _row = 2) order by scorer",
    )
    assert third == [
        ("check_answer_reward_func", 1.0), ("count_turns_reward_func", 0.25),
        ("format_reward_func", 1.0), ("partial_credit_reward_func", 0.0), ("reward", 1.45),
    ]  # fmt: skip
    [(text,)] = ask(store, "select completion from rollouts order by _row limit 1")
    assert text == (
        "\n\n<guess>[CRANE]</guess>"
        "\nuser\n\nC R A N E\nX Y X X X\nYou have 5 guesses left."
        "\nassistant\n\n\n<guess>[RUSTY]</guess>"
        "\nuser\n\nR U S T Y\nY X Y Y G\nYou have 4 guesses left."
        "\nassistant\n\n\n<guess>[STORY]</guess>"
        "\nuser\n\nR U S T Y\nY X Y Y G\nYou have 4 guesses left.\n[GAME] [STORY]"
    )


def test_an_episode_of_prime_rl(store: storage.Store):
    """One line, two traces in one group; reward = 1 * 1.0 + 1 * 0.2; token ids, no log-probs."""
    done = import_here(store, "prime-rl", DUMPS / "prime_rl_traces.jsonl")
    assert (done.num_lines, done.num_rollouts, done.num_token_rollouts) == (1, 2, 0)
    assert ask(store, "select count(distinct group_id), max(policy_version) from rollouts") == [
        (1, 0)
    ]
    assert ask(
        store,
        "select scorer, value, status, components_json from scores where target_id = "
        "(select event_id from rollouts where _row = 0) order by scorer",
    ) == [
        ("correctness", 0.0, "ok", "{}"), ("format_reward", 1.0, "ok", "{}"),
        ("num_edits", 1.0, "ok", "{}"), ("reward", 1.2, "ok", '{"advantage": 0.5}'),
        ("tests_pass", 1.0, "ok", "{}"),
        ("unscored_judge", None, "unscorable", '{"as_written": null}'),
    ]  # fmt: skip
    assert ask(store, "select count(*) from rollout_tokens") == [(0,)]
    [(messages, text)] = ask(
        store,
        "select messages_json, completion from rollouts join prompts using (run_id, prompt_id) "
        "where rollouts._row = 1",
    )
    assert json.loads(messages) == [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "Make the failing test in module_02 pass."},
    ]
    assert text.startswith("Fixing the off-by-one in src/module.py.\n[{")


def test_turns_of_nemo_gym_with_tokens(store: storage.Store):
    """Five lines of 3, 3, 3, 3 and 5 turns, each given all before it; task indices 3 4 1 2 0.

    The first line: prompts of 20, 53 and 85 ids, generations of 16, 15 and 15.
    """
    done = import_here(store, "nemo-gym", DUMPS / "nemo_gym_multi_turn_tokens.jsonl")
    assert (done.num_rollouts, done.num_token_rollouts, done.num_failures) == (5, 5, 0)
    assert ask(store, "select role, count(*) from rollouts group by all order by 1") == [
        ("imported", 5), ("imported_turn", 12)
    ]  # fmt: skip
    turns = ask(
        store,
        "select role, num_prompt_tokens, prefix_tokens, num_completion_tokens, event_id, parent_id "
        "from rollouts order by _row limit 3",
    )
    assert [turn[:4] for turn in turns] == [
        ("imported_turn", 20, 0, 16), ("imported_turn", 53, 33, 15), ("imported", 85, 65, 15)
    ]  # fmt: skip
    assert [turn[5] for turn in turns] == ["", turns[0][4], turns[1][4]]
    [(given, sampled, logprobs)] = ask(
        store,
        "select prompt_ids[:3], completion_ids[:3], sampler_logprobs[:2] from rollout_tokens "
        f"where rollout_id = '{turns[0][4]}'",
    )
    assert (given, sampled) == ([151644, 872, 198], [785, 15473, 4128])
    assert logprobs == pytest.approx([-0.25863245, 0.0])
    assert ask(store, "select sum(value), count(*), count(distinct target_id) from scores") == [
        (4.0, 5, 5)
    ]
    assert ask(
        store,
        "select distinct policy_digest, temperature, max_tokens, logprob_mode, engine, seed, top_p "
        "from rollouts",
    ) == [("Qwen/Qwen3-4B-Instruct-2507", 0.0, 1024, "imported", "imported", -1, -1.0)]
    assert ask(
        store,
        "select distinct num_logprobs = num_completion_ids, num_prompt_ids > 0 "
        "from judged_rollouts",
    ) == [(True, True)]


def test_a_stub_is_text(store: storage.Store):
    """Five lines of ids [1, 2] and [3, 4] for prompts of 76 characters and more, all right."""
    done = import_here(store, "nemo-gym", DUMPS / "nemo_gym_stub_tokens.jsonl")
    assert (done.num_rollouts, done.num_token_rollouts) == (5, 0)
    assert ask(store, "select count(*) from rollout_tokens") == [(0,)]
    assert ask(
        store, "select answer, completion from rollouts join prompts using (run_id, prompt_id) "
        "order by rollouts._row",
    ) == [(a, f"\\boxed{{{a}}}") for a in ("6", "210", "1024", "95", "13")]  # fmt: skip
    assert ask(store, "select scorer, sum(value) from scores group by all order by 1") == [
        ("library_reward", 5.0),
        ("reward", 5.0),
        ("turns_used", 5.0),
    ]
    assert ask(store, "select distinct num_completion_ids, num_logprobs from judged_rollouts") == [
        (0, None)
    ]


def test_nemo_gym_without_tokens(store: storage.Store):
    """Five lines without any index, rewards 1 1 0 0 0; reasoning comes before the answer."""
    done = import_here(store, "nemo-gym", DUMPS / "nemo_gym_reasoning_gym_text.jsonl")
    assert (done.num_rollouts, done.num_token_rollouts, done.num_guessed_groups) == (5, 0, 5)
    assert [value for (value,) in ask(
        store, "select value from scores where scorer = 'reward' order by _row"
    )] == [1.0, 1.0, 0.0, 0.0, 0.0]  # fmt: skip
    [(text,)] = ask(store, "select completion from rollouts order by _row limit 1")
    assert text.startswith("<think>\nOkay, let's try to figure out this logic puzzle.")
    assert text.endswith("</think>\n\n\nOlivia is a laggard, and Lily is a pioneer.")


@pytest.mark.parametrize("name", [path.name for path in sorted(DUMPS.glob("verl*.jsonl"))])
def test_the_same_file_in_another_place_adds_nothing(
    name: str, store: storage.Store, tmp_path: Path
):
    import_here(store, "verl", DUMPS / name)
    head = store.head()
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((DUMPS / name).read_bytes())
    again = import_here(store, "verl", moved)
    assert (again.ended, again.num_rollouts) == ("nothing to do", 0)
    assert store.head() == head
