"""What became of the policy: reward, held-out accuracy, exploration, forgetting."""

from math import sqrt

from flows.report.figures import Plot, Series
from flows.report.history import MAX_EXPLORED
from flows.report.section import ITERATION, Column, Runs, Section, by, lines

_Z95 = 1.96


def reward(runs: Runs) -> Section:
    rewards = {}
    for run in runs:
        bounds = []
        for row in run.rows["reward_spread"]:
            half = row["std_of_prompts"]
            if half is not None:
                half *= _Z95 / sqrt(row["num_prompts"])
                mean = row["mean_of_prompts"]
                bounds.append((row[ITERATION], mean - half, mean + half))
        rewards[run.run_id] = [Series("", run.points("training_history", "mean_reward"), bounds)]
    groups = (("frac_groups_all_wrong", "all wrong"), ("frac_groups_all_right", "all right"))
    return Section(
        "reward",
        "Reward and held-out accuracy",
        "Reward is what training saw, held-out accuracy is what it is for. Bands are 95 % "
        "intervals: of the reward over prompts, of an evaluation as it was recorded.",
        [
            Plot("Does the reward rise, by more than its band?", ITERATION, "mean reward", rewards),
            *_evaluations(runs),
            Plot(
                "Do groups still differ? Those that do not teach nothing", ITERATION,
                "share of groups", lines(runs, "training_history", groups), is_fraction=True,
            ),
            Plot(
                "Does the loss stay finite, without jumps?", ITERATION, "loss",
                lines(runs, "training_history", [("loss", "")]),
            ),
        ],
    )  # fmt: skip


def _evaluations(runs: Runs) -> list[Plot]:
    judges = dict.fromkeys(
        (row["name"], row["scorer"], row["scorer_version"])
        for run in runs
        for row in run.rows["evaluations"]
    )
    plots = []
    for judge in judges:
        series = {}
        for run in runs:
            rows = [
                row
                for row in run.rows["evaluations"]
                if (row["name"], row["scorer"], row["scorer_version"]) == judge
            ]
            points = [(row[ITERATION], row["mean_score"]) for row in rows]
            bounds = [(row[ITERATION], row["ci_low"], row["ci_high"]) for row in rows]
            series[run.run_id] = [Series("", points, bounds)]
        name, scorer, version = judge
        title = f"Does it hold on {name} prompts? {scorer} (version {version[:16]})"
        plots.append(Plot(title, ITERATION, "mean score", series))
    return plots


def exploration(runs: Runs) -> Section:
    def explored(*columns: Column) -> dict[str, list[Series]]:
        return {
            run.run_id: [
                Series(label, [(i, found.get(column)) for i, found in run.explored.items()])
                for column, label in columns
            ]
            for run in runs
        }

    sizes = {key for run in runs for found in run.explored.values() for key in found}
    passes = sorted(
        (key for key in sizes if key.startswith("explore/pass_at_")),
        key=lambda key: int(key.rpartition("_")[2]),
    )
    return Section(
        "exploration",
        "Exploration",
        "A policy that stops trying different things stops learning. Falling entropy is normal; "
        "pass@k that falls while pass@1 rises means that variety was traded for certainty. Texts "
        f"are compared in at most {MAX_EXPLORED} iterations, evenly chosen.",
        [
            Plot(
                "Does entropy fall slowly, not to zero?", ITERATION, "entropy (nats a token)",
                by(runs, "learning_by_unit", "unit", "entropy_mean"),
            ),
            Plot(
                "Do completions stay different from each other?", ITERATION, "share",
                explored(
                    ("explore/distinct_2", "distinct word pairs"),
                    ("explore/unique_solution_rate", "different right solutions"),
                    ("explore/self_bleu4", "self-BLEU (1: copies)"),
                ), is_fraction=True,
            ),
            Plot(
                "Does pass@k stay above pass@1, and rise?", ITERATION, "pass@k",
                explored(*((key, f"k = {key.rpartition('_')[2]}") for key in passes)),
                is_fraction=True,
            ),
        ],
    )  # fmt: skip


def forgetting(runs: Runs) -> Section:
    counts = (
        ("num_ever_solved", "ever solved"),
        ("num_lost", "lost"),
        ("num_recovered", "recovered"),
        ("num_recovered_by_replay", "recovered by replay"),
    )
    return Section(
        "forgetting",
        "Forgetting",
        "A prompt is lost when it was solved once and its last 16 attempts all failed. It is "
        "recovered when it is solved again after that.",
        [
            Plot(
                "Do prompts that were solved stay solved?", ITERATION, "prompts",
                lines(runs, "forgetting", counts),
            ),
            Plot(
                "Does the share that is lost stay near zero?", ITERATION, "lost / ever solved",
                lines(runs, "forgetting", [("lost_rate", "")]), is_fraction=True,
            ),
        ],
    )  # fmt: skip
