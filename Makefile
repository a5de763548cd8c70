# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT ?= checkpoints/k3-tiny
PORT ?= 8000
WORKERS ?= 2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt

.PHONY: serve test test-slow accept lint checkpoint clean help

# A venv that failed half-way (Debian without python3-venv) must not pass for one the next time.
.DELETE_ON_ERROR:

help:
	@echo "make serve      install, serve the trained tiny model of the package on 127.0.0.1:$(PORT)"
	@echo "make checkpoint a tiny checkpoint of random weights in $(CHECKPOINT)"
	@echo "make test       the fast tests, under 10 minutes on two cores"
	@echo "make test-slow  the rest: Inductor, fuzzers, full identity runs, a browser"
	@echo "make accept     every check at its full count; writes accept.log"
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

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not inductor and not tp and not browser and not gpu" $(ARGS)

test-slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "(slow or inductor or tp or browser) and not gpu" $(ARGS)

accept: $(VENV)/.installed-test
	nohup env OMP_NUM_THREADS=1 K3_ACCEPT=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu" $(ARGS) > accept.log 2>&1 &
	@echo "running in the background; follow accept.log"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
