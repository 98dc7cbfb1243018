# Two commands: `make render` makes a clip, `make test` checks the project. Both set everything up first.
PYTHON ?= python3
VENV   ?= .venv
PROMPT ?= a large red circle moves right on a navy background, a low tone
ARGS   ?=

PY     := $(VENV)/bin/python
KEY    := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
STAMP  := $(VENV)/.ready-$(KEY)
LINK   := $(VENV)/.linked-$(KEY)-$(shell pwd | cksum | cut -d' ' -f1)
SRC    := videogen caches lora eval app.py tests

# libgomp's spinning barriers make two busy processes on few cores 20 times slower
export OMP_WAIT_POLICY = passive
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup render test lint types unit python-path clean

setup: $(LINK)

# the name holds what both files say: their dates, new in every clone, need not start it again
$(STAMP):
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python: got %d.%d, expected 3.11 or newer; set PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "videogen: installing the pinned packages into $(VENV) (once; 5.5 GB with torch)" >&2
	@$(PY) -m pip install -qq -c constraints.txt 'setuptools>=77'
	@$(PY) -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@rm -f $(VENV)/.ready-* $(VENV)/.linked-*
	@touch $(STAMP)

# An environment shared between checkouts points at the checkout that used it last.
$(LINK): $(STAMP)
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.linked-* && touch $(LINK)

render: setup
	@$(PY) -m videogen render --prompt "$(PROMPT)" $(ARGS)

test: lint types unit

lint: setup
	$(PY) -m ruff check $(SRC)
	$(PY) -m ruff format --check $(SRC)

types: setup
	$(PY) -m mypy

unit: setup
	$(PY) -m pytest

python-path: setup
	@echo $(abspath $(PY))

clean:
	rm -rf $(VENV) outputs build *.egg-info
