# make bench   the first chapter on the machine at hand
# make test    every page checked, its kernels assembled for every GPU, then the project's own tests
# make docs    the documentation as a site in site/, its links checked
# All set up .venv; test also a browser for the report, where it may: as root, where there is apt.
# PYTHON=... names the interpreter to make it with; VENV=... an environment to use.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: bench test lint docs browser

# Rewritten assertions and compiled modules are kept: the tests start pytest some hundred times.
unexport PYTHONDONTWRITEBYTECODE

bench: $(VENV)/.ready
	$(PY) -m pytest suites/ch01

test: $(VENV)/.ready browser
	$(PY) -m pytest -q -n 2 --aisp-check suites
	$(PY) -m pytest -q -n 2 --aisp-compile suites
	$(PY) -m pytest -q -n 2 -p no:benchmark tests emulator

# Some 25 s once. Where it cannot be installed its test says so, or fails with CI_BROWSER_REQUIRED=1.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	       apt-get install -q -y --no-install-recommends chromium chromium-driver; } \
	  || echo "no browser could be installed"

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(VENV)/.ready
	$(PY) -m pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

# torch by itself and first: only the pinned version is sure to be the build meant here.
$(VENV)/.ready: pyproject.toml emulator/pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -e '.[test,lint]' -e ./emulator
	touch $@
