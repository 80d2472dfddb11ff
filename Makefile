# Everything a developer or a build needs, from a bare python3 (3.11 or newer).

PYTHON     ?= python3
UV_VERSION := 0.13.7
ARGS       ?=
JOBS       ?= 3

BIN   := .venv/bin
UV    := .uv/bin/uv
STAMP := .venv/.stamp-setup
REDIS := .venv/redis/redis-server

# uv works on this folder's .venv with the interpreter named above, never one that it fetches.
export UV_PROJECT_ENVIRONMENT := .venv
export UV_PYTHON_DOWNLOADS    := never
unexport VIRTUAL_ENV
# Processes come and go here by the hundred, and start from compiled code several times faster.
unexport PYTHONDONTWRITEBYTECODE
# Trust what the machine trusts, so that it works behind a company's proxy too.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),)
export UV_SYSTEM_CERTS := 1
endif

.DEFAULT_GOAL := help
.PHONY: help setup run test check bench bench-pipeline bench-cluster bench-live chaos chaos-pipeline hostile model soak simulate fuzz walk format lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv from uv.lock

run: setup $(REDIS) ## Run the demo (ARGS="...")
	$(BIN)/python -m penstock.cli demo $(ARGS)

test: check $(REDIS) ## Run the checks, then the tests (ARGS="tests/unit -k name")
	sh scripts/prepare_tests.sh
	$(if $(ARGS),,$(BIN)/python -m tests.hostile.command --short --seed 1)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1 $(ARGS)

check: setup ## Lint, format, types, layers, sizes, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py
	@if [ -d proto ]; then set -x; $(BIN)/python scripts/generate_proto.py --check; fi

bench: setup ## Measure the queue (ARGS="...")
	$(BIN)/penstock bench queue $(ARGS)

bench-pipeline: setup $(REDIS) ## Measure the pipeline (ARGS="...")
	$(BIN)/penstock bench pipeline $(ARGS)

bench-cluster: setup ## Measure three nodes on this machine (ARGS="...")
	$(BIN)/penstock bench cluster $(ARGS)

bench-live: setup $(REDIS) ## Measure the live path (ARGS="...")
	$(BIN)/penstock bench live $(ARGS)

chaos: setup ## Break a cluster of three nodes under load (ARGS="--minutes 10 --faults 60 --seed 1")
	sh scripts/prepare_tests.sh
	$(BIN)/python scripts/chaos.py $(ARGS)

chaos-pipeline: setup $(REDIS) ## Kill a pipeline's driver, node and Redis under load; on a cluster executors too (ARGS="--kills 20 --cluster")
	$(BIN)/python scripts/pipeline_chaos.py $(ARGS)

hostile: setup ## Attack a node that serves a healthy client (ARGS="--minutes 5 --seed 1 --only NAME")
	sh scripts/prepare_tests.sh
	$(BIN)/python -m tests.hostile.command $(ARGS)

walk: setup ## Show the way of a put through the code (ARGS="pop", "delta" or "takeover")
	$(BIN)/python scripts/walk.py $(ARGS)

model: setup ## Explore the replication rules, larger (ARGS="--epochs 3 --entries 2 --prompt")
	$(BIN)/python -m verification.model.check $(ARGS)

soak: setup ## Crash a server at random points for a while (ARGS="--minutes 30 --seed 1")
	$(BIN)/python scripts/crash_soak.py $(ARGS)

simulate: setup ## Run clusters from seeds, with faults and checkers (ARGS="--seeds 10000 --jobs 2")
	$(BIN)/python -m verification.simulation.command $(ARGS)

fuzz: setup ## Send hostile bytes to a node for a while (ARGS="--minutes 10 --cluster")
	$(BIN)/python -m verification.fuzz.command $(ARGS)

format: setup ## Rewrite the code to the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(UV) ## Resolve the dependencies again
	$(UV) lock --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	for flow in airflow dagster; do \
	    $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	        examples/$$flow/requirements.in --output-file examples/$$flow/requirements.txt || exit 1; \
	done

clean: ## Remove what the other targets made
	rm -rf .venv .uv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf build dist htmlcov .coverage penstock-data bench-results penstock-demo.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml uv.lock | $(UV)
	$(UV) sync --locked --all-extras --all-groups \
	    --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	@touch $@

# A server of the machine comes first; this one is a link to it, or Debian's, unpacked.
$(REDIS): | $(STAMP)
	sh scripts/fetch_redis.sh .venv

# Airflow and Dagster have no place among our dependencies; the tests have these made when they need them.
.venv/%/.stamp-flow: examples/%/requirements.txt | $(STAMP)
	$(UV) venv --quiet --clear --python $(BIN)/python .venv/$*
	$(UV) pip sync --quiet --require-hashes --python .venv/$*/bin/python $<
	@touch $@

$(UV):
	PYTHON="$(PYTHON)" UV_VERSION="$(UV_VERSION)" sh scripts/bootstrap_uv.sh .uv
