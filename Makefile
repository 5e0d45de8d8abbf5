# make bench   the first chapter on the machine at hand
# make test    every page checked, its kernels assembled for every GPU, then the project's own tests
# Both set up .venv. PYTHON=... names the interpreter to make it with; VENV=... an environment to use.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: bench test lint

# Rewritten assertions and compiled modules are kept: the tests start pytest some hundred times.
unexport PYTHONDONTWRITEBYTECODE

bench: $(VENV)/.ready
	$(PY) -m pytest suites/ch01

test: $(VENV)/.ready
	$(PY) -m pytest -q -n 2 --aisp-check suites
	$(PY) -m pytest -q -n 2 --aisp-compile suites
	$(PY) -m pytest -q -n 2 -p no:benchmark tests

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# torch by itself and first: only the pinned version is sure to be the build meant here.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -e '.[test,lint]'
	touch $@
