"""The house: who imports whom, how few openings lead to the loss, and what stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "rrl_core": {"storage", "flows", "prefect", "mlflow", "duckdb", "polars"},
    "storage": {"rrl_core", "flows", "torch", "transformers", "prefect", "mlflow", "vllm", "peft"},
    "rrl_core/tasks": {"torch", "transformers", "vllm", "peft"},
}
HEAVY = {"torch", "transformers", "vllm", "prefect", "mlflow", "polars", "pyarrow"}
OPENINGS = (
    ("flows/train.py", "flows.tasks", "flows/tasks.py"),
    ("flows/tasks.py", "rrl_core.policy.learner", "rrl_core/policy/learner.py"),
    (
        "rrl_core/policy/learner.py",
        "rrl_core.algorithms.objectives",
        "rrl_core/algorithms/objectives.py",
    ),
)


def imported_modules(path: Path) -> set[str]:
    """Every module named by an import anywhere in the file, with `from a import b` also as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_only_what_they_may(package: str):
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_modules(path)}
        assert not roots & FORBIDDEN[package], path


def test_only_tracking_imports_mlflow():
    importers = {
        str(path.relative_to(ROOT))
        for package in ("flows", "rrl_core", "storage")
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == "mlflow" for name in imported_modules(path))
    }
    assert importers == {"flows/tracking.py"}


def test_only_one_file_imports_vllm():
    importers = {
        str(path.relative_to(ROOT))
        for package in ("flows", "rrl_core", "storage")
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == "vllm" for name in imported_modules(path))
    }
    assert importers == {"rrl_core/sampling/vllm_engine.py"}


@pytest.mark.parametrize(("opened", "module", "leads_to"), OPENINGS)
def test_four_openings_lead_from_train_to_the_loss(opened: str, module: str, leads_to: str):
    assert module in imported_modules(ROOT / opened)
    assert (ROOT / leads_to).is_file()


def test_train_flow_stays_short():
    assert len((ROOT / "flows/train.py").read_text().splitlines()) <= 150


def loaded_modules(arguments: list[str], cwd: Path) -> set[str]:
    """Top-level modules loaded by `rrl ARGUMENTS` in a fresh interpreter."""
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        f"sys.argv = ['rrl', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('LOADED', *{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_loads_no_heavy_package(tmp_path: Path):
    assert not loaded_modules(["--help"], tmp_path) & (HEAVY | {"duckdb"})


def test_sql_loads_no_model_or_orchestration_package(tmp_path: Path):
    import storage

    storage.open(tmp_path / "store", create=True)
    arguments = ["sql", "select count(*) from rollouts", "--store", "store"]
    assert not loaded_modules(arguments, tmp_path) & (HEAVY | {"duckdb"})  # a child asks


def test_the_process_that_asks_loads_only_duckdb():
    code = "import flows.asking, storage.console, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "duckdb" in loaded
    assert not loaded & (HEAVY | {"typer", "rich", "numpy"})


def test_doctor_loads_no_heavy_package(tmp_path: Path):
    assert not loaded_modules(["doctor"], tmp_path) & HEAVY
