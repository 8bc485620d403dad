# One command for each job; every one makes .venv first if it is not there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NPROC  ?= 2
WORKERS ?= 4
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1

.PHONY: demo compare plan-table test test-simulated test-slow test-property test-torch test-torch-short test-clients test-clients-short bench lint docs clean help
help:
	@echo "make demo   train a byte-level GPT on the standard library's source, sharded over $(NPROC) ranks"
	@echo "make compare  the same FSDP2 program on PyTorch's FSDP and on Fullshard, side by side"
	@echo "make test   run the tests        make test-slow  those that take long"
	@echo "make test-simulated  the tests of ranks on a simulated accelerator"
	@echo "make test-property MINUTES=30  the day's random models, ways to shard them and sequences of events, for so long"
	@echo "make test-torch TORCH=2.15.0  the tests on another version of torch, in an environment of its own"
	@echo "make test-torch-short TORCH=2.15.0  a part of them that takes minutes"
	@echo "make test-clients  programs of Accelerate, Transformers, PEFT, Lightning and TRL on adopted ranks"
	@echo "make test-clients-short  a part of them that takes minutes"
	@echo "make bench  side-by-side benchmark table  make plan-table  planned beside measured memory: runs/plan.md"
	@echo "make docs   the site: docs/_build/html/index.html"
	@echo "make lint   ruff and strict mypy make clean  remove .venv and runs/"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(NPROC) examples/pretrain.py $(ARGS)

compare: $(STAMP)
	$(BIN)/fullshard compare examples/fsdp2.py --steps 40 --ranks $(NPROC) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# The tests of ranks once more, on a simulated accelerator.
test-simulated: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --simulated $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

MINUTES ?= 10
test-property: $(STAMP)
	$(BIN)/python -m pytest -n 2 tests/property -k process --property-minutes=$(MINUTES) $(ARGS)

# Other versions of torch, each in an environment of its own. On PyPI every version but the default brings CUDA (5 GB).
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)
$(OTHER)/.installed: pyproject.toml constraints.txt
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|torchao|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt torch==$(TORCH) numpy "setuptools>=77"
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint $(OTHER)/constraints.txt --editable ".[dev]"
	@touch $@

# What depends on torch most: its interface, private names, precision, growth, the newest behaviour.
SHORT_TORCH := test_surface test_private_api test_engine test_agreement parity/test_gradient_dtypes \
	corners/test_reductions_asked_for corners/test_growth corners/test_mutable_arguments corners/test_changed_weights stuck/test_frames

test-torch-short: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n 2 $(SHORT_TORCH:%=tests/%.py) $(ARGS)

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

CLIENTS := $(VENV)/.clients
$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable ".[dev,hf,lightning,trl,torchao]"
	@touch $@

test-clients: $(CLIENTS)
	$(BIN)/python -m pytest -n 0 --timeout 900 tests/clients $(ARGS)

# One file for each library and way to use it; a few minutes, most of them spent on importing the libraries.
SHORT_CLIENTS := accelerate hf_trainer lightning peft torchtitan trl
test-clients-short: $(CLIENTS)
	$(BIN)/python -m pytest -n 0 --timeout 900 $(SHORT_CLIENTS:%=tests/clients/test_%.py) $(ARGS)

# What `fullshard plan` says beside what is measured; fails where a peak is off by more than 3%, or a kind not exact.
plan-table: $(STAMP)
	@mkdir -p runs
	$(BIN)/python benchmarks/plan.py --out runs/plan.md $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/sphinx-build -b html -W --keep-going -q docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) .venv-torch-* runs docs/_build docs/project
