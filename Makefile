# From a clean clone on Debian or Ubuntu with git, make, python3 and root:
#   make demo      a lab of four hosts in two racks trains a network, live
#   make test      the quick tests, and one story on the lab for each promise of docs/promises.md
#   make test-all  every test: each launcher, each fault, long random histories
.PHONY: setup packages demo test test-unit test-stories test-change test-all check mutants bench lab image images
.PHONY: site man reference dist dist-test fresh clean
.DEFAULT_GOAL := setup

VENV := .venv
PYTHON := $(VENV)/bin/python
GPURUN := $(VENV)/bin/gpurun

setup: $(VENV)/.installed

packages:
	@.ci/install-packages

$(VENV)/.installed: pyproject.toml | packages
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --quiet --disable-pip-version-check --editable '.[dev]'
	$(PYTHON) -m compileall -q gpurun  # as pip does for packages: users who cannot write here would compile each time
	touch $@

# The lab goes down however the demo ends, Ctrl-C included; what it trained stays in build/demo.
demo: export GPURUN_HOME := $(CURDIR)/build/demo
demo: setup image
	@trap '$(GPURUN) lab down --name demo' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; set -e; \
	lab=$$($(GPURUN) lab up --name demo --racks 2 --hosts 2 --gpus 4); set -x; \
	$(GPURUN) submit recipes/fashion-mnist --gpus-per-host 1 --follow --inventory $$lab/inventory.yaml; \
	$(GPURUN) status --inventory $$lab/inventory.yaml

# Building Horovod and the quick tests share the wait.
# `make test ROOM=leases` runs the quick tests of one room.
ifdef ROOM
test: setup
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/pytest -m 'not lab' -n 2 tests/$(ROOM)
else
test: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line image test-unit
	@$(MAKE) --no-print-directory test-stories
endif

# Each run writes what its tests cost into build/times: .ci/slowest.py.
TIMED = env -u PYTHONDONTWRITEBYTECODE GPURUN_TIMES=build/times/$(1).csv $(VENV)/bin/pytest

# Some of these tests wait: six processes keep two cores busy. Each process imports all test modules, so
# pytest keeps their compiled form, whatever PYTHONDONTWRITEBYTECODE says.
UNIT := -m 'not lab' -n 6 --dist worksteal

# In a clean clone each of the six would compile all modules. What is wrong with a module is for the tests to say.
COMPILE_TESTS = @ls -d tests/*/ tests/*.py | grep -v __pycache__ | env -u PYTHONDONTWRITEBYTECODE \
	xargs -P 2 -n 12 $(VENV)/bin/pytest --collect-only -qq >/dev/null 2>&1 || true

LAB := -n 3 --dist loadgroup --no-loadscope-reorder

# Their files lie in memory if there is room: on a disk, a quarter of the CPU time goes to syncing them.
IN_MEMORY = PYTEST_DEBUG_TEMPROOT=$$(.ci/memory-folder)

test-unit: setup
	$(COMPILE_TESTS)
	$(IN_MEMORY) $(call TIMED,unit) $(UNIT)

test-stories: setup image
	$(call TIMED,stories) $(LAB) -m 'lab and story'

# The lab tests that a change needs besides the stories, and a fifth of all others: see tests/tiers.py.
# One or two that fail get a second run, and are named: see docs/decisions/0041-tests-have-tiers.md. 5: no test is needed.
test-change: SINCE := session
test-change: setup images
	$(call TIMED,change) $(LAB) -m 'lab and not alone' --change $(SINCE) || .ci/again.py build/times/change.csv
	$(call TIMED,change-alone) -m 'lab and alone' --change $(SINCE) || test $$? = 5 || .ci/again.py build/times/change-alone.csv

# For each release. The random examples and histories are more, and new in each run.
test-all: setup images
	$(IN_MEMORY) $(call TIMED,unit) $(UNIT) --hypothesis-profile=long
	$(call TIMED,lab) $(LAB) -m 'lab and not alone'
	$(call TIMED,alone) -m 'lab and alone'

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Do the quick tests notice 60 small changes of the code? See .ci/mutants.py.
mutants: SEED := 1
mutants: setup
	$(PYTHON) -m pip install --quiet --disable-pip-version-check coverage
	$(PYTHON) .ci/mutants.py map build/mutants-map.json
	$(PYTHON) .ci/mutants.py choose build/mutants.json --seed $(SEED) --count 60
	$(PYTHON) .ci/mutants.py run build/mutants.json --map build/mutants-map.json --to build/mutants-results.json

bench: setup image
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(PYTHON) $$file; done

lab: setup
	$(GPURUN) lab up

# What the demo, most recipes and `make test` need; `images` has those with PyTorch and JAX, too.
image: setup
	@$(PYTHON) recipes/images/build.py tf2.15 base shell tiny

images: setup
	@$(PYTHON) recipes/images/build.py

# The documentation as a site in build/site. It needs no network: open index.html, or
# `python3 -m http.server --directory build/site`, which the search needs.
site: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

man: setup
	$(GPURUN) man --to build/man

# Pages of docs/ that are written from the code: after a change of a command, an option, or a key of the inventory.
reference: setup
	$(PYTHON) .ci/reference.py

# The source distribution, and the wheel that is built from it: pip, pipx and uv install them where no clone is.
dist: setup
	$(VENV)/bin/uv build --quiet --out-dir dist

# The quick tests, run with the wheel instead of this clone's gpurun. ROOM=leases: those of one room.
dist-test: dist
	$(PYTHON) .ci/dist_test.py $(if $(ROOM),tests/$(ROOM))

# What README.md promises, tried: a clean clone on a new Debian with git, make and python3. See .ci/fresh.py.
fresh: RUN := make setup && make demo && make test
fresh: setup
	@$(PYTHON) .ci/fresh.py $(if $(SUITE),--suite '$(SUITE)') $(if $(COLD),--cold) '$(RUN)'

# Only what this clone made. Images, wheels and lab disks are in ~/.cache/gpurun and shared by clones.
clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
