# Every target makes its own virtual environment when it is missing. Only Python 3.11+, pip and make are needed.
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TIMES ?= 20
OUT ?= .demo

# A folder here is called `kernels`, a name that transformers probes for.
export PYTHONSAFEPATH = 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-serving lint format soak clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv:  ## the virtual environment, with the pinned versions
	@.ci/venv $(VENV)

demo: venv  ## the real server twice, the same load on both, a report in .demo/
	@$(BIN)/moe-backend demo --out $(OUT) $(ARGS)

test: venv  ## the whole suite
	@.ci/test $(BIN)/python $(ARGS)

test-unit: venv  ## everything but the real servers
	@.ci/test $(BIN)/python -m "not serving" $(ARGS)

test-serving: venv  ## only the real servers
	@.ci/test $(BIN)/python -m serving $(ARGS)

lint: venv  ## ruff, mypy, shellcheck where there is one
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck .ci/run .ci/venv .ci/test .ci/browser serve_examples/*.sh; \
	else echo "shellcheck is not installed: shell scripts not checked"; fi

format: venv  ## bring the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

soak: venv  ## restart the server TIMES=20 times and look for leaks
	@$(BIN)/python tests/serving/soak.py --times $(TIMES) $(ARGS)

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) .demo build *.egg-info
