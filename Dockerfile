# docker build -t kakera .                          for CPUs
# docker build -t kakera-gpu --build-arg DEVICE=gpu .     for NVIDIA GPUs (run with --gpus all; needs the host's driver)
# docker run --init -p 127.0.0.1:30000:30000 --stop-timeout 40 --restart on-failure kakera
# With --drain-seconds N for kakera: --stop-timeout 37 and N more.
ARG DEVICE=cpu

# The Python with which all tests run, and for which `make lock` finds wheels.
FROM python:3.11-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 kakera
WORKDIR /build
COPY requirements-cpu.lock requirements-gpu.lock ./

# The CPU build of torch is about 200 MB; the default one brings gigabytes of CUDA libraries.
FROM base AS torch-cpu
RUN pip install --require-hashes --only-binary :all: -r requirements-cpu.lock \
  --find-links https://download.pytorch.org/whl/cpu/torch/

# Triton compiles a launcher with the system's compiler when a kernel is first used.
FROM base AS torch-gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --require-hashes --only-binary :all: -r requirements-gpu.lock

FROM torch-${DEVICE}
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# With the setuptools of the lock, and nothing that is not in it.
RUN pip install --no-deps --no-build-isolation . && rm -rf /build/*

USER kakera
WORKDIR /home/kakera
# Downloaded models and what a restart wants to know; a volume here survives upgrades of the image.
RUN mkdir -p .cache/huggingface .local/state
EXPOSE 30000
# Health is progress of the engine, also while the server finishes its last requests (ready=0). A server whose engine hangs ends itself, so a restart policy is all it needs.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health?ready=0', timeout=4)"]
ENTRYPOINT ["kakera"]
# The port is meant to be published on this machine (127.0.0.1:30000, as above). A page elsewhere that lets its own name
# point there sends that name, so only localhost is answered: name others with --allowed-host, or set --api-key-file.
CMD ["serve", "mini", "--host", "0.0.0.0", "--allowed-host", "localhost"]
