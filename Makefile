# `make run` and `make test` need Linux, Python 3.11 or newer, and a package index. Everything lands in .venv and models/.

SHELL := bash
.DEFAULT_GOAL := help

CONFIG ?= configs/demo.yaml
ARGS ?=
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

BIN := .venv/bin
# A new key, and so a new installation, when what is to be installed changes; else starting takes seconds.
KEY := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c 1-16)
RUN := .venv/.installed-run-$(KEY)
TEST := .venv/.installed-test-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test check bench model clean help

run: $(RUN) model  ## install, fetch the demo model, serve it on 127.0.0.1:8000 (CONFIG=file for another fleet)
	@exec $(BIN)/pagefleet up $(CONFIG)

test: $(TEST)  ## install with test extras and run the tests (ARGS='-k name' for some, ARGS='-n 0' in one process)
	@$(BIN)/python scripts/fetch_demo_model.py || echo "no demo model: tests that need it are skipped"
	@scripts/services.sh
	@PATH="$$PATH:/usr/sbin" exec $(BIN)/python -m pytest -n auto $(ARGS)

check: $(TEST)  ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(TEST) model  ## serving on this machine's CPU beside transformers
	@exec $(BIN)/python bench/cpu_serving.py $(ARGS)

model: $(RUN)  ## fetch the demo model
	@$(BIN)/python scripts/fetch_demo_model.py

clean:  ## remove what make made, also the model; state directories of fleets stay
	rm -rf .venv models *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	@test ! -e .pagefleet || echo "left: .pagefleet, a fleet's logs and state; when it is down, rm -r .pagefleet"

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## *(.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with the venv module is needed (PYTHON=path says which)"; exit 1; }
	@$(PYTHON) -m venv .venv

$(RUN): | $(BIN)/python
	@echo "installing into .venv; the first time this takes a minute or two"
	@$(PIP) -e .
	@rm -f .venv/.installed-* && touch $@

$(TEST): | $(RUN)
	@echo "installing test extras into .venv"
	@$(PIP) -e '.[test,check]'
	@touch $@
