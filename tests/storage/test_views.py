"""The views on small stores made by hand; every expected number is worked out in a comment."""

import math
import re
from typing import Any

import pytest

import storage
from storage.schemas import TABLES
from storage.views import ORDERS, VIEWS, ask_names, ask_sql, names_in, plain_names_in, view_sql
from tests.storage.replay_rows import pick
from tests.storage.rows import OPENED, learned, pin, planned, rollout, score, update

ROUNDING = 1e-12


def column(store: storage.Store, query: str, **params: Any) -> list[Any]:
    return [row[0] for row in store.sql(query, params).fetchall()]


def append_attempts(
    writer: storage.StreamWriter,
    values: dict[str, list[float | None]],
    iteration: int = 1,
    **facts: Any,
) -> list[str]:
    """One rollout and one `exact` score for each value, by prompt; returns the rollout ids."""
    rollouts = [
        rollout(prompt_id, index, iteration, **facts)
        for prompt_id, of_prompt in values.items()
        for index in range(len(of_prompt))
    ]
    ids = [writer.event_id_of("rollouts", row) for row in rollouts]
    flat = [value for of_prompt in values.values() for value in of_prompt]
    scores = [score(i, value, iteration) for i, value in zip(ids, flat, strict=True)]
    writer.append({"rollouts": rollouts, "scores": scores}, f"i{iteration}")
    return ids


def test_diversity_of_a_prompt_by_hand(store: storage.Store, writer: storage.StreamWriter):
    texts = ["the red dog ran", "The red cat ran", "The  red dog\nran", ""]
    rows = [rollout("p1", n, completion=text) for n, text in enumerate(texts)]
    rows += [rollout("p2", 0, completion="alone"), rollout("p3", 0, status="error")]
    ids = [writer.event_id_of("rollouts", row) for row in rows]
    signed = [("4 +", 1.0), ("4 *", 1.0), ("4 +", 1.0), ("5", 0.0)]
    scores = [score(i, value, signature=s) for i, (s, value) in zip(ids, signed, strict=False)]
    writer.append({"rollouts": rows, "scores": scores, "views_pinned": [pin()]}, "b")
    first, second = store.view("prompt_diversity", run_id="r1", iteration=1)
    assert first["prompt_id"] == "p1"
    assert (first["num_attempts"], first["num_texts"]) == (4, 4)
    # the red, red dog, dog ran, red cat, cat ran of 9
    assert first["distinct_2"] == pytest.approx(5 / 9, abs=ROUNDING)
    # Of six pairs: 1 the same words, 2 with three of five, 3 with an empty one.
    assert first["self_similarity"] == pytest.approx((1 + 2 * 3 / 5) / 6, abs=ROUNDING)
    assert (first["num_ok"], first["num_solutions"]) == (3, 2)
    assert (second["prompt_id"], second["num_attempts"], second["num_texts"]) == ("p2", 1, 1)
    assert second["distinct_2"] is None
    assert second["self_similarity"] is None
    assert second["num_ok"] == 0


def test_every_table_and_view_of_an_empty_store_has_its_columns(store: storage.Store):
    for name, table in TABLES.items():
        relation = store.sql(f"select * from {name}")
        assert relation.columns == [*(c.name for c in table.all_columns), "_commit", "_row"]
        assert relation.fetchall() == []
        assert store.sql(f"select * from {name}(0)").fetchall() == []
    for name in VIEWS:
        relation = store.sql(f"select * from {name}")
        assert relation.columns
        assert relation.fetchall() == []
        assert store.view(name) == []


def test_columns_have_the_same_types_in_an_empty_and_a_filled_store(
    store: storage.Store, writer: storage.StreamWriter
):
    names = [*TABLES, *VIEWS]
    before = {name: store.sql(f"select * from {name}", as_of=0).types for name in names}
    empty = {name: list(map(str, types)) for name, types in before.items()}
    [rollout_id] = append_attempts(writer, {"p1": [1.0]})
    writer.append(
        {
            "rollout_tokens": [tokens_row(rollout_id)],
            "views_pinned": [pin()],
            "replays": [planned(rollout_id)],
            "updates": [update()],
            "learned_samples": [learned(rollout_id)],
        },
        "b",
    )
    for name in names:
        assert list(map(str, store.sql(f"select * from {name}").types)) == empty[name], name


def tokens_row(rollout_id: str) -> dict[str, Any]:
    return {
        "iteration": 1,
        "rollout_id": rollout_id,
        "prompt_ids": [1],
        "completion_ids": [2],
        "sampler_logprobs": [-0.5],
    }


def test_plain_names_and_macros_agree(store: storage.Store, writer: storage.StreamWriter):
    append_attempts(writer, {"p1": [1.0]})
    append_attempts(writer, {"p1": [0.0]}, iteration=2)
    for name in ("rollouts", "latest_scores"):
        assert column(store, f"select count(*) from {name}") == [2]
        assert [column(store, f"select count(*) from {name}({n})")[0] for n in range(4)] == [
            0,
            0,
            1,
            2,
        ]
        assert column(store, f"select count(*) from {name}(as_of := 2)") == [1]
        for number in range(4):
            [[count]] = store.sql(f"select count(*) from {name}", as_of=number).fetchall()
            assert count == column(store, f"select count(*) from {name}({number})")[0]


def test_positions_come_from_the_log(store: storage.Store, writer: storage.StreamWriter):
    append_attempts(writer, {"p1": [1.0, 0.0]})
    append_attempts(writer, {"p1": [0.5]}, iteration=2)
    query = "select _commit, _row, iteration, sample_index from rollouts order by _commit, _row"
    assert store.sql(query).fetchall() == [(2, 0, 1, 0), (2, 1, 1, 1), (3, 0, 2, 0)]


def test_the_column_as_of_is_not_the_argument(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"views_pinned": [pin(1) | {"as_of": 77}]}, "b")
    assert column(store, "select as_of from views_pinned") == [77]
    assert column(store, "select as_of from views_pinned(2)") == [77]
    assert column(store, "select p.as_of from views_pinned(1) p") == []


def test_what_was_answered_as_of_a_commit_is_answered_for_ever(store: storage.Store):
    answers: dict[int, Any] = {}
    orders = dict.fromkeys((*VIEWS, "rollouts", "scores"), "") | {
        name: f" order by {columns}" for name, columns in ORDERS.items()
    }
    questions = [f"from {name}{{}}{order}" for name, order in orders.items()]
    for run_id in ("r1", "r2"):
        writer = store.open_stream(run_id, OPENED)
        ids = append_attempts(writer, {"p1": [1.0, 0.0], "p2": [None, 0.5]})
        plan = [planned(rollout_id, position) for position, rollout_id in enumerate(ids)]
        writer.append({"views_pinned": [pin()], "replays": plan}, "batch")
        newer = score(ids[0], 0.0, scorer_version="2")
        if run_id == "r1":  # asked between the runs, and within the second
            writer.append({"updates": [update()], "scores": [newer]}, "step")
        answers[store.head().number] = [store.sql(q.format("")).fetchall() for q in questions]
    writer.append({"updates": [update()], "scores": [newer]}, "step")
    again = storage.open(store.path)
    for number, expected in answers.items():
        plain = [again.sql(q.format(""), as_of=number).fetchall() for q in questions]
        called = [store.sql(q.format(f"({number})")).fetchall() for q in questions]
        assert plain == called == expected


def test_a_number_that_is_no_commit_is_refused(store: storage.Store, writer: storage.StreamWriter):
    for number in (-1, 2):
        with pytest.raises(storage.QueryError, match=f"from 0 to 1, came {number}"):
            store.sql("select 1", as_of=number)
        with pytest.raises(storage.QueryError):
            store.read("rollouts", as_of=number)


def test_of_final_verdicts_the_highest_attempt_counts_then_the_first_position(store: storage.Store):
    run, rescoring = (store.open_stream(name, OPENED) for name in ("r1", "rescoring"))
    run.append({"scores": [score("ro1", None, status="timeout"), score("ro2", 0.25)]}, "a")
    run.append({"scores": [score("ro1", 1.0, attempt=1)]}, "b")
    rescoring.append(
        {
            "scores": [
                score("ro1", 0.5),  # a lower attempt than the run's second
                score("ro2", 0.75),  # the same attempt, later
                score("ro2", 0.5, scorer_version="2"),
                score("ro2", 0.125, scorer="judge"),
            ]
        },
        "c",
    )
    query = """select target_id, scorer, scorer_version, value, run_id, score_id
               from latest_scores order by all"""
    found = store.sql(query).fetchall()
    assert [row[:5] for row in found] == [
        ("ro1", "exact", "1", 1.0, "r1"),
        ("ro2", "exact", "1", 0.25, "r1"),
        ("ro2", "exact", "2", 0.5, "rescoring"),
        ("ro2", "judge", "1", 0.125, "rescoring"),
    ]
    assert found[0][5] == run.event_id_of("scores", score("ro1", 1.0, attempt=1))
    run.append({"scores": [score("ro3", None, signature=None)]}, "d")
    rescoring.append({"scores": [score("ro3", 1.0, signature="late")]}, "e")
    assert store.sql("from latest_scores where target_id = 'ro3'").pl()["signature"][0] is None
    # as of the first append the time-out is all there is
    assert column(store, "select value from latest_scores(3) where target_id = 'ro1'") == [None]


def test_no_failed_try_hides_a_final_verdict(store: storage.Store):
    """Two streams judge at once: one gets an answer, the other none in two attempts."""
    judge, other = (store.open_stream(name, OPENED) for name in ("judge", "other"))
    judge.append({"scores": [score("ro1", 0.75), score("ro2", None), score("ro3", None,
                  status="scorer_error")]}, "a")  # fmt: skip
    failed = [score(f"ro{n}", None, status="timeout", attempt=a) for n in (1, 2, 3) for a in (0, 1)]
    other.append({"scores": failed}, "b")
    query = "select status, value, attempt from latest_scores order by target_id"
    assert store.sql(query).fetchall() == [
        ("ok", 0.75, 0), ("unscorable", None, 0), ("timeout", None, 1),
    ]  # fmt: skip
    judge.append({"scores": [score("ro1", 0.5, attempt=2)]}, "c")
    assert store.sql(query).fetchall()[0] == ("ok", 0.5, 2)


def test_training_history(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"views_pinned": [pin(1)]}, "pin")
    ids = append_attempts(
        writer, {"p1": [1.0, 0.0], "p2": [1.0, 0.999]}, batch_key="b0", generate_s=0.5
    )
    append_attempts(writer, {"p3": [0.0, None], "p4": [None, None]}, batch_key="b1", generate_s=1.5)
    writer.append(
        {"rollouts": [rollout("p1", role="evaluation", num_completion_tokens=999)]}, "eval"
    )
    writer.append(
        {
            "updates": [
                update(1, 0, loss=0.5, kl_loss=0.125, grad_norm=1.0),
                update(1, 1, loss=0.25, kl_loss=0.375, grad_norm=3.0),
                update(1, 2, loss=9.0, kl_loss=9.0, grad_norm=9.0, is_skipped=True),
            ],
            "learned_samples": [
                learned(ids[0], kl_mean=0.25, mismatch_mean=0.0625),
                learned(ids[1], kl_mean=0.75, mismatch_mean=0.1875),
                learned(ids[2], kl_mean=None, mismatch_mean=None),
                learned(ids[3], kl_mean=9.0, mismatch_mean=9.0, num_loss_tokens=0),
            ],
        },
        "steps",
    )
    writer.append({"views_pinned": [pin(2)]}, "pin")

    first, second = store.view("training_history")
    assert first == {
        "run_id": "r1",
        "iteration": 1,
        "scorer": "exact",
        "scorer_version": "1",
        "mean_reward": pytest.approx(2.999 / 5, abs=ROUNDING),  # (1 + 0 + 1 + 0.999 + 0) / 5 scored
        "num_rollouts": 8,
        "num_scored": 5,
        "num_prompts": 4,
        "tokens_sampled": 80,  # 8 attempts of 10 tokens; the evaluation does not count
        "sampled_tokens_per_s": 40.0,  # 80 tokens in batches of 0.5 s and 1.5 s
        "frac_groups_all_right": pytest.approx(1 / 3),  # p2, of p1, p2, p3; p4 has no reward
        "frac_groups_all_wrong": pytest.approx(1 / 3),  # p3
        "num_steps": 2,
        "loss": 0.375,  # (0.5 + 0.25) / 2
        "kl_loss": 0.25,
        "grad_norm": 2.0,
        "kl_mean": 0.5,  # (0.25 + 0.75) / 2
        "mismatch_mean": 0.125,
        "num_learned_samples": 3,
    }
    counts = {name for name in second if name.startswith("num_")} | {"tokens_sampled"}
    assert {second[name] for name in counts} == {0}
    assert {second[name] for name in set(second) - counts} == {"r1", 2, "exact", "1", None}
    assert store.view("training_history", run_id="r1", iteration=2) == [second]
    assert store.view("training_history", run_id="other") == []


def test_nothing_was_learned_in_a_skipped_step(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"views_pinned": [pin(1), pin(2)]}, "pin")
    first, second = (append_attempts(writer, {"p1": [0.0]}, i)[0] for i in (1, 2))
    writer.append(
        {
            "updates": [update(1, 0, is_skipped=True), update(2, 0, is_skipped=True), update(2, 1)],
            "learned_samples": [
                learned(first, 1, mismatch_mean=9.0, kl_mean=9.0),
                learned(second, 2, mismatch_mean=9.0, kl_mean=9.0),
                learned(second, 2, mismatch_mean=0.25, kl_mean=0.5, step=1),
            ],
        },
        "steps",
    )
    names = ("num_steps", "num_learned_samples", "mismatch_mean", "kl_mean")
    rows = [tuple(row[name] for name in names) for row in store.view("training_history")]
    assert rows == [(0, 0, None, None), (1, 1, 0.25, 0.5)]


def test_the_reward_is_that_of_the_first_pinned_scorer(
    store: storage.Store, writer: storage.StreamWriter
):
    ids = append_attempts(writer, {"p1": [1.0]})
    other = [score(ids[0], 0.25, scorer="zeta", scorer_version=v) for v in ("8", "9")]
    other[1]["value"] = 0.5
    writer.append({"views_pinned": [pin(1, '{"zeta": "9", "exact": "1"}')], "scores": other}, "pin")
    assert column(store, "select mean_reward from training_history") == [0.5]
    assert store.sql("select scorer, scorer_version from reward_scorers").fetchall() == [
        ("zeta", "9")
    ]


def test_mean_reward_is_never_nan_and_the_same_at_every_asking(
    store: storage.Store, writer: storage.StreamWriter
):
    writer.append({"views_pinned": [pin(1)]}, "pin")
    values = {f"p{i}": [math.sin(i) ** 2, None] for i in range(300)}
    append_attempts(writer, values)
    answers = {store.view("training_history")[0]["mean_reward"] for _ in range(4)}
    answers |= {
        storage.open(store.path).view("training_history")[0]["mean_reward"] for _ in range(4)
    }
    assert len(answers) == 1
    expected = math.fsum(math.sin(i) ** 2 for i in range(300)) / 300
    assert answers.pop() == pytest.approx(expected, abs=ROUNDING)


def test_prompt_history(store: storage.Store, writer: storage.StreamWriter):
    writer.append({"views_pinned": [pin(1)]}, "pin")
    append_attempts(writer, {"p1": [1.0, 0.0, None], "p2": [0.5, 0.25], "p3": [None]})
    names = ("prompt_id", "num_attempts", "num_scored", "num_ok", "mean_value", "is_solved")
    rows = [tuple(row[name] for name in names) for row in store.view("prompt_history", run_id="r1")]
    assert rows == [
        ("p1", 3, 2, 1, 0.5, True),
        ("p2", 2, 2, 0, 0.375, False),
        ("p3", 1, 0, 0, None, False),
    ]


def test_lost_prompts(store: storage.Store, writer: storage.StreamWriter):
    outcomes = {  # by prompt, over iterations 1 to 4; None: not sampled
        "steady": [0.0, 1.0, 1.0, 1.0],
        "lost": [1.0, None, 0.5, 0.0],
        "back": [0.0, 1.0, 0.0, 1.0],
        "never": [0.0, 0.0, 0.0, 0.0],
        "half": [1.0, None, None, None],
    }
    for iteration in range(1, 5):
        writer.append({"views_pinned": [pin(iteration)]}, "pin")
        sampled = {
            p: [v[iteration - 1], 0.0] for p, v in outcomes.items() if v[iteration - 1] is not None
        }
        append_attempts(writer, sampled, iteration)
    evaluated = {"held-out": [[1.0], [0.0]]}
    for iteration, value in enumerate(evaluated["held-out"], start=0):
        append_attempts(writer, {"held-out": value}, iteration, role="evaluation")
    names = ("role", "prompt_id", "solved_iteration", "failed_iteration", "is_solved_again")
    assert [tuple(row[n] for n in names) for row in store.view("lost_prompts")] == [
        ("attempt", "back", 2, 3, True),
        ("attempt", "lost", 1, 3, False),
        ("evaluation", "held-out", 0, 1, False),
    ]


def test_replay_audit(store: storage.Store, writer: storage.StreamWriter):
    ids = append_attempts(writer, {"p1": [1.0, 0.0]}, policy_version=4)
    score_id = writer.event_id_of("scores", score(ids[0], 1.0))
    row = planned(
        ids[0], 0, 1, score_id=score_id, reward=1.0, age=2, priority=0.5, probability=0.25
    )
    later = [planned(ids[0], 0, 2, batch_id="b2"), planned(ids[1], 0, 3, batch_id="b3")]
    writer.append({"replays": [row, planned(ids[1], 1, 1, advantage=-0.5), *later]}, "batches")
    writer.append(
        {
            "updates": [update(1), update(3, batch_id="b3", is_skipped=True)],
            "learned_samples": [learned(ids[0], importance_mean=1.5, ratio_mean=1.0)],
        },
        "step",
    )
    audit = store.view("replay_audit")
    assert [(r["iteration"], r["position"], r["state"]) for r in audit] == [
        (1, 0, "learned"),
        (1, 1, "learned"),
        (2, 0, "planned"),  # no step yet
        (3, 0, "planned"),  # the step was skipped
    ]
    first = audit[0]
    expected = {
        "rollout_id": ids[0],
        "prompt_id": "p1",
        "policy_version": 4,
        "age": 2,
        "score_id": score_id,
        "reward": 1.0,
        "scorer": "exact",
        "scorer_version": "1",
        "pick_kind": "fresh",
        "priority": 0.5,
        "probability": 0.25,
        "advantage": 0.5,
        "num_loss_tokens": 10,
        "importance_mean": 1.5,
    }
    assert {name: first[name] for name in expected} == expected
    assert (audit[1]["advantage"], audit[1]["importance_mean"]) == (-0.5, None)
    before = store.sql("select distinct state from replay_audit(3)").fetchall()
    assert before == [("planned",)]


def test_replay_audit_tells_what_a_sample_was_picked_by(
    store: storage.Store, writer: storage.StreamWriter
):
    fresh, continued = append_attempts(writer, {"p1": [1.0, 0.0]})
    picked = pick("state", "st1", 1, value=0.75, prompt_value=0.125, base=0.625, probability=0.01)
    picked |= {"score_id": "sc1", "scorer_version": "v1"}
    pick_id = writer.event_id_of("picks", picked)
    prefix = {"pick_id": pick_id, "prefix_tokens": 7, "prefix_advantage": 0.5, "probability": 0.02}
    plan = [planned(fresh, 0), planned(continued, 1, unit="state", **prefix)]
    writer.append({"picks": [picked], "replays": plan}, "batch")
    names = (
        "pick_id", "prefix_tokens", "prefix_advantage", "pick_value", "pick_prompt_value",
        "pick_base", "pick_probability", "pick_score_id", "pick_scorer_version", "probability",
    )  # fmt: skip
    rows = [tuple(row[name] for name in names) for row in store.view("replay_audit")]
    known = (pick_id, 7, 0.5, 0.75, 0.125, 0.625, 0.01, "sc1", "v1", 0.02)
    assert rows == [(None,) * 10, known]


def test_run_overview(store: storage.Store):
    ended = {"planned_iterations": 4, "config_json": "{}", "seed_root": 7, "code_version": "0.1.0",
             "packages_json": "{}"}  # fmt: skip
    for run_id in ("finished", "killed", "resumed", "empty"):
        writer = store.open_stream(run_id, OPENED)
        if run_id == "empty":
            continue
        for iteration, value in ((1, 0.5), (2, 0.75)):
            writer.append({"views_pinned": [pin(iteration)]}, "pin")
            append_attempts(writer, {"p1": [value]}, iteration)
        writer.append({"updates": [update(1)], "views_pinned": [pin(3)]}, "step")
        if run_id != "killed":
            what = "finished" if run_id == "finished" else "interrupted"
            writer.append({"runs": [ended | {"run_epoch": 1, "what": what}]}, "end")
        if run_id == "resumed":
            store.open_stream(run_id, OPENED | {"planned_iterations": 9})
    rows = {row["run_id"]: row for row in store.view("run_overview")}
    assert {name: row["state"] for name, row in rows.items()} == {
        "finished": "finished",
        "killed": "open",
        "resumed": "open",
        "empty": "open",
    }
    names = (
        "epoch",
        "last_iteration",
        "last_learned_iteration",
        "planned_iterations",
        "last_mean_reward",
    )
    assert tuple(rows["killed"][name] for name in names) == (1, 3, 1, 4, 0.75)
    assert tuple(rows["resumed"][name] for name in names) == (2, 3, 1, 9, 0.75)
    assert tuple(rows["empty"][name] for name in names) == (1, None, None, 4, None)
    for row in rows.values():
        assert row["opened_at"] <= row["last_event_at"]
    [run] = store.view("run_overview", run_id="finished")
    moments = store.sql(
        "select min(recorded_at), max(recorded_at) from runs where run_id = 'finished'"
    )
    assert (run["opened_at"], run["last_event_at"]) == moments.fetchall()[0]


def test_run_overview_tells_the_kind_of_a_stream(store: storage.Store):
    for kind in ("train", "rescore", "refit"):
        store.open_stream(f"a-{kind}", OPENED | {"kind": kind})
    writer = store.open_stream("older", OPENED)
    ended = OPENED | {"run_epoch": 1, "what": "finished"}
    writer.append({"runs": [ended]}, "end")
    rescoring = store.open_stream("a-rescore", OPENED | {"kind": "rescore"})
    rescoring.append({"runs": [ended | {"run_epoch": 2}]}, "end")  # says nothing of the kind
    kinds = {row["run_id"]: row["kind"] for row in store.view("run_overview")}
    assert kinds == {
        "a-train": "train", "a-rescore": "rescore", "a-refit": "refit", "older": "train",
    }  # fmt: skip


def test_every_sql_file_is_described_and_one_select(store: storage.Store):
    names = [*VIEWS, *(f"ask/{name}" for name in ask_names())]
    for name in names:
        text = view_sql(name)
        header = [line for line in text.split("\n") if line.startswith("-- ")]
        for heading in ("-- Question: ", "-- Grain: ", "-- Parameters: ", "-- Columns:"):
            assert any(line.startswith(heading) for line in header), (name, heading)
        statement = re.sub("--.*", "", text)
        assert ";" not in statement
        assert "*" not in statement.replace("count(*)", "").split("\nselect")[-1], name


def test_suggested_questions_can_be_asked(store: storage.Store, writer: storage.StreamWriter):
    assert len(ask_names()) == 3
    for name in ask_names():
        question = ask_sql(name)
        assert "\n" not in question
        assert '"' not in question
        assert store.sql(question, {"run_id": "r1"}).fetchall() == []
        storage.console.run_query(store, question.replace("$run_id", "'r1'"))


def test_what_a_query_may_read_is_found_through_views():
    assert names_in("SELECT '--' FROM Rollouts") == ["rollouts"]
    assert names_in('from "latest_scores"(3)') == ["scores", "latest_scores"]
    assert names_in("from reward_scorers r join prompts p on true") == [
        "prompts",
        "views_pinned",
        "reward_scorers",
    ]
    for query in ("select 1", "show tables", "from information_schema.tables join runs on true"):
        assert names_in(query) == [*TABLES, *VIEWS]


def test_names_that_say_as_of_when_are_not_plain():
    assert plain_names_in("from rollouts(3) join Scores on true") == ["scores"]
    assert plain_names_in("from rollouts (3), rollouts where true") == ["rollouts"]
    assert plain_names_in("from latest_scores(as_of := 2)") == []
    assert plain_names_in("select 1") == [*TABLES, *VIEWS]


def test_an_unknown_view_is_named(store: storage.Store):
    with pytest.raises(storage.QueryError, match="came `rollouts`"):
        store.view("rollouts")
