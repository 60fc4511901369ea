# Every target sets up what it needs in .venv by itself: only python3 (3.11 or newer), make and git are expected.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests tools $(wildcard benchmarks studies examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test slow lint fix docs bench study golden release-check

help:
	@echo 'make demo      set up, then train, compare and search synthetic scenes (offline, about two minutes)'
	@echo 'make test      set up, then run the tests, without the slow ones'
	@echo 'make slow      run the slow tests, such as those that start processes or a browser'
	@echo 'make lint      style, formatting, types, import rules'
	@echo 'make fix       fix style and formatting'
	@echo 'make docs      build the documentation site into site/: open site/index.html'
	@echo 'make bench     speed and memory, as ratios against peers in the same run'
	@echo 'make study     the evidence tables, then the tests that take long'
	@echo 'make release-check   build wheel and sdist, and try the wheel in an empty environment'
	@echo 'make golden GOLDEN=DIR [OUT=FILE.npz]   replay a folder of inputs and expected outputs'

demo: .venv/.demo
	@$(BIN)/visavis demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
PARALLEL := --durations=10 -n auto --dist loadfile --no-loadscope-reorder

# Python keeps compiled files: processes that the tests start would compile the package again, in 2 s each.
test slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'not slow and not long and not timing and not site'
	@$(PYTEST) -m timing $$(grep -rl --include='*.py' 'mark\.timing' tests)

# Tests that take more than about 1.5 s, such as those that start processes.
slow: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'slow and not long'

lint: .venv/.dev
	@failed=; \
	$(BIN)/ruff check --quiet --output-format concise $(SOURCES) || failed="$$failed style"; \
	$(BIN)/ruff format --check --quiet --output-format concise $(SOURCES) || failed="$$failed formatting"; \
	$(BIN)/mypy --no-error-summary || failed="$$failed types"; \
	$(BIN)/lint-imports --no-logo >.venv/imports.log || { cat .venv/imports.log; failed="$$failed imports"; }; \
	$(BIN)/python tools/check_language.py || failed="$$failed wording"; \
	$(BIN)/python tools/check_docstrings.py || failed="$$failed docstrings"; \
	test -z "$$failed" || { echo "Lint failed:$$failed. Automatic fixes: make fix." >&2; exit 1; }

fix: .venv/.dev
	@$(BIN)/ruff check --quiet --fix $(SOURCES); $(BIN)/ruff format $(SOURCES)

docs: .venv/.dev
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build
	@$(PYTEST) -m 'site and not long' tests/test_docs_site.py

bench: .venv/.dev
	@$(call run_all,benchmarks)

study: .venv/.dev
	@$(call run_all,studies)
	@$(PYTEST) -m long tests

release-check: .venv/.dev
	@$(BIN)/python tools/release_check.py

golden: .venv/.core
	@test -n '$(GOLDEN)' || { echo 'Name the folder of golden files: make golden GOLDEN=DIR [OUT=FILE.npz].' >&2; exit 1; }
	@$(BIN)/python tools/golden.py '$(GOLDEN)' $(if $(OUT),--out '$(OUT)')

# One stamp for each set of packages; a larger set contains the smaller ones. A comma within a call would end its argument.
FOR_DEMO := .[search,serve]
FOR_DEV := .[minilm,video,dev]

.venv/.core: pyproject.toml constraints.txt | .venv/.made
	@$(call install,.) && touch $@

.venv/.demo: pyproject.toml constraints.txt | .venv/.made
	@$(call install,$(FOR_DEMO)) && touch .venv/.core $@

.venv/.dev: pyproject.toml constraints.txt | .venv/.made
	@$(call install,$(FOR_DEV)) && touch .venv/.core .venv/.demo $@

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'visavis needs Python 3.11 or newer: name one, for example make PYTHON=python3.11 test.' >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv || \
	  { echo 'No virtual environment could be made: on Debian, apt install python3-venv, then try again.' >&2; exit 1; }
	@touch $@

define install
echo 'Installing $(1) into .venv (the first time this takes about two minutes) ...' >&2; \
$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '$(1)' || \
{ echo 'Packages could not be installed: the lines above say why; check the network, then run make again.' >&2; exit 1; }
endef

# Every script of a folder, also after one that fails; those that take a run of the user's are named instead.
define run_all
failed=; \
for script in $(1)/*.py; do \
echo "== $$script"; \
if grep -q 'add_argument("runs\?"' "$$script"; then echo "takes a run: its head says how to make one and call it"; \
else $(BIN)/python "$$script" || failed="$$failed $$script"; fi; \
done; \
test -z "$$failed" || { echo "Failed:$$failed. What each said is above." >&2; exit 1; }
endef
