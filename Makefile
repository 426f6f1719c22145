# SPDX-License-Identifier: BSD-3-Clause
# Needs Python 3.10 or newer and make; everything else goes into $(VENV).
#
#   make demo     the quickstart: a server of its own, a real worker, a replayed dead letter
#   make test     the whole test suite; PGQUEUE_TEST_DSN names a server to use instead
#   make check    what CI runs: lint, types, import contracts, tests

VENV ?= .venv
# Most tests wait for another process: three at a time, each with a server of its own.
PYTEST_ARGS ?= -n 3

# A version manager's stub may be on the PATH and still not run: ask each one.
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python3.10 python
PYTHON ?= $(shell for p in $(PYTHONS); do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
		>/dev/null 2>&1 && { command -v "$$p"; break; }; done)

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint format types imports check clean

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(INSTALLED)
	@$(BIN)/python examples/quickstart/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-cache --no-logo

check: lint types imports test

# Anew when the dependencies change; a half-made environment has no stamp and is made again.
$(INSTALLED): setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { \
		echo "make: found no Python 3.10 or newer with venv and ensurepip" \
			"(Debian and Ubuntu: install python3-venv); or name one: make PYTHON=..." >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON) (once; takes a minute or two)"
	@rm -f $(INSTALLED)
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[embedded,binary,test,lint]'
	@touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
