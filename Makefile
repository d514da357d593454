# make demo: trains on this machine, from nothing.   make test: every check.   make check: style and types alone.
# make docs: docs/commands.md, from the commands themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs clean

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/test
	$(BIN)/python docs/write_commands.py

$(VENV)/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/test: $(VENV)/demo
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[vision,s3,bench,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
