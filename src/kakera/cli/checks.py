"""The checks of `kakera doctor`: each looks at one thing and returns a finding with its fix. Nothing is changed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "broken"]
PORT = 30000
LEAST_RAM = 4 * 10**9  # the bundled model plans about 2 GB
LEAST_DISK = 15 * 10**9  # a 27B checkpoint in 2 bits takes 10.2 GB
WSL_KERNEL_MARK = "microsoft"


@dataclass(frozen=True)
class Finding:
    """`broken` makes the exit status 1; `note` works, but not as well as it could. `fix` says what to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run_checks() -> list[Finding]:
    """All checks, cheap ones first. A check that raises is a finding itself: doctor must never fall over."""
    checks: tuple[Callable[[], Finding], ...] = (
        python_version,
        torch_import,
        gpu,
        torch_cuda,
        cuda_bindings,
        c_compiler,
        cpu,
        memory,
        wsl,
        card_memory,
        disk,
        port,
        bundled_model,
    )
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return Finding(name, "broken", f"the check itself failed: {error!r}", "report this line as a bug of kakera")


def python_version() -> Finding:
    detail = f"{platform.python_version()} in {sys.prefix}"
    if sys.prefix == sys.base_prefix:
        return Finding("python", "note", f"{detail}, not a virtual environment", "python3 -m venv .venv keeps it apart")
    return Finding("python", "ok", detail)


def torch_import() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "broken", f"can not be imported: {error}", "pip install --force-reinstall torch")
    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def gpu() -> Finding:
    from kakera.target.devices import detect_gpus

    found, warnings = detect_gpus()
    if found:
        names = ", ".join(f"{d.name} ({d.bytes / 1e9:.1f} GB, {d.used / 1e9:.1f} GB in use)" for d in found)
        return Finding("gpu", "note" if warnings else "ok", names, "; ".join(warnings))
    if shutil.which("nvidia-smi"):
        fix = "install or repair the NVIDIA driver, then check nvidia-smi (WSL2: the driver belongs to Windows)"
        return Finding("gpu", "broken", "nvidia-smi is there, but the driver does not answer", fix)
    return Finding("gpu", "ok", "no NVIDIA GPU: kakera runs on the CPU")


def torch_cuda() -> Finding:
    """A card that torch can not see is the commonest reason for a slow start."""
    from kakera.target.devices import detect_gpus

    if not detect_gpus()[0]:
        return Finding("torch for the gpu", "ok", "not needed without an NVIDIA GPU")
    import torch

    if torch.version.cuda is None:
        fix = "pip install --force-reinstall torch (this environment has the CPU build)"
        return Finding("torch for the gpu", "broken", f"torch {torch.__version__} was built without CUDA", fix)
    if not torch.cuda.is_available():
        fix = "update the NVIDIA driver, or install a torch for the CUDA version that nvidia-smi shows"
        return Finding("torch for the gpu", "broken", f"torch for CUDA {torch.version.cuda} sees no card", fix)
    return Finding("torch for the gpu", "ok", f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} cards")


def cuda_bindings() -> Finding:
    """Our kernels are compiled and launched by them; torch's CUDA builds bring them from 2.10 on."""
    from kakera.ops.cuda.compiler import bindings_fix
    from kakera.target.devices import detect_gpus

    if not detect_gpus()[0]:
        return Finding("cuda bindings", "ok", "not needed without an NVIDIA GPU")
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return Finding("cuda bindings", "broken", "cuda-bindings is missing: no GPU kernels", bindings_fix())
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        return Finding("cuda bindings", "broken", f"they find no NVRTC of their version: {error}", bindings_fix())
    return Finding("cuda bindings", "ok", f"NVRTC {major}.{minor}")


def c_compiler() -> Finding:
    """Triton builds a small launcher with it at first use, on machines with a GPU only."""
    from kakera.target.devices import detect_gpus

    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return Finding("c compiler", "ok", found)
    if not detect_gpus()[0]:
        return Finding("c compiler", "ok", "none, and none is needed without a GPU")
    fix = "Debian/Ubuntu/WSL2: sudo apt install gcc libc6-dev; Fedora: sudo dnf install gcc; Arch: sudo pacman -S gcc"
    return Finding("c compiler", "broken", "none found: Triton needs one when it compiles kernels at first use", fix)


def cpu() -> Finding:
    from kakera.target.threads import given_threads

    flags = _cpu_flags()
    vector = next((name for name in ("avx512f", "avx2", "asimd") if name in flags), "")
    count, there = given_threads(), os.cpu_count() or 1
    given = f"{count} threads" if count == there else f"{count} of {there} threads are given to this process"
    detail = f"{given}, {platform.machine()}{', ' + vector if vector else ''}"
    if platform.machine() in ("x86_64", "AMD64") and flags and not vector:
        return Finding("cpu", "note", f"{detail}, without AVX2", "the CPU engine works but is several times slower")
    return Finding("cpu", "ok", detail)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def memory() -> Finding:
    from kakera.target.devices import host_memory

    total, used = host_memory()
    detail = f"{total / 1e9:.1f} GB, {(total - used) / 1e9:.1f} GB free"
    if total - used < LEAST_RAM:
        fix = "close other programs; kakera plan shows what a model takes, --host-cache and --context make it smaller"
        return Finding("memory", "note", detail, fix)
    return Finding("memory", "ok", detail)


def wsl(release: str | None = None) -> Finding:
    """WSL2 gets half of the host's memory and no swap worth its name unless .wslconfig says otherwise."""
    from kakera.target.devices import host_memory

    if WSL_KERNEL_MARK not in (release or platform.release()).lower():
        return Finding("wsl", "ok", "not under WSL")
    total = host_memory()[0] / 1e9
    fix = (
        "in %UserProfile%\\.wslconfig under [wsl2] set memory= to the Windows memory less 6 GB and swap=8GB, then run "
        "wsl --shutdown; pinned memory is limited there, so keep --host-cache below half of it"
    )
    return Finding("wsl", "note", f"WSL2 with {total:.1f} GB of the host's memory", fix)


def card_memory(environ: Mapping[str, str] = os.environ, under_wsl: bool | None = None) -> Finding:
    """How memory is taken of a card, and who has chosen that: it is blamed for what WSL2's driver refuses."""
    from kakera.target.allocator import maps_pages, torch_segments
    from kakera.target.devices import detect_gpus

    if not detect_gpus()[0]:
        return Finding("card memory", "ok", "nothing to choose without an NVIDIA GPU")
    under_wsl = not maps_pages() if under_wsl is None else under_wsl
    chosen = torch_segments(environ, under_wsl)
    pages = "KV pages go back to the driver while other programs need the card"
    if under_wsl:
        pages = "KV pages stay on the card: other programs get only what the plan leaves (--reserve)"
    detail = f"{chosen.text}; {pages}"
    if under_wsl and chosen.on:
        fix = f"if a start is refused memory (device not ready, -12), take expandable_segments out of {chosen.by}"
        return Finding("card memory", "note", detail, fix)
    return Finding("card memory", "ok", detail)


def disk() -> Finding:
    from kakera.hub.disk import room

    place, free = room()
    detail = f"{free / 1e9:.1f} GB free for downloads in {place}"
    if free < LEAST_DISK:
        return Finding("disk", "note", detail, "a 27B checkpoint takes 10.2 GB: make room, or set HF_HOME elsewhere")
    return Finding("disk", "ok", detail)


def port(number: int = PORT) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            fix = "stop the program that listens there, or give kakera serve another --port"
            return Finding("port", "note", f"127.0.0.1:{number} is taken ({error.strerror})", fix)
    return Finding("port", "ok", f"127.0.0.1:{number} is free")


def bundled_model(directory: Path | None = None) -> Finding:
    """Every file of the bundled model against its checksum, then the headers, the sizes and the tokenizer."""
    from kakera.cli.model import BUNDLED
    from kakera.errors import KakeraError

    directory = directory or BUNDLED
    fix = f"reinstall kakera {importlib.metadata.version('kakera')}"
    if not directory.is_dir():
        return Finding("bundled model", "broken", f"{directory} is missing", fix)
    try:
        if damaged := _damaged_files(directory):
            return Finding("bundled model", "broken", f"damaged or missing: {', '.join(damaged)}", fix)
        from kakera.text.tokenizer import Tokenizer
        from kakera.weights.checkpoint import Checkpoint

        count, vocab = len(Checkpoint.open(directory).entries()), Tokenizer.load(directory).vocab
    except KakeraError as error:
        return Finding("bundled model", "broken", str(error), fix)
    return Finding("bundled model", "ok", f"mini: {count} weights, {vocab} tokens, checksums right")


def _damaged_files(directory: Path) -> list[str]:
    """Names in SHA256SUMS whose file is missing or differs. The list itself counts as one."""
    from kakera.hub.download import sha256_of

    sums = directory / "SHA256SUMS"
    if not sums.is_file():
        return [sums.name]
    expected = [line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip()]
    return [
        name for digest, name in expected if not (directory / name).is_file() or sha256_of(directory / name) != digest
    ]
