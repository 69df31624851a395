# Weft's commands. Each installs what it needs: system packages by apt (as root), Python packages into .venv.
#
#   make lab     show it working on this machine        make test    all tests
#   make check   the fast half of the tests (no root)   make e2e     slower tests, as a user installs and runs it
#   make bench   every figure, with its peer            make soak    the long runs
#   make figures the last bench run into docs/figures.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: lab check test e2e soak bench figures docs format clean

lab: $(READY)
	scripts/install-system-packages lab
	$(BIN)/weft lab

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/check-vocabulary
	$(PYTEST) tests/unit

test: check
	scripts/install-system-packages etcd lab ovs
	scripts/build-cnitool
	scripts/build-kubernetes
	$(PYTEST) tests/contracts tests/system tests/lab

e2e: $(READY)
	scripts/install-system-packages e2e etcd kubernetes lab ovs
	scripts/build-cnitool
	scripts/build-kubernetes
	scripts/build-kubernetes e2e.test agnhost
	$(BIN)/python -m pytest tests/e2e

soak: $(READY)
	scripts/install-system-packages etcd image kubernetes lab ovs
	scripts/build-kubernetes
	scripts/build-kubernetes e2e.test agnhost
	scripts/build-containerd
	$(BIN)/python -m pytest -m soak --timeout 3600 tests

bench: $(READY)
	scripts/install-system-packages etcd kubernetes lab bench
	$(BIN)/python -m bench $(BENCH)

figures: $(READY)
	$(BIN)/python -m bench.report $(if $(wildcard build/bench.json),--merge build/bench.json) > docs/figures.md

docs: $(READY)
	$(BIN)/python -m weft.ctl.netctl.reference > docs/reference/netctl.md
	$(BIN)/python -m weft.ctl.netctl.completion src/weft/ctl/completions
	$(BIN)/python -m weft.master.api.reference objects > docs/reference/objects.md
	$(BIN)/python -m weft.master.api.reference rest > docs/reference/rest.md
	$(BIN)/python -m weft.adapters.ovs.pipeline.tables > docs/reference/ovs-tables.md
	$(BIN)/python -m weft.adapters.netns.nft.reference > docs/reference/nft-tables.md
	scripts/write-manifest > packaging/kubernetes/weft.yaml

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The versions in constraints.txt are the ones everything was tested with.
$(READY): pyproject.toml constraints.txt
	scripts/install-system-packages python
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
