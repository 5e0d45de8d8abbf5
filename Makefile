# make bench     measure the first chapter on this machine
# make test      lint, build the docs, check every page, assemble it for sm90 and sm100, run the tests
# make compile   assemble every page for every GPU
# make slow      what make test leaves out: cases on four ranks, wrong sides of pages, large tensors
# make lint      ruff, mypy, and the import layers of pyproject.toml
# make docs      build the documentation site into site/
# make release   build the sdist and the wheel into dist/ and try the wheel out
# Each target sets up .venv first. `make test` also installs a browser, if it runs as root with apt.
# PYTHON=... is the interpreter that makes .venv; VENV=... is an environment to use instead.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: bench test compile slow lint docs release browser

# The tests start pytest hundreds of times: keep compiled modules and rewritten assertions.
unexport PYTHONDONTWRITEBYTECODE

# Several processes on few cores, each with a thread for every core, mostly wait for one another.
# tests/conftest.py sets this, too: `exploits_test.py` needs two threads where exploits take one away.
ONE_THREAD := OMP_NUM_THREADS=1

# A test that hangs ends the run with the stack of each thread. pytest-timeout would use SIGALRM, which
# tests/exploits uses, too.
HANGS := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

bench: $(VENV)/.ready
	$(PY) -m pytest suites/ch01

test: $(VENV)/.ready
	$(MAKE) -j 2 lint docs browser
	$(ONE_THREAD) $(PY) -m pytest -q -n 2 --dist loadfile --aisp-check suites -m "not aisp_gpus(n=4)"
	$(ONE_THREAD) $(PY) -m pytest -q -n 2 --dist loadfile --aisp-compile=sm90,sm100 suites -m "sm90 or sm100"
	$(PY) -m pytest -q -n 2 --dist worksteal -p no:benchmark --durations=40 $(HANGS) -m "not slow" tests emulator

compile: $(VENV)/.ready
	$(ONE_THREAD) $(PY) -m pytest -q -n 2 --dist loadfile --aisp-compile suites -m "sm90 or sm100 or sm103 or sm121"

slow: $(VENV)/.ready
	$(ONE_THREAD) $(PY) -m pytest -q -n 2 --dist loadfile --aisp-check suites -m "aisp_gpus(n=4)"
	$(PY) -m pytest -q -n 2 -p no:benchmark -m slow tests

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

release: $(VENV)/.ready compile slow
	$(PY) -m pip install -q -c constraints.txt build twine
	rm -rf dist
	$(PY) -m build
	rm -rf build *.egg-info emulator/build emulator/*.egg-info  # pytest would find a second plugin
	$(PY) -m twine check --strict dist/*
	PYTHON=$(PY) .ci/try-wheel dist/*.whl

# About 25 s, once. Without a browser its tests skip with the reason; CI_BROWSER_REQUIRED=1 fails them.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	       apt-get install -q -y --no-install-recommends chromium chromium-driver; } \
	  || echo "no browser could be installed"

# torch comes first and alone: only the pinned version is sure to resolve to the intended build.
$(VENV)/.ready: pyproject.toml emulator/pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -e '.[test,lint,docs]' -e ./emulator
	touch $@
