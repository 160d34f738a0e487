"""Every algorithm, recipe and number that docs/algorithms.md states is the code's."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.config import RunConfig, load_config
from rrl_core.algorithms.objectives import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
STATED = [
    (found[1], json.loads(found[2]), row[2].strip("`"))
    for row in ROWS
    if len(row) == 3
    for found in re.finditer(r"`([\w.]+) = ([^`]+)`", row[1])
]
RECIPES = [row for row in ROWS if len(row) == 6 and row[0].startswith("`")]


def value_of(name: str) -> Any:
    """Return a default of the configuration, or a constant of a module."""
    if name.startswith("rrl_core."):
        module, _, constant = name.rpartition(".")
        return getattr(importlib.import_module(module), constant)
    section, key = name.split(".")
    return getattr(getattr(RunConfig(), section), key)


@pytest.mark.parametrize(("name", "stated", "path"), STATED, ids=[name for name, *_ in STATED])
def test_every_stated_number_is_the_one_in_force(name: str, stated: Any, path: str):
    assert value_of(name) == stated
    source = (ROOT / path).read_text(encoding="utf-8")
    if name.startswith("rrl_core."):
        assert path == name.rpartition(".")[0].replace(".", "/") + ".py"
        assert re.search(rf"^(\w+, )*{name.rpartition('.')[2]}\b.*=", source, re.M)


def test_the_table_has_every_algorithm_as_it_is():
    stated = {row[0].strip("`"): row[1:] for row in ROWS if row[0].strip("`") in ALGORITHMS}
    assert set(stated) == set(ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        flags = (algorithm.dynamic_sampling, algorithm.has_ratio, algorithm.has_critic)
        assert stated[name] == [
            _word(algorithm.divide_by_std),
            f"`{algorithm.reduction}`",
            f"{algorithm.clip_low:g}",
            f"{algorithm.clip_high:g}",
            *map(_word, flags),
        ]


def test_the_table_has_every_recipe_as_it_is():
    shipped = {p.stem for p in (ROOT / "configs").glob("*.toml") if not p.match("study-*")}
    assert {row[0].strip("`") for row in RECIPES} == shipped
    for name, algorithm, mode, units, gate, rate in RECIPES:
        config = load_config(Path(name.strip("`")))
        assert algorithm == f"`{config.learner.algorithm}`"
        assert mode == config.run.mode
        assert units == (", ".join(config.replay.units) or "nothing")
        assert gate == (config.review.gate or "off")
        assert float(rate) == config.learner.learning_rate


def test_the_formulas_hold_the_numbers_of_the_tables():
    """A formula names a number by itself; it must be the stated one."""
    stated = {name: value for name, value, _ in STATED}
    assert f"{1 - stated['replay.uniform_share']:g} w_i" in TEXT
    assert f"+ {stated['replay.uniform_share']:g} / n" in TEXT
    assert f"/ {stated['rrl_core.replay.credit.SPREAD']:g}   while" in TEXT
    assert f"p_hat(x) <= {stated['rrl_core.replay.credit.RARELY_SOLVED']:g}" in TEXT
    assert f"the last {stated['rrl_core.replay.credit.RECENT_ATTEMPTS']} attempts" in TEXT
    assert f"rarity_i^{stated['rrl_core.replay.factors.RARITY_POWER']:g}" in TEXT
    assert "(std r + 1e-4)" in TEXT
    assert stated["rrl_core.algorithms.advantages.STD_EPSILON"] == 1e-4


def _word(flag: bool) -> str:
    return "yes" if flag else "no"
