# Tinsmith. `make help` lists every verb.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python

.PHONY: help setup proto proto-docs chart-docs demo up test test-unit test-long test-component test-runner test-cluster models compatibility test-families test-sdks test-ecosystem test-robustness test-security test-abuse test-soak test-monitoring test-helm test-k8s test-gpu lint format bench baseline clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned (DEVICE=cpu|cuda, default: as before, else cpu)
	@./scripts/setup.sh

proto: ## generate the packages tinsmith.v1 and tinsmith.internal.v1 from proto/
	@./scripts/proto.sh

proto-docs: setup ## write the reference of docs/grpc.md from the comments of proto/
	@$(PY) scripts/grpc_docs.py

chart-docs: setup ## write the README of the Helm chart from the comments of its values
	@$(PY) scripts/chart_docs.py

demo: setup ## fine-tune a real small model with the tinker SDK and show the result (MODEL=path or hub id)
	@$(PY) -m examples.demo

up: setup ## start a cluster: make up MODEL=NAME=PATH_OR_HUB_ID
	@.venv/bin/tinsmith up $(if $(MODEL),--model $(MODEL))

test: setup ## the suite, which is all but long tests, the soak, Prometheus, Kubernetes, GPUs and the matrix of SDK versions
	@./scripts/test.sh

test-unit: setup ## pure logic and small parts; seconds
	@./scripts/test.sh unit

test-long: setup ## what takes longest of the components and of the cluster, and is not in `make test`
	@$(PY) -m pytest tests/component tests/cluster -m long

test-component: setup ## one service at a time, with real models
	@$(PY) -m pytest tests/component

test-runner: setup ## what samplers compute on vLLM's V2 model runner, by Triton's interpreter (TESTS=...; downloads 200 MB, once)
	@./scripts/test_runner.sh $(TESTS)

test-cluster: setup ## a real cluster driven by the real SDK
	@$(PY) -m pytest tests/cluster

models: setup ## write what adapters train of each family of models anew into docs/models.md
	@TINSMITH_WRITE_MODELS=1 $(PY) -m pytest -q tests/unit/trainer/compute/test_models.py

compatibility: setup ## write what of the SDK works anew into docs/compatibility.md
	@TINSMITH_WRITE_COMPATIBILITY=1 $(PY) -m pytest tests/cluster/contract/test_compatibility.py

test-families: setup ## what samplers compute of each family of models that vLLM runs on a CPU, beside transformers and PEFT
	@FAMILIES=all $(PY) -m pytest tests/families

test-sdks: setup ## versions of the SDK from 0.19 on against one cluster (WRITE=1: write their table anew)
	@TINSMITH_WRITE_COMPATIBILITY=$(WRITE) $(PY) -m pytest tests/sdks

test-robustness: setup ## faults of every kind under load, and their table (ROUNDS=n: n long rounds instead of a short one)
	@ROUNDS=$(ROUNDS) $(PY) -m pytest tests/robustness

test-security: setup ## certificates; every method for every kind of caller, and their table in docs/security.md (WRITE=1: write it anew)
	@TINSMITH_WRITE_MATRIX=$(WRITE) $(PY) -m pytest tests/security -s

test-abuse: setup ## hostile requests of every kind beside a bystander, and their table (REQUESTS=n: at least n, default 10000)
	@REQUESTS=$(or $(REQUESTS),10000) $(PY) -m pytest tests/abuse -s

test-ecosystem: setup ## the cookbook's recipes and their table (docs/cookbook.md), clients of every kind, versions of the SDK
	@COOKBOOK_TABLE=docs/cookbook.md $(PY) -m pytest tests/ecosystem
	@$(PY) -m pytest tests/cluster/documents/test_examples.py tests/cluster/sampling/test_inference.py tests/cluster/contract/test_compatibility.py
	@$(PY) -m pytest tests/sdks

test-soak: setup ## sessions that come and go, and what is left of them (MINUTES=n, default 60)
	@MINUTES=$(or $(MINUTES),60) $(PY) -m pytest tests/soak -s

test-monitoring: setup ## dashboards and alerts on a real Prometheus (MINUTES=n, default 8; PICTURES=docs: draw the dashboards there)
	@MINUTES=$(or $(MINUTES),8) $(PY) -m pytest tests/monitoring -s

test-helm: setup ## the Helm chart and Dockerfiles
	@./scripts/test.sh helm

test-k8s: setup ## a release on the Kubernetes of the current context, from images to uninstall (tests/k8s/cluster.py: its settings)
	@$(PY) -m pytest tests/k8s -s

# A machine with a GPU may have no network, which `setup` needs: without .venv its own Python is taken.
GPU_PY := $(if $(wildcard $(PY)),$(PY),python3)
NO_GPU := make test-gpu needs a CUDA device that torch finds, and there is none here

test-gpu: ## the trainer's compute on one CUDA GPU; installs nothing
	@$(GPU_PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("$(NO_GPU)")'
	@$(GPU_PY) -m pytest tests/gpu --confcutdir=tests/gpu

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
