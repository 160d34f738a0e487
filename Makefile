# `make demo` trains a real model on this machine; `make test` runs the tests. Both set up everything first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := configs/pins-cpu.txt
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
STORE ?= rrl-data

.PHONY: setup demo test test-slow lint bench soak clean

setup: $(VENV)/.installed

$(VENV)/.installed: $(PINS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rrl needs Python 3.11 or later; this is " + sys.version.split()[0] + ": make PYTHON=python3.11 setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=24' 'setuptools==78.1.1'
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) --no-print-directory install-pinned; \
	else echo "no pins for $$(uname -sm): installing the newest allowed versions, without vLLM"; $(BIN)/python -m pip install -q -e '.[dev]'; fi
	touch $@

.PHONY: install-pinned
install-pinned:  # torch first: a CPU build known to pip, else the CPU index of the PyTorch project
	$(BIN)/python -m pip install -q --no-deps '$(TORCH)' || $(BIN)/python -m pip install -q --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(BIN)/python -m pip install -q --no-deps -r $(PINS)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .

demo: setup
	$(BIN)/rrl model fetch smollm2-135m
	$(BIN)/rrl train configs/demo.toml --store $(STORE)

# One thread a process: as quick with tiny models, and two of them wait for each other beside any
# other program. Two processes, each with whole files, since fixtures belong to files.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=20

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or vllm' -n 2 --dist loadfile --timeout 900 --durations=20

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/iteration_vs_trl.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/log.py
	$(BIN)/python benchmarks/buffer.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/value_features.py
	$(BIN)/python benchmarks/rescore.py
	$(BIN)/python benchmarks/retrieval.py
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/report.py

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 7200 -s
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=search --timeout 1800

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
