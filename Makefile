# The two commands are `make demo` and `make test`; each makes its own environment first.
# PYTHON=python3.12 make test   uses another interpreter.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The demonstration, tests and benchmarks mean this machine, also where a scheduler's commands are installed.
export MUSTER_ON ?= local
STAMP  := $(VENV)/.installed

.PHONY: help demo docs picture test test-all check format unit core-alone launcher-alone bench chaos pairs matrix lab lab-kubernetes frameworks gpu test-versions system-packages clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

# The stamp holds a checksum of what was installed, so a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt scripts/install
	@scripts/install $(PYTHON) $(VENV)

demo: $(STAMP) ## train on real digits on two simulated nodes, kill a worker, recover
	@$(BIN)/python examples/digits/demo.py

test: $(STAMP) ## checks, unit tests and a short run of all else: about five minutes on two cores
	@scripts/test $(VENV) quick

test-all: $(STAMP) system-packages ## all checks and tests (CI calls both; as root on Debian it installs what they need)
	@scripts/test $(VENV) all

check: $(STAMP) ## format, lint, types, import contracts
	@scripts/check $(VENV)

format: $(STAMP) ## let ruff format and mend
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

unit: $(STAMP) ## the quick tests only
	@$(BIN)/python -m pytest tests/unit tests/kit

core-alone: $(STAMP) ## the core's tests, in a tree without the other rooms
	@scripts/alone $(VENV) core

launcher-alone: $(STAMP) ## the launcher's tests, in a tree of it and the core
	@scripts/alone $(VENV) launcher

# PEER=/elsewhere/bin/torchrun make bench   measures another environment's torchrun beside.
bench: $(STAMP) ## launch, rendezvous and training against torchrun and hand-written code
	@$(BIN)/python benchmarks/launch.py $(PEER:%=--torchrun %)
	@$(BIN)/python benchmarks/rendezvous.py $(PEER:%=--torchrun %)
	@$(BIN)/python benchmarks/train.py
	@$(BIN)/python benchmarks/losses.py
	@$(BIN)/python benchmarks/goodput.py
	@$(BIN)/python benchmarks/workflows.py
	@$(BIN)/python benchmarks/sweeps.py
	@$(BIN)/python benchmarks/engines.py
	@$(BIN)/python benchmarks/pods.py
	@$(BIN)/python benchmarks/doctor.py
	@$(BIN)/python benchmarks/explain.py
	@$(BIN)/python benchmarks/report.py
	@$(BIN)/python benchmarks/eyes.py
	@$(BIN)/python benchmarks/python.py
	@$(BIN)/python benchmarks/sessions.py
	@$(BIN)/python benchmarks/ship_env.py

chaos: $(STAMP) ## random kills, the long form of the fault and training tests
	@MUSTER_TRAIN_SEEDS=100 MUSTER_PREEMPTIONS=100 MUSTER_REPLAYS=100 $(BIN)/python -m pytest --timeout 3600 -q tests/train
	@MUSTER_CHAOS=100 $(BIN)/python -m pytest --timeout 1800 -s -k chaos tests/faults
	@MUSTER_CHAOS=100 $(BIN)/python -m pytest --timeout 1800 -q tests/sessions

# SEED=7 N=20 make pairs   draws the same twenty cases again; a case that fails is made small, and printed as one command.
pairs: $(STAMP) ## features two at a time, drawn anew: what has been promised must hold; a failure is a finding
	@$(BIN)/python tests/pairs $(SEED:%=--seed %) $(N:%=-n %)

matrix: $(STAMP) system-packages ## twelve faults on every engine, for docs/matrix.md (root on Debian)
	@$(BIN)/python tests/matrix

lab: $(STAMP) system-packages ## the long proofs on real Slurm, sshd and networks in namespaces (root on Debian)
	@MUSTER_LAB=1 $(BIN)/python -m pytest --timeout 900 tests/unit tests/cluster tests/ssh tests/lab tests/faults tests/workflows tests/gpucheck tests/benchmarks tests/places tests/sweeps tests/pairs tests/train tests/sessions

# KUBE_BIN=FOLDER make matrix   has the column of Kubernetes, too.
lab-kubernetes: $(STAMP) ## runs on a real Kubernetes of the programs in KUBE_BIN (root; docs/kubernetes.md)
	@KUBE_BIN="$(KUBE_BIN)" $(BIN)/python tests/lab/kubernetes

# Where a machine has GPUs but no network: WHEELS=FOLDER of scripts/gpu-wheels, and python3 with a torch for them.
gpu: ## every promise on this machine's GPUs: PART=bench, ONLY="train hang", OUT=FILE (docs/gpus.md)
	@PYTHONPATH=src$(WHEELS:%=:%):$$PYTHONPATH $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m torchmuster.gpucheck \
	  $(PART:%=--part %) $(if $(ONLY),--only "$(ONLY)") --out $(or $(OUT),benchmarks/results/gpu)

docs: $(STAMP) ## the documentation as a site in build/site, with search and the error book
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

picture: $(STAMP) ## the picture of the README, from a real run
	@$(BIN)/python scripts/site/picture.py

frameworks: $(STAMP) ## Lightning, Accelerate and Transformers under muster and torchrun
	@scripts/install-frameworks $(VENV)
	@$(BIN)/python -m pytest tests/frameworks

# TORCH="2.6 2.13" make test-versions   tries these versions of torch alone.
test-versions: ## a smoke on every Python from 3.11 and torch from 2.6 that this machine can get
	@$(PYTHON) scripts/test-versions $(TORCH)

system-packages:
	@scripts/system-packages

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info
