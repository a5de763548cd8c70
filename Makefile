# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT ?= checkpoints/k3-tiny
PORT ?= 8000
WORKERS ?= 2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt

.PHONY: serve serve-tp8 test test-slow accept aot lint checkpoint clean help

# A venv that failed half-way (Debian without python3-venv) must not pass for one the next time.
.DELETE_ON_ERROR:

help:
	@echo "make serve      install, serve the trained tiny model of the package on 127.0.0.1:$(PORT)"
	@echo "make serve-tp8  the same on 8 ranks of this machine, uncompiled, as 8 compilations on two cores take minutes"
	@echo "make checkpoint a tiny checkpoint of random weights in $(CHECKPOINT)"
	@echo "make test       the fast tests, under 10 minutes on two cores"
	@echo "make test-slow  the rest: Inductor, fuzzers, full identity runs, a browser"
	@echo "make accept     every check at its full count; writes accept.log"
	@echo "make aot        every GPU kernel compiled without a GPU by each version of Triton there is a table for"
	@echo "make lint       ruff"

$(BIN)/python:
	@echo "[1/3] virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: a looser request may choose a build for another device.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "[2/3] installing k3compile (torch is the large one)"
	$(PIP) -q "$$(grep '^torch==' constraints.txt)"
	$(PIP) -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "[3/3] installing the test tools and the outside implementations we compare with"
	$(PIP) -q -e '.[test]'
	@touch $@

$(CHECKPOINT)/config.json: | $(VENV)/.installed
	@echo "making the tiny checkpoint in $(CHECKPOINT)"
	$(BIN)/k3 make-checkpoint --preset tiny --seed 0 $(CHECKPOINT)

checkpoint: $(CHECKPOINT)/config.json

serve: $(VENV)/.installed
	$(BIN)/k3 serve --host 127.0.0.1 --port $(PORT)

# A step of eight processes on two cores may be held up for longer than a step on GPUs ever takes.
serve-tp8: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 8 examples/serve.py --tp 8 \
		--no-compile --kv-cache-bytes 67108864 --step-deadline-s 30 --host 127.0.0.1 --port $(PORT) $(ARGS)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not inductor and not tp and not browser and not gpu" $(ARGS)

test-slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "(slow or inductor or tp or browser) and not gpu" $(ARGS)

accept: $(VENV)/.installed-test
	nohup env OMP_NUM_THREADS=1 K3_ACCEPT=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu" $(ARGS) > accept.log 2>&1 &
	@echo "running in the background; follow accept.log"

# Beside the virtual environment and not in it: torch for CUDA brings 3.7.1, the tests have 3.8.0, and a
# folder in front of the path is enough to have another.
aot: $(patsubst k3compile/aot/tables/%.json,aot-%,$(wildcard k3compile/aot/tables/*.json))

aot-%: build/triton/% | $(VENV)/.installed
	PYTHONPATH=$< OMP_NUM_THREADS=1 COLUMNS=160 $(BIN)/k3 kernels --check

.PRECIOUS: build/triton/%
build/triton/%: | $(VENV)/.installed
	$(filter-out -c constraints.txt,$(PIP)) -q --no-deps --target $@ triton==$*

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
