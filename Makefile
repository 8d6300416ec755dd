# Every target works on a machine that has only Python 3.10 or newer and make: it creates .venv and installs, once, the
# extra that it needs, at the versions in constraints.txt. pip's own configuration decides where packages come from,
# and which build of torch. A torch of the pinned version that is already in .venv is kept.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Tests at a time, for two cores: many wait for a time-out. Those over several ranks start up to five processes each.
WORKERS ?= 3
BENCH_ARGS ?=
NETWORK_ARGS ?=
FUZZ_ARGS ?=
SOAK_ARGS ?=
NOX_ARGS ?=

.DEFAULT_GOAL := help
# Two pips in one environment would race.
.NOTPARALLEL:
.PHONY: help demo test fuzz soak lint bench network matrix clean

help:
	@echo "make demo   run examples/demo.py; results in out/demo/ (DEMO_ARGS='--steps 100')"
	@echo "make test   run the tests (PYTEST_ARGS='-k name')"
	@echo "make fuzz   thousands of random cases against the formulas, and broken checkpoints (FUZZ_ARGS='-k steps')"
	@echo "make soak   train for long, disturbed, and watch memory, replicas and loss (SOAK_ARGS='--steps 30000')"
	@echo "make lint   ruff, mypy and import-linter"
	@echo "make bench  run the benchmarks (BENCH_ARGS='-k name'); results in out/"
	@echo "make network  train over emulated slow links, as root (NETWORK_ARGS='--rates 100mbit'); results in out/network/"
	@echo "make matrix  run the tests over older and newer Pythons, torches and Tritons (NOX_ARGS='-p 3.13')"
	@echo "make clean  remove what was built; .venv stays"

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

# Neighbours stay on one worker, which has what they share; one without work takes some from another.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) tests/fuzz --hypothesis-profile fuzz --timeout 14400 $(FUZZ_ARGS)

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	@mkdir -p out
	$(BIN)/python -m pytest benchmarks/ --benchmark-only --benchmark-json out/benchmarks.json $(BENCH_ARGS)

network: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.network --output out/network $(NETWORK_ARGS)

matrix: $(VENV)/.installed-matrix
	$(BIN)/nox $(NOX_ARGS)

clean:
	rm -rf build dist out .nox *.egg-info .benchmarks .coverage .coverage.* htmlcov
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# pip would compile every module of torch and Triton, one after the other: leave that to the first import of those that
# are used, which needs leave to write bytecode. The import at the end does it, and shows that the install works.
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[$*]'
	$(BIN)/python -c 'import onebit_triton'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-test $(VENV)/.installed-bench)$(if $(filter test,$*),$(VENV)/.installed-bench)
