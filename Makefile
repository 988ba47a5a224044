# make demo: everything from a fresh clone to a running demonstration. Needs make and Python 3.11 to 3.14, no GPU.

VENV   := .venv
PYTHON := $(VENV)/bin/python
READY  := $(VENV)/.ready
PIP    := $(PYTHON) -m pip --disable-pip-version-check
# The CPU build, because a GPU build brings gigabytes of CUDA libraries. An index that serves CPU builds has this one.
TORCH := torch==2.13.0
CPU_TORCH := $(TORCH)+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo quick test test-all test-gpu lint venv clients kernels wheel-check lock clean
.DEFAULT_GOAL := demo

demo: $(READY)
	@$(PYTHON) -m tools.demo

# What to run after every change: the rooms without torch, the codec, the arithmetic, a story or two end to end.
QUICK := $(wildcard tests/test_*.py) \
  $(wildcard $(addprefix tests/,contract arch target plan disk cache schedule text vision chat constrain ops)) \
  $(addprefix tests/kv/test_kv_,codec.py rotation.py softmax.py) \
  tests/run/test_hit_is_cold.py tests/server/test_chat.py
# Where Python is told to keep no compiled modules, each process of a test compiles all that it imports, and pytest all
# tests in each worker: 6 seconds a worker to find them, where it takes them from the last run.
unexport PYTHONDONTWRITEBYTECODE
# Tests at a time; `make test WORKERS=8` on a larger machine. A worker that has nothing left takes from another.
WORKERS := 2
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal

quick: $(READY)
	@$(PYTEST) -m 'not compile and not slow and not sweep' $(QUICK) $(PYTEST_ARGS)

test: $(READY)
	@$(PYTEST) -m 'not sweep' $(PYTEST_ARGS)

# With the sweeps: every kernel for every card, every route by made-up requests, ...
test-all: $(READY)
	@$(PYTEST) $(PYTEST_ARGS)

# Tests of kernels and of the engine on an NVIDIA GPU; where there is none, each is skipped and says so.
test-gpu: $(READY)
	@$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(READY)
	@$(PYTHON) -m ruff check src tests tools
	@$(PYTHON) -m ruff format --check src tests tools
	@$(VENV)/bin/clang-format --dry-run --Werror src/kakera/ops/cuda/*.cu src/kakera/ops/cuda/*.cuh
	@$(PYTHON) -m mypy

# What of docs/ is computed: the table of cards, after every change of the planner.
.PHONY: docs
docs: $(READY)
	@$(PYTHON) -m tools.cards

venv: $(READY)

# The wheel in empty environments, with the lowest releases that pyproject.toml allows and with the newest.
# WHEEL_ARGS=--with-torch installs torch as well, the lowest and the newest (gigabytes).
wheel-check: $(READY)
	@$(PYTHON) -m tools.wheel_check $(WHEEL_ARGS)

# For tests/clients, which are skipped without them.
clients: $(READY)
	@$(PIP) install --editable '.[dev,clients]'

# For tests of the Triton kernels in its interpreter, which are skipped without it.
kernels: $(READY)
	@$(PIP) install --editable '.[dev,kernels]'

# What the images install, with hashes; Python and platform are the Dockerfile's. CPU_WHEELS may be a directory.
CPU_WHEELS := $(CPU_INDEX)/torch/
COMPILE = $(PYTHON) -m uv pip compile --quiet --upgrade --generate-hashes --no-annotate --no-build \
  --python-version 3.11 --python-platform x86_64-manylinux_2_35 --custom-compile-command 'make lock'
lock: $(READY)
	@$(PIP) install --quiet uv
	@echo '$(CPU_TORCH)' | $(COMPILE) --extra vision --find-links '$(CPU_WHEELS)' --output-file requirements-cpu.lock pyproject.toml -
	@echo '$(TORCH)' | $(COMPILE) --extra vision --extra gpu --output-file requirements-gpu.lock pyproject.toml -

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist

# The stamp makes a second `make` instant; a changed pyproject.toml installs what is new.
$(READY): pyproject.toml
	@echo "[1/3] virtual environment in $(VENV)"
	@test -x $(PYTHON) || { $(find_python); echo "      $$($$found --version) ($$found)"; $$found -m venv $(VENV); }
	@echo "[2/3] torch"
	@$(PYTHON) -c "import torch; print('      torch', torch.__version__, 'is there')" 2>/dev/null || { $(install_torch); }
	@echo "[3/3] kakera and what it needs"
	@$(PIP) install --editable '.[dev]'
	@touch $(READY)

# The first Python that is new enough and can make virtual environments (Debian ships venv in a package of its own).
define find_python
found=; \
for candidate in python3 python3.13 python3.12 python3.11 python3.14; do \
  if $$candidate -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; \
  then found=$$candidate; break; fi; \
done; \
if [ -z "$$found" ]; then \
  echo "kakera needs Python 3.11 to 3.14 with the venv module, and none was found on the PATH." >&2; \
  echo "Debian/Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python; or https://docs.astral.sh/uv" >&2; \
  exit 1; \
fi
endef

define install_torch
if command -v nvidia-smi >/dev/null 2>&1 || [ "$$(uname -s)" != Linux ]; then \
  echo "      plain torch"; $(PIP) install 'torch>=2.10'; \
else \
  echo "      no NVIDIA GPU: the CPU build (about 200 MB)"; \
  $(PIP) install '$(CPU_TORCH)' 2>/dev/null || $(PIP) install 'torch>=2.10' --index-url $(CPU_INDEX); \
fi
endef
