# Every target installs its requirements into .venv. You need python3 (3.11 or newer), make and git.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests tools $(wildcard benchmarks studies examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-platforms slow lint fix docs bench study golden release-check

help:
	@echo 'make demo      set up, then train, compare and search synthetic scenes (offline, two to four minutes on two cores)'
	@echo 'make test      set up, then run the tests, without the slow ones'
	@echo 'make slow      run the slow tests, such as those that start processes or a browser'
	@echo 'make test-platforms [AREA=tests/data]   run the tests without the calls that Windows and macOS lack'
	@echo 'make lint      check style, formatting, types, import rules and wording'
	@echo 'make fix       fix style and formatting'
	@echo 'make docs      build the documentation site into site/: open site/index.html'
	@echo 'make bench     measure speed and memory, as ratios to other libraries in the same run'
	@echo 'make study     run the studies, then the long tests'
	@echo 'make release-check   build wheel and sdist, and try the wheel in an empty environment'
	@echo 'make golden GOLDEN=DIR [OUT=FILE.npz]   compute the inputs of a folder and compare the results with its expected outputs'

demo: .venv/.demo
	@$(BIN)/visavis demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
PARALLEL := --durations=10 -n auto --dist loadfile --no-loadscope-reorder

# Cached bytecode saves 2 s in each process that a test starts.
test test-platforms slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'not slow and not long and not timing and not site'
	@$(PYTEST) -m timing $$(grep -rl --include='*.py' 'mark\.timing' tests)

# Linux without the calls that Windows and macOS lack, and with the rules of Windows for open files: make test-platforms AREA=tests/data
test-platforms: export PYTHONPATH = $(CURDIR)/tests/emulation
test-platforms: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'not long and not timing and not site' $(or $(AREA),tests)

# Tests that take more than about 1.5 s, mostly because they start processes.
slow: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'slow and not long'

# The calls of the standard library that Windows or macOS lack. Without the types of other packages, which are the same there,
# a check takes 5 s instead of 85 s. Rules that need these types are off.
OTHER_PLATFORM := --follow-imports=skip --no-warn-unreachable --no-warn-unused-ignores \
  $(addprefix --disable-error-code=,arg-type assignment call-overload index operator return-value var-annotated) src/visavis

lint: .venv/.dev
	@failed=; \
	$(BIN)/ruff check --quiet --output-format concise $(SOURCES) || failed="$$failed style"; \
	$(BIN)/ruff format --check --quiet --output-format concise $(SOURCES) || failed="$$failed formatting"; \
	$(BIN)/mypy --no-error-summary || failed="$$failed types"; \
	for platform in win32 darwin; do \
	  $(BIN)/mypy --no-error-summary --platform $$platform --cache-dir .mypy_cache/$$platform $(OTHER_PLATFORM) || failed="$$failed $$platform"; done; \
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
	@test -n '$(GOLDEN)' || { echo 'GOLDEN: expected a folder of golden files, got nothing. Run make golden GOLDEN=DIR [OUT=FILE.npz].' >&2; exit 1; }
	@$(BIN)/python tools/golden.py '$(GOLDEN)' $(if $(OUT),--out '$(OUT)')

# One stamp file for each set of packages. A larger set contains the smaller ones.
# The sets are variables because a comma in $(call ...) would start the next argument.
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
	  { echo 'python3: expected Python 3.11 or newer. Set another interpreter, for example make PYTHON=python3.11 test.' >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv || \
	  { echo 'Creating the virtual environment failed. On Debian, run apt install python3-venv, then run make again.' >&2; exit 1; }
	@touch $@

define install
echo 'Installing $(1) into .venv (about two minutes the first time) ...' >&2; \
$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '$(1)' || \
{ echo 'Installing packages failed with the errors above. Check the network connection, then run make again.' >&2; exit 1; }
endef

# Run every script of a folder, even if one fails. Scripts that need a training run or a data set are only listed.
define run_all
failed=; \
for script in $(1)/*.py; do \
echo "== $$script"; \
if grep -Eq 'add_argument\("(runs?|data)"' "$$script"; then echo "skipped: it needs a training run or a data set. See its docstring."; \
else $(BIN)/python "$$script" || failed="$$failed $$script"; fi; \
done; \
test -z "$$failed" || { echo "Failed:$$failed. The output of each script is above." >&2; exit 1; }
endef
