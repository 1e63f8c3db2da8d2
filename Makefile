# Everything runs from a clone with make, git and Python 3.10 or later with venv; nothing else need be installed.
# All that is fetched goes into .venv/ and .tools/ inside the clone. Recipes use relative paths only, so that the clone
# may lie anywhere, also in a folder with a space in its name.

PYTHON ?= python3
# Passed to pip, such as --extra-index-url for PyTorch's index of CPU builds (see CONTRIBUTING.md).
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup tools demo test soak check format bench dashboard wheel clean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.* ## \(.*\)/\1\t\2/p' Makefile | while IFS='	' read -r name what; do \
		printf '  make %-10s %s\n' "$$name" "$$what"; done

setup: ## make .venv with distclip and its tools (quick when it is up to date)
	@PYTHON='$(PYTHON)' tools/setup_venv.sh $(PIP_ARGS)

tools: ## fetch Prometheus and Alertmanager into .tools (Debian and its relatives)
	@tools/fetch_servers.sh

demo: setup tools ## train a small model with injected faults and watch distclip handle them (2 minutes)
	@$(BIN)/python -m distclip.cli demo $(DEMO_ARGS)

test: setup tools ## run every test but the long ones
	$(BIN)/python -m pytest -m "not soak" $(PYTEST_ARGS)

soak: setup tools ## run the long tests
	$(BIN)/python -m pytest -m soak --durations=0 $(PYTEST_ARGS)

check: setup ## lint, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: setup ## rewrite the sources as `make check` wants them
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: setup ## time distclip against torch's own calls
	$(BIN)/python benchmarks/hot_path.py $(BENCH_ARGS)

dashboard: setup ## write monitoring/grafana/*.json anew from tools/make_dashboard.py
	$(BIN)/python tools/make_dashboard.py

wheel: setup ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove all that the other targets made, .venv and .tools included
	rm -rf .venv .tools .tools.* dist build demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
