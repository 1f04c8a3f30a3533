# Tinsmith. `make help` lists every verb.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python

.PHONY: help setup proto proto-docs demo up test test-unit test-component test-cluster compatibility test-sdks test-ecosystem test-robustness test-abuse test-soak test-helm lint format bench baseline clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned (DEVICE=cpu|cuda, default: as before, else cpu)
	@./scripts/setup.sh

proto: ## generate the packages tinsmith.v1 and tinsmith.internal.v1 from proto/
	@./scripts/proto.sh

proto-docs: setup ## write the reference of docs/grpc.md from the comments of proto/
	@$(PY) scripts/grpc_docs.py

demo: setup ## fine-tune a real small model with the tinker SDK and show the result (MODEL=path or hub id)
	@$(PY) -m examples.demo

up: setup ## start a cluster: make up MODEL=NAME=PATH_OR_HUB_ID
	@.venv/bin/tinsmith up $(if $(MODEL),--model $(MODEL))

test: setup ## the whole suite, but for the soak, other SDKs and most of the ecosystem
	@./scripts/test.sh

test-unit: setup ## pure logic and small parts; seconds
	@$(PY) -m pytest tests/unit

test-component: setup ## one service at a time, with real models
	@$(PY) -m pytest tests/component

test-cluster: setup ## a real cluster driven by the real SDK
	@$(PY) -m pytest tests/cluster

compatibility: setup ## write what of the SDK works anew into docs/compatibility.md
	@TINSMITH_WRITE_COMPATIBILITY=1 $(PY) -m pytest tests/cluster/test_compatibility.py

test-sdks: setup ## versions of the SDK from 0.19 on against one cluster (WRITE=1: write their table anew)
	@TINSMITH_WRITE_COMPATIBILITY=$(WRITE) $(PY) -m pytest tests/sdks

test-robustness: setup ## faults of every kind under load, and their table (ROUNDS=n: n long rounds instead of a short one)
	@ROUNDS=$(ROUNDS) $(PY) -m pytest tests/robustness

test-abuse: setup ## hostile requests of every kind beside a bystander, and their table (REQUESTS=n: at least n, default 10000)
	@REQUESTS=$(or $(REQUESTS),10000) $(PY) -m pytest tests/abuse -s

test-ecosystem: setup ## other programs on a real cluster: clients of gRPC, the cookbook's recipes, and their table in docs/cookbook.md
	@COOKBOOK_TABLE=docs/cookbook.md $(PY) -m pytest tests/ecosystem tests/cluster/test_examples.py

test-soak: setup ## sessions that come and go, and what is left of them (MINUTES=n, default 60)
	@MINUTES=$(or $(MINUTES),60) $(PY) -m pytest tests/soak -s

test-helm: setup ## the Helm chart and Dockerfiles
	@$(PY) -m pytest tests/helm

lint: setup ## ruff, mypy, what may import what, buf lint and buf breaking
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/buf lint proto
	@.venv/bin/buf format --diff --exit-code proto
	@./scripts/proto_breaking.sh

format: setup ## format Python and proto files
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .
	@.venv/bin/buf format -w proto

bench: setup ## exactness and speed against bare PyTorch and bare vLLM, kept in bench/results/
	@$(PY) -m bench

baseline: setup ## accept the present contract as what `make lint` must not break
	@.venv/bin/buf build proto --exclude-source-info -o proto/baseline.binpb

clean: ## remove what was generated, except .venv
	rm -rf tinsmith build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
