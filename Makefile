# make parity   run the main job and write report/index.html     make parity ARGS="--quick"
# make test     ruff, mypy and the whole test suite              make test ARGS="-k schedules"
# Both do all their set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt

.PHONY: parity test clean

parity: $(VENV)/.installed-parity
	$(BIN)/python -m parity_tests $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 $(ARGS)

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "samestep needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) report
