# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/installed ## an environment of its own in .venv, with pinned versions

# torch comes first and alone: left to another package's range, pip would fetch gigabytes of CUDA
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev,demo]'
	@touch $@

demo: install ## FedBuff against its rivals on real data: a table and a plot, in half a minute
	@rm -rf runs/demo
	$(BIN)/fedbuff demo

test: install ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: install ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install ## how fast it is: training, the engine, privacy and secure aggregation, the timeline; in an hour
	$(BIN)/fedbuff bench
	$(BIN)/python benchmarks/timeline.py

soak: install ## a deployment whose processes are killed 20 times, in half an hour
	$(BIN)/python tests/soak.py

clean: ## remove the environment and what the tools cached
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help install demo test lint bench soak clean
