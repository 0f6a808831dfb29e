# make train      set up, prepare text, run the quickstart: on all GPUs, or on two CPU ranks where there is none
# make test       set up, run all tests (CPU, no network); ARGS=-n2 in two processes, for four cores and more
# make check      set up, ruff and pyright
# make gpu-test   set up, run the tests that need a GPU
# make setup      only set up: virtual environment in .venv
#
# ARGS="schedule.steps=20 optim.lr=1e-3" adds overrides to train; ARGS="-k tiled" picks tests.
# PYTHON=python3.12 chooses the Python (3.11 to 3.13); TORCH=torch==2.13.0+cu130 chooses the build of torch.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
BIN := .venv/bin
STAMP := .venv/installed

NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NUM_CORES := $(shell getconf _NPROCESSORS_ONLN)
ifeq ($(NUM_GPUS),0)
  # Two ranks share the cores. Without a number of its own, each would take them all.
  LAUNCH = DS_ACCELERATOR=cpu OMP_NUM_THREADS=$(shell expr \( $(NUM_CORES) + 1 \) / 2) $(BIN)/deepspeed --num_gpus 2
  DEGREE :=
else
  LAUNCH = $(BIN)/deepspeed
  # The quickstart shares each row between two ranks; an odd number of GPUs cannot be paired.
  DEGREE := $(if $(filter 1 3 5 7 9 11 13 15,$(NUM_GPUS)),parallel.sp=1)
endif

.PHONY: setup train test check gpu-test

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
	    "Python 3.11 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "installing into .venv: some minutes, once"
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

train: $(STAMP)
	$(BIN)/python launch/prepare.py +exp=quickstart $(ARGS)
	$(LAUNCH) launch/train.py +exp=quickstart $(DEGREE) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

gpu-test: $(STAMP)
	LONG_SEQUENCE_GPU_TESTS=1 $(BIN)/python -m pytest tests/gpu $(ARGS)
