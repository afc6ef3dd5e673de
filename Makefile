# Every target does its own set-up first, and skips it when nothing changed.
# PYTHON           the Python (3.11 to 3.14) that makes .venv
# RANKFOLD_PYTHON  a Python that already has vLLM: used as it is, nothing is installed into it
# RANKFOLD_TORCH_INDEX  index URL to take PyTorch from, for a CPU build in place of CUDA's
PYTHON ?= python3
TOPOLOGY ?= tep2pp2
CODE := $(wildcard sim reference model properties rankfold scripts)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# scripts/setup.py prints the interpreter to use, and nothing else, on standard output.
setup = python=$$($(PYTHON) scripts/setup.py $(1))
rankfold = "$$python" -c 'import sys; from rankfold.cli import main; sys.exit(main())'

.PHONY: help setup check test lint types bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup: ## make .venv ready (PyTorch, vLLM's Python code, tools)
	@$(call setup,check) && echo "ready: $$python"

check: ## check one topology against the reference: make check TOPOLOGY=tep4pp2
	@$(call setup,check) && $(rankfold) check $(TOPOLOGY)

test: ## ruff, mypy and pytest: make test PYTEST_ARGS="-k stamp"
	@$(call setup,test) && set -x && "$$python" -m ruff check . && "$$python" -m mypy $(CODE) && \
	"$$python" -m pytest -n auto --maxprocesses=8 --dist=worksteal $(PYTEST_ARGS)

lint: ## ruff alone
	@$(call setup,lint) && "$$python" -m ruff check .

types: ## mypy alone: strict, except where vLLM's untyped names come in
	@$(call setup,types) && "$$python" -m mypy $(CODE)

bench: ## the benchmark: what a collective and a step cost
	@$(call setup,check) && $(rankfold) bench

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
