# Each target sets itself up: on a fresh clone `make demo` or `make test` is the only command needed.
PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
DEV    := $(VENV)/.installed-dev
ALL    := $(VENV)/.installed-dev-all
DEMO   := $(VENV)/.installed-demo
DOCS   := $(VENV)/.installed-docs
PINS   := pyproject.toml claims/pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo browser test test-system check thorough faults durations test-gpu torture fuzz-serve torture-serve families bundled-model lab-report reference docs docs-test bench lint format wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | awk -F '\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: $(DEMO)  ## train a small Transformer to sort and look at what it learnt
	$(BIN)/python examples/sort.py --out runs/demo

# Never an error: where there is no browser, its tests are skipped and say so.
browser:  ## Debian's chromium for the tests of the page, where this is root on Debian
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		{ timeout 300 apt-get -qq update && timeout 600 apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
			|| echo "chromium could not be installed: the browser's tests are skipped"; \
	fi

# A file is one worker's: what all its tests share is made once. (Marks of groups do nothing with pytest 9.2 and xdist 3.8.)
# Files are ordered by tests/durations.json. Workers and many tests start Python: keep bytecode even where that is off.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(filter thorough,$(HYPOTHESIS_PROFILE)),,--rotate)

test: $(DEV)  ## laws, parts and commands, on JOBS workers (2)
	$(PYTEST) -m "not system"

test-system: $(ALL)  ## tests with browsers, compilers, the wheel, several processes
	$(PYTEST) -m system

# One run imports and collects once. The setting only lets it enter tests/docs_site, too.
check: $(ALL) browser docs  ## all of test, test-system and docs-test in one run
	$(PYTEST) -o norecursedirs=".*" $(TESTS)

thorough:  ## check with all of the rotating groups and many more examples (hours; TESTS="FILE ..." runs these alone)
	HYPOTHESIS_PROFILE=thorough $(MAKE) check

faults: $(DEV)  ## plant 43 faults one at a time and print which tests notice (about half an hour; see tests/planted_faults.py)
	$(BIN)/python -m tests.planted_faults --jobs $(JOBS)

durations: $(ALL) browser docs  ## measure the mean time of each test; write tests/durations.json
	$(PYTEST) -o norecursedirs=".*" --store-durations

test-gpu: $(DEV)  ## the kernels and lengths that need a GPU, and what they measure
	$(BIN)/pytest tests/gpu

torture: $(ALL)  ## kill training, damage run folders, configs and data (about an hour); see tests/torture
	$(BIN)/python -m tests.torture

fuzz-serve: $(DEV)  ## 20,000 random requests to the HTTP server (about 10 minutes): no 5xx, nothing undeclared
	$(BIN)/python -m tests.serve.http.fuzz --requests 20000

torture-serve: $(DEV)  ## 30 minutes of mixed requests from 32 clients, some cancelled or malformed
	$(BIN)/python -m tests.serve.http.torture --minutes 30

families: $(DEV)  ## measure every public family against transformers; write transformers_fields.json and the table of docs/interop.md
	$(BIN)/python -m tests.interop.make_transformers_fields
	$(BIN)/python -m tests.interop.table

bundled-model: $(DEV)  ## train again the model that `anyformer explore` opens without an argument (a minute)
	$(BIN)/python -m anyformer.explore.make_bundled

lab-report: $(DEV)  ## write the pages of docs/lab from the results beside them
	$(BIN)/python -m docs_site.lab_report

reference: $(DOCS)  ## write the pages of docs/reference from schemas, commands and docstrings
	$(BIN)/python -m docs_site

docs: $(DOCS) reference  ## the documentation as a site: open site/index.html
	rm -rf site .cache
	$(BIN)/python -m zensical build --strict
	$(BIN)/python -m docs_site.source_links site

docs-test: $(ALL) browser docs  ## the site, and everything that its pages show: commands, Python, tutorials
	$(PYTEST) tests/docs_site

bench: $(DEV)  ## measure this CPU beside torch.nn and transformers, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.report

lint: $(DEV)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(DEV)  ## sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(DEV)  ## dist/anyformer-*.whl and dist/anyformer_claims-*.whl
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/python -m build --wheel --no-isolation --outdir dist claims

clean:  ## remove what was built and cached; keeps .venv and runs
	rm -rf build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find anyformer claims tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp is as new as both pyproject.toml and constraints.txt, or the environment is brought up to date.
$(DEV): $(PINS) $(BIN)/python
	@echo "installing what the tests need into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install -qq --no-compile -e ".[dev]" -e ./claims -c constraints.txt
	@touch $(DEMO) $(DOCS) $@

$(ALL): $(PINS) $(BIN)/python
	@echo "installing what all tests need into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install -qq --no-compile -e ".[dev-all]" -e ./claims -c constraints.txt
	@touch $(DEMO) $(DOCS) $(DEV) $@

# What the demo and the documentation need is part of what the tests need: the rules above renew these stamps too.
$(DEMO): $(PINS) $(BIN)/python
	@echo "installing what the demo needs into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install -qq --no-compile -e ".[plot]" -c constraints.txt
	@touch $@

$(DOCS): $(PINS) $(BIN)/python
	@echo "installing what the documentation needs into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install -qq --no-compile -e ".[docs]" -c constraints.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "anyformer needs Python 3.11 or newer; $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
