# Every target installs its requirements into .venv. You need python3 (3.11 or newer), make and git.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests tools $(wildcard benchmarks studies examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-platforms test-processors test-wheel slow lint fix docs bench study golden release-check

help:
	@echo 'make demo      set up, then train, compare and search synthetic scenes (offline, two to four minutes on two cores)'
	@echo 'make test      set up, then run the tests, without the slow ones (about four minutes on two quiet cores)'
	@echo 'make slow      set up more packages, then run the slow tests, such as those that start processes or a browser'
	@echo 'make test-platforms [AREA=tests/data]   run the tests without the calls that Windows and macOS lack'
	@echo 'make test-processors   run the numeric tests with the instructions of older processors, one and two threads'
	@echo 'make test-wheel   run the tests of visavis.papers with the installed wheel instead of the checkout'
	@echo 'make lint      check style, formatting, types, import rules and wording'
	@echo 'make fix       fix style and formatting'
	@echo 'make docs      build the documentation site into site/: open site/index.html'
	@echo 'make bench     measure speed and memory, as ratios to other libraries in the same run'
	@echo 'make study     run the studies, then the long tests'
	@echo 'make release-check   build wheel and sdist, and try the wheel in an empty environment'
	@echo 'make golden GOLDEN=DIR [OUT=FILE.npz]   compute the inputs of a folder and compare the results with its expected outputs'

demo: .venv/.demo
	@$(BIN)/visavis demo

# -rs lists skipped tests, with their reasons, one line each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rfEs
PARALLEL := --durations=10 -n auto --dist loadfile --no-loadscope-reorder

# Cached bytecode saves 2 s in each process that a test starts.
test test-platforms test-processors slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/.test
	@echo 'Running about 7,000 tests: four minutes on two quiet cores, longer on busy ones. The first dots appear after half a minute.'
	@$(PYTEST) $(PARALLEL) -m 'not slow and not long and not timing and not site'
	@$(PYTEST) -m timing $$(grep -rl --include='*.py' 'mark\.timing' tests)

# Linux without the calls that Windows and macOS lack, and with the rules of Windows for open files: make test-platforms AREA=tests/data
test-platforms: export PYTHONPATH = $(CURDIR)/tests/emulation
test-platforms: .venv/.dev
	@$(PYTEST) $(PARALLEL) -m 'not long and not timing and not site' $(or $(AREA),tests)

# The order of additions differs between processors and numbers of threads. The variables restrict the instructions of torch, oneDNN,
# MKL, OpenBLAS and NumPy: to those of processors with AVX2, and of older ones. Others of the same kind run by hand in the same way.
NUMERIC := $(addprefix tests/,diagnostics experiments graded metrics models objectives pair_loss papers retrieval training \
  $(patsubst %,test_%.py,blocking corrections ensembles evaluation golden ragged_items scoring targets two_stages zero_shot))
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
  NPY_DISABLE_CPU_FEATURES=X86_V4,AVX512_ICL,AVX512_SPR
SSE := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem \
  NPY_DISABLE_CPU_FEATURES=X86_V3,X86_V4,AVX512_ICL,AVX512_SPR

test-processors: .venv/.test
	@failed=; \
	for variables in 'OMP_NUM_THREADS=1 $(AVX2)' 'OMP_NUM_THREADS=2 $(AVX2)' 'OMP_NUM_THREADS=1 $(SSE)' 'OMP_NUM_THREADS=2 $(SSE)' OMP_NUM_THREADS=2; do \
	  echo "== $$variables"; \
	  env $$variables $(BIN)/python -m pytest -q $(PARALLEL) -m 'not slow and not long and not timing and not site' $(NUMERIC) || failed=1; done; \
	test -z "$$failed"

# visavis.papers registers its parts as any installed package does, so its tests run with the files and the metadata of the wheel.
test-wheel: .venv/.test
	@rm -rf .venv/wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/wheel .
	@PYTHONPATH=$(CURDIR)/.venv/wheel $(BIN)/python -c 'import visavis; assert "wheel" in visavis.__file__, visavis.__file__'
	@PYTHONPATH=$(CURDIR)/.venv/wheel $(PYTEST) $(PARALLEL) -m 'not long and not timing' tests/papers tests/graded tests/diagnostics

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
	$(BIN)/python tools/check_reach.py || failed="$$failed reach"; \
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

.venv/.core: pyproject.toml constraints.txt | .venv/.made
	@$(call install,.[train],1.2 GB) && touch $@

.venv/.demo: pyproject.toml constraints.txt | .venv/.made
	@$(call install,$(FOR_DEMO),1.7 GB) && touch .venv/.core $@

.venv/.test: pyproject.toml constraints.txt | .venv/.made
	@$(call install,.[test],2.4 GB) && touch .venv/.core .venv/.demo $@

.venv/.dev: pyproject.toml constraints.txt | .venv/.made
	@$(call install,.[dev],3.9 GB) && touch .venv/.core .venv/.demo .venv/.test $@

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'python3: expected Python 3.11 or newer. Set another interpreter, for example make PYTHON=python3.11 test.' >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv || \
	  { echo 'Creating the virtual environment failed. On Debian, run apt install python3-venv, then run make again.' >&2; exit 1; }
	@touch $@

# pip prints each package, so that a long download is visible. A continuous integration keeps its log short.
define install
echo 'Installing $(1) into .venv: $(2) on disk, about two minutes, longer on a slow network ...' >&2; \
$(BIN)/python -m pip install $(if $(CI),-qq,--progress-bar off) --disable-pip-version-check -c constraints.txt -e '$(1)' >&2 || \
{ echo 'Installing packages failed with the errors above. Check the network connection, then run make again.' >&2; exit 1; }
endef

# Run every script of a folder, even if one fails. Scripts that need a training run or a data set are only listed.
define run_all
failed=; \
for script in $(1)/*.py; do \
echo "== $$script"; \
if grep -Eq 'add_argument\("(runs?|data|recipes)"' "$$script"; then echo "skipped: it needs a training run or a data set. See its docstring."; \
else $(BIN)/python "$$script" || failed="$$failed $$script"; fi; \
done; \
test -z "$$failed" || { echo "Failed:$$failed. The output of each script is above." >&2; exit 1; }
endef
