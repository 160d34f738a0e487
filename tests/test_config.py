"""Configuration: unknown keys, bounds and cross-field rules end in messages that say what to do."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.config import CONFIGS_DIR, ConfigError, RunConfig, load_config

SHIPPED = sorted(p for p in CONFIGS_DIR.glob("*.toml") if not p.match("study-*"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_config_parses(path: Path):
    assert load_config(path).run.iterations >= 1


def test_shipped_configs_are_found_by_name():
    assert load_config(Path("smoke")) == load_config(CONFIGS_DIR / "smoke.toml")


def test_unknown_key_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key `learner.lr`; known here: .*learning_rate"):
        load_config(Path("smoke"), ["learner.lr=1"])


def test_unknown_section_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key `lerner`; known here: .*learner"):
        load_config(Path("smoke"), ["lerner.steps=1"])


def test_value_out_of_bounds_names_key_and_value():
    with pytest.raises(ConfigError, match=r"`learner.learning_rate` = -1: .*greater than 0"):
        load_config(Path("smoke"), ["learner.learning_rate=-1"])


@pytest.mark.parametrize("override", ["learner", "learner.steps", "=3", "steps=3", ".a=1"])
def test_malformed_override_says_what_is_expected(override: str):
    with pytest.raises(ConfigError, match=r"expected `section.key=value`"):
        load_config(Path("smoke"), [override])


def test_overrides_hold_paths_numbers_booleans_and_off():
    config = load_config(
        Path("smoke"),
        ["task.path=../some/data", "run.seed=7", "tracking.mlflow=false", "evaluation.every=off"],
    )
    assert config.task.params["path"] == "../some/data"
    assert (config.run.seed, config.tracking.mlflow, config.evaluation.every) == (7, False, None)


def test_cut_sampling_refuses_correction_and_names_both_settings():
    with pytest.raises(ConfigError, match=r"`learner.correction`.*`sampler.top_p` = 0.9"):
        load_config(Path("smoke"), ["sampler.top_p=0.9"])


def test_completion_must_leave_room_for_a_prompt():
    with pytest.raises(
        ConfigError, match=r"`sampler.max_tokens` = 256 .*`sampler.context_tokens` = 256"
    ):
        load_config(Path("smoke"), ["sampler.max_tokens=256"])


def test_missing_config_lists_the_shipped_ones(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no configuration at .*smoke\.toml"):
        load_config(tmp_path / "nothing.toml")


def test_broken_toml_is_named(tmp_path: Path):
    path = tmp_path / "broken.toml"
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(path)


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        RunConfig().run.seed = 3  # type: ignore[misc]


def test_every_field_has_a_sentence():
    for name, section in RunConfig.model_fields.items():
        for field, info in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert info.description, f"{name}.{field}"
            assert info.description.endswith("."), f"{name}.{field}"


def test_first_last_and_every_kth_policy_are_evaluated():
    config = load_config(Path("smoke"), ["run.iterations=5", "evaluation.every=2"])
    assert [i for i in range(6) if config.is_evaluated(i)] == [0, 2, 4, 5]
    off = load_config(Path("smoke"), ["evaluation.every=off"])
    assert not any(off.is_evaluated(i) for i in range(4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["run.mode=online", 'replay.units=["state"]'],
            r"`run.mode` = 'online' .*`replay.units` = \['state'\]",
        ),
        (["run.mode=offline"], r"`run.mode` = 'offline' .*`evaluation.every` = 2.*`rrl evaluate`"),
        (
            ["run.mode=offline", "evaluation.every=off", "value.every=1"],
            r"`run.mode` = 'offline' .*`value.every` = 1",
        ),
        (
            ["run.mode=offline", "evaluation.every=off", 'replay.units=["state"]'],
            r"`run.mode` = 'offline' .*`replay.units` = \['state'\]",
        ),
        (["offline.query=select 1"], r"`run.mode` = 'hybrid' .*`offline.query` = 'select 1'"),
        (
            ["run.mode=offline", "evaluation.every=off", "offline.samples=2", "learner.steps=3"],
            r"`learner.steps` = 3 cannot split `offline.samples` = 2",
        ),
    ],
)
def test_modes_refuse_what_they_cannot_do_and_name_both_settings(
    overrides: list[str], message: str
):
    with pytest.raises(ConfigError, match=message):
        load_config(Path("smoke"), overrides)


def test_off_is_written_so_in_toml(tmp_path: Path):
    path = tmp_path / "off.toml"
    path.write_text('[evaluation]\nevery = "off"\n')
    assert load_config(path).evaluation.every is None


def test_a_run_without_a_mode_replays_what_it_is_told_to():
    assert load_config(Path("smoke-replay")).run.mode == "hybrid"
