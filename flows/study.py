"""Studies: arms times seeds as runs of one store, at one budget, so that arms differ in one thing.

A study is a TOML file. Every run is a training run like any other, in a process of its own, named
`<study>-<arm>-<seed>`, or `<study>-<task>-<arm>-<seed>` where there are tasks; what is finished is
kept, what was begun is resumed. The seeds of an arm are those of every other: runs are compared in
pairs.
"""

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

import storage
from flows.config import CONFIGS_DIR, ConfigError, RunConfig, Section, load_config
from flows.progress import Progress
from flows.streams import is_finished
from flows.wiring import stored_config
from storage import Store

Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]


class StudySection(Section):
    """What is compared, and at what budget."""

    name: Name = Field(description="Opens the ids of its runs.")
    base: str = Field(description="Configuration of all arms: a shipped name, or a file.")
    seeds: tuple[int, ...] = Field(min_length=1, description="Seeds of every arm.")
    budget_tokens: int = Field(ge=1, description="Tokens that training may sample, in every run.")
    baseline: Name = Field(description="Arm that the others are compared with.")
    metric: str | None = Field(
        None, description="Scorer whose held-out mean is compared; off: the reward's."
    )
    set: tuple[str, ...] = Field((), description="Overrides of all arms, as `section.key=value`.")


class Study(Section):
    """A study: its section, by arm the overrides that make it, and the same for each task."""

    study: StudySection
    arms: dict[Name, tuple[str, ...]] = Field(min_length=2)
    tasks: dict[Name, tuple[str, ...]] = Field(
        {}, description="What all arms are compared on, one after the other; none: the base's."
    )

    @model_validator(mode="after")
    def _check_baseline(self) -> "Study":
        if self.study.baseline not in self.arms:
            raise ValueError(
                f"`study.baseline` = {self.study.baseline!r}: expected one of the arms "
                f"{', '.join(self.arms)}"
            )
        if len(set(self.study.seeds)) < len(self.study.seeds):
            raise ValueError(f"`study.seeds` = {list(self.study.seeds)}: a seed stands twice")
        return self

    def runs(self) -> "list[StudyRun]":
        """Return its runs, task by task, all arms of a seed before the next seed.

        Raises:
            ConfigError: the configuration of one is not as expected; names its arm.
        """
        return [
            self._run(task, arm, seed)
            for task in self.tasks or ("",)
            for seed in self.study.seeds
            for arm in self.arms
        ]

    def _run(self, task: str, arm: str, seed: int) -> "StudyRun":
        own = (f"run.seed={seed}", f"run.budget_tokens={self.study.budget_tokens}")
        overrides = (*self.study.set, *self.tasks.get(task, ()), *self.arms[arm], *own)
        place = [self.study.name, task, arm, str(seed)]
        try:
            config = load_config(Path(self.study.base), overrides)
        except ConfigError as error:
            raise ConfigError(f"arm {arm}{f' on {task}' if task else ''}: {error}") from None
        return StudyRun(task, arm, seed, "-".join(filter(None, place)), overrides, config)


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: its place, and what it is trained with. The task may be nameless."""

    task: str
    arm: str
    seed: int
    run_id: str
    overrides: tuple[str, ...]
    config: RunConfig


def load_study(path: Path) -> Study:
    """Read a study; `path` may also name a shipped one.

    Raises:
        ConfigError: no such file, not TOML, or not as expected.
    """
    shipped = CONFIGS_DIR / path.name
    candidates = (path, path.with_suffix(".toml"), shipped, shipped.with_suffix(".toml"))
    found = next((p for p in candidates if p.is_file()), None)
    if found is None:
        names = ", ".join(sorted(p.stem for p in CONFIGS_DIR.glob("study-*.toml")))
        raise ConfigError(f"no study at {path}: give a TOML file, or one of the shipped {names}")
    try:
        return Study.model_validate(tomllib.loads(found.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{found} is not valid TOML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in error.errors()
        )
        raise ConfigError(f"{found}: {problems}") from None


def run_study(
    store: Store,
    study: Study,
    orchestrator: Literal["prefect", "none"],
    progress: Progress,
) -> None:
    """Train what of the study is not finished, one run after the other.

    Raises:
        ConfigError: a run of the same name has another configuration.
        StorageError: a run failed; what is finished is kept, and the same call goes on.
    """
    runs = study.runs()
    for run in runs:
        _check_same(store, run)
    with progress.phase(f"runs of {study.study.name}", len(runs)) as advance:
        for run in runs:
            if not is_finished(store, run.run_id):
                _train(store, study, run, orchestrator)
            advance(1)


def _check_same(store: Store, run: StudyRun) -> None:
    if store.read("runs", run_id=run.run_id) and stored_config(store, run.run_id) != run.config:
        raise ConfigError(
            f"run {run.run_id} is in {store.path} with another configuration than the study gives "
            "its arm: choose another `study.name`, or another store"
        )


def _train(store: Store, study: Study, run: StudyRun, orchestrator: str) -> None:
    """Train one run in a process of its own: an engine's memory is free again afterwards."""
    if store.read("runs", run_id=run.run_id):
        arguments = ["--resume", run.run_id]
    else:
        given = [part for o in run.overrides for part in ("--set", o)]
        arguments = [study.study.base, "--run-id", run.run_id, *given]
    command = [sys.executable, "-m", "flows.cli", "train", *arguments]
    command += ["--orchestrator", orchestrator, "--store", str(store.path)]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise storage.StorageError(
            f"run {run.run_id} ended with exit code {code}, its message above; the same command "
            "goes on with it"
        )
