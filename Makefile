# Two commands do everything on a fresh machine with Python 3.11 and make: `make train` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
PEERS  ?= .venv-peers
BIN    := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup train serve test test-fast lint bench bench-peers debian clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

# torch==2.13.0, by that exact version, is the CPU build; constraints.txt pins it and everything else.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed  ## the environment, in .venv

train: setup  ## train the quickstart recipe on two local workers
	@$(BIN)/nestpipe train quickstart

serve: setup  ## train a small ranking model if there is none, serve it, send 200 requests and print what happened
	@$(BIN)/python examples/serving.py

# A fresh clone has no compiled kernels: they are made while lint runs, once and not by every test process.
test: setup  ## lint, then all tests but long proofs on the simulated device (accelerator-check), in two processes
	@PYTHONPATH=tests/support $(BIN)/python tests/support/workers_warm.py & $(MAKE) --no-print-directory lint || { wait; exit 1; }; wait
	@$(PYTEST) -m "not accelerator"

test-fast: setup  ## the tests that take no time, in two processes: a minute and a half, for the loop while working
	@$(PYTEST) -m "not slow"

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check src tests bench examples
	@$(BIN)/ruff format --check src tests bench examples
	@$(BIN)/mypy

bench: setup bench-peers  ## the DLRM ladder beside TorchRec on hosts with 500 mbit links, as a table and a page (root)
	@$(BIN)/nestpipe bench dlrm --peers torchrec --rounds 6 --json bench.json --page bench.html

bench-peers: $(PEERS)/.installed  ## TorchRec, in an environment of its own

$(PEERS)/.installed: bench/peers/requirements.txt bench/peers/requirements-nodeps.txt
	@echo "Setting up $(PEERS) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install -q --disable-pip-version-check -r bench/peers/requirements.txt
	@$(PEERS)/bin/pip install -q --disable-pip-version-check --no-deps -r bench/peers/requirements-nodeps.txt
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

.PHONY: docs
docs: $(VENV)/.installed-docs  ## the documentation as a site, in site/; fails on any warning
	@$(BIN)/python docs/assemble.py
	@$(BIN)/zensical build --strict --clean

$(VENV)/.installed-triton: $(VENV)/.installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[triton]'
	@touch $@

DEVICE ?= auto
.PHONY: accelerator-check
accelerator-check: $(VENV)/.installed-triton  ## exactness, sanitizer, kernels and speed on an accelerator; DEVICE=sim runs it anywhere
	@$(BIN)/python bench/accelerator_check.py --device $(DEVICE)

debian:  ## Debian packages that a bare image lacks (root)
	apt-get update -qq && apt-get install -y -qq python3 python3-venv python3-dev make bsdextrautils iproute2 chromium

clean:  ## remove environments, caches and run directories
	rm -rf $(VENV) $(PEERS) runs bench.json bench.html .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache build dist site src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
