# One command for each habit. `make report` and `make test` set themselves up; each works alone.
VENV ?= .venv
BIN := $(VENV)/bin
# The first of these that is Python 3.11 to 3.13; PYTHON=/path/to/python chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
EXTRAS := cpu,notebooks,dask,transformers,dev,docs
READY := $(VENV)/.ready
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup report test lint format docs check-constraints release-check audit lab screenshots clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "mlakit needs Python 3.11, 3.12 or 3.13; none is on PATH. Install one, or: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "setting up $(VENV) with $(PYTHON) (a minute or more, once)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@need="$$($(BIN)/python -m mlakit.versions)"; \
	  test -z "$$need" || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "$$need"
	@touch $@

setup: $(READY)  ## make the virtual environment (report and test do this themselves)

report: $(READY)  ## measure this machine and write an offline HTML report; prints its path
	@$(BIN)/mlakit report

test: $(READY)  ## run every test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(READY)  ## ruff, formatting, types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(READY)  ## rewrite in the one style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(READY)  ## build the documentation into site/, offline
	@$(BIN)/python -m mkdocs build --strict -q && echo "$(CURDIR)/site/index.html"

release-check: $(READY)  ## build sdist and wheel; install and use the wheel in a clean environment
	@bash .ci/release-check

audit: $(READY)  ## known vulnerabilities of the pinned set; exit code 4 if none could be looked up
	@$(BIN)/python -m pip check -q && $(BIN)/python .ci/audit

check-constraints: $(READY)  ## resolve constraints.txt for each Python we support
	@for p in 3.11.7 3.12 3.13; do \
	  $(BIN)/uv pip compile -q --python-version $$p -c constraints.txt --all-extras pyproject.toml -o /dev/null \
	  && echo "Python $$p: resolved" || exit 1; done

lab: $(READY)  ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab notebooks

screenshots: $(READY)  ## make docs/explore-*.png anew, in a headless Chromium
	@MLAKIT_WRITE_IMAGES=1 $(BIN)/python -m pytest tests/test_lab_browser.py -k looks_like

clean:  ## remove the virtual environment and the caches, never the runs
	@rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
