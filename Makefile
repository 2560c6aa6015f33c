# Every target sets up what it needs by itself; only Python 3.11+ and make are asked of the machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install demo test test-slow test-learning test-peers peers-env baselines-env mutants \
	kills audit lint wheels bench bench-env bench-gpu tables notebooks docs clean

install: $(STAMP)

PROJECTS := pyproject.toml packages/charging/pyproject.toml packages/studies/pyproject.toml

$(STAMP): $(PROJECTS) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[market,federated,cluster,gym,docs,dev]" \
		--editable "packages/charging[serve]" --editable packages/studies
	touch $(STAMP) $(DEMO_STAMP)

# The demo needs no Ray, Flower or linter.
$(DEMO_STAMP): $(PROJECTS) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . --editable packages/charging
	touch $(DEMO_STAMP)

demo: $(DEMO_STAMP)
	$(BIN)/apportion demo --out runs/demo

# PYTEST_SEED=3 make test asks the same of other random numbers.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile \
	$(if $(PYTEST_SEED),--hypothesis-seed=$(PYTEST_SEED))

SOURCES := src packages/charging/src packages/studies/src
TESTS := tests packages/charging/tests packages/studies/tests

# The tests, and the examples in the docstrings.
test: install
	$(PYTEST) --no-loadscope-reorder --doctest-modules $(SOURCES) $(TESTS)

# The tests that train long, and the long versions of checks that `make test` runs short.
test-slow: install
	$(PYTEST) -m slow

# The tests that train and compare: worth running under other instruction sets (XLA_FLAGS).
test-learning: install
	$(PYTEST) -m "not peer" tests/test_training.py tests/learners tests/domains/test_budget.py \
		packages/charging/tests/test_charging_backtest.py tests/domains/portfolio/test_simulated.py

# Other libraries in environments of their own, for the tests that hold ours against them.
peers-env: .peers/acnportal/.installed

.peers/acnportal/.installed:
	test -x .peers/acnportal/bin/python || $(PYTHON) -m venv .peers/acnportal
	.peers/acnportal/bin/python -m pip install --quiet --disable-pip-version-check acnportal==0.3.3
	touch $@

# Stable-Baselines3 trains on our environments, so that ours is installed beside it; it brings torch along:
# make baselines-env TORCH=torch==2.13.0+cpu takes a small one where the machine knows where to find it.
TORCH ?= torch
baselines-env: .peers/baselines/.installed

.peers/baselines/.installed: pyproject.toml packages/charging/pyproject.toml constraints.txt
	test -x .peers/baselines/bin/python || $(PYTHON) -m venv .peers/baselines
	.peers/baselines/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[gym,dev]" \
		--editable packages/charging stable-baselines3 "$(TORCH)"
	touch $@

# A peer that is not installed is skipped, and the summary says which; PEERS=required fails instead.
BASELINES := .peers/baselines/bin/python
test-peers: install
	PEERS=$(PEERS) $(if $(wildcard $(BASELINES)),$(BASELINES),$(BIN)/python) \
		-m pytest -m peer tests/bridges/test_gymnasium.py
	PEERS=$(PEERS) $(PYTEST) -m peer --ignore tests/bridges/test_gymnasium.py

# Deliberate faults, and whether the tests notice them: ten minutes; not part of CI.
mutants: install
	$(BIN)/python tests/mutants/run.py

# Jobs of every kind killed at random moments, and whether they end as if nobody had: not part of CI.
kills: install
	$(BIN)/python tests/kills/run.py

# Known vulnerabilities of the pinned packages, in an environment of its own; fails where nothing is known.
audit: .peers/audit/.installed
	.peers/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

.peers/audit/.installed:
	test -x .peers/audit/bin/python || $(PYTHON) -m venv .peers/audit
	.peers/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project pyright-strict.json
	$(BIN)/lint-imports

# Build the three wheels and try them in a fresh environment without the source tree.
wheels:
	PYTHON=$(PYTHON) bash .ci/wheels

# Tables of speed, against other libraries where their environments are there (make bench-env). Run it on an
# idle machine, then `make tables`.
bench: install
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/federated.py
	$(BIN)/python benchmarks/portfolio.py
	$(BIN)/python benchmarks/charging.py $(call peer,acnportal)
	$(if $(call peer,torch),$(BIN)/python benchmarks/gradient_step.py cpu $(call peer,torch), \
		@echo "skipped gradient_step: no .peers/torch (make bench-env)")
peer = $(if $(wildcard .peers/$(1)/.installed),--peer .peers/$(1)/bin/python)

# TORCH=torch==2.13.0+cpu takes a small one where the machine knows where to find it.
bench-env: .peers/acnportal/.installed .peers/torch/.installed

.peers/torch/.installed:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	touch $@

# On a machine with a graphics card; MNIST=mnist.npz adds the federated episodes.
JAX_GPU ?= jax[cuda12]
bench-gpu: .peers/gpu/.installed
	.peers/gpu/bin/python benchmarks/gradient_step.py gpu
	$(if $(MNIST),.peers/gpu/bin/python benchmarks/federated.py --images $(MNIST))

.peers/gpu/.installed: pyproject.toml constraints.txt
	test -x .peers/gpu/bin/python || $(PYTHON) -m venv .peers/gpu
	.peers/gpu/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable . "$(JAX_GPU)" "$(TORCH)"
	touch $@

# The tables on the pages, from what studies and benchmarks wrote: committed, and written by `make tables`.
tables: install
	$(BIN)/python docs/tables.py

# The tutorials that are notebooks, run again with their outputs saved.
notebooks: install
	$(BIN)/python docs/notebooks.py

docs: install
	$(BIN)/python docs/tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .peers site build dist .pytest_cache .ruff_cache .hypothesis
