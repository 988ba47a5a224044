"""CUDA C++ compiled at run time (NVRTC), kept on disk and launched on torch's current stream.

No compiler and no CUDA toolkit is needed on the user's machine: NVRTC comes with torch's CUDA build, and the sources
here include nothing but each other. No GPU is needed to compile.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakera.errors import KakeraError

SOURCES = Path(__file__).parent
OPTIONS = ("-std=c++17", "-default-device", "-Xptxas=-v")


@dataclass(frozen=True)
class Compiled:
    """Machine code, and the assembler's words on registers, spills and shared memory."""

    cubin: bytes
    report: str


class Kernel:
    """A loaded kernel that takes one structure by value. Threads per block are fixed. Not thread-safe.

    A launch takes 5 us of a CPU, because what stays the same is made once: a prefill step has some two thousand.
    """

    def __init__(self, function: Any, threads: int, device: int, overlaps: bool):
        self._function = function
        self._device = device
        self._configs = [_config(threads, False), _config(threads, overlaps)]

    def launch(self, blocks: tuple[int, int], arguments: ctypes.Structure, dependent: bool = False) -> None:
        """On torch's current stream of the kernel's device. The structure is copied before this returns.

        `dependent`: the kernel itself waits for those in front of it (on Hopper and later it may start before their
        end; earlier cards know no such thing and start it behind them).
        """
        import torch
        from cuda.bindings import driver

        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = self._configs[dependent]
        config.gridDimX, config.gridDimY = blocks
        config.hStream = torch._C._cuda_getCurrentRawStream(self._device)
        if torch.cuda.current_device() == self._device:
            _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))
            return
        with torch.cuda.device(self._device):
            _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


def _config(threads: int, overlaps: bool) -> Any:
    """Of a launch; `overlaps`: it may start before the end of those in front of it."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = 0
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def kernel(name: str, threads: int, defines: tuple[str, ...], device: int) -> Kernel:
    """The entry `name` of NAME.cu for a CUDA device that torch has used, compiled or read from disk."""
    import torch

    try:
        from cuda.bindings import driver
    except ImportError:
        raise KakeraError(f"GPU kernels need NVIDIA's Python bindings: {bindings_fix()}") from None
    major, minor = torch.cuda.get_device_capability(device)
    cubin = cached_cubin(name, defines, f"sm_{major}{minor}", cache_directory())
    with torch.cuda.device(device):
        (module,) = _check(driver.cuModuleLoadData(cubin))
    (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
    return Kernel(function, threads, device, major >= 9)


def bindings_fix() -> str:
    """How to install bindings of torch's own CUDA version: without a version pip takes the newest, which may need a
    driver and an NVRTC that are not there."""
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    return f"pip install 'cuda-bindings=={major}.*' (the CUDA version of torch)"


def cache_directory() -> Path:
    """Where the XDG rules put what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakera" / "kernels"


def cache_name(name: str, defines: tuple[str, ...], arch: str) -> str:
    """Names what compiling NAME.cu gives: a hash of sources, options and NVRTC's version."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    digest = hashlib.sha256(repr((defines, arch, OPTIONS, major, minor)).encode())
    for path in (SOURCES / f"{name}.cu", *_headers()):
        digest.update(path.read_bytes())
    return f"{name}-{arch}-{digest.hexdigest()[:24]}"


def cached_cubin(name: str, defines: tuple[str, ...], arch: str, directory: Path) -> bytes:
    """Machine code of NAME.cu for `arch`, kept in `directory` under its `cache_name`."""
    path = directory / f"{cache_name(name, defines, arch)}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = compile_source(name, defines, arch).cubin
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        Path(part).replace(path)  # two processes may compile the same: each sees a whole file
    except OSError:
        pass  # a read-only home costs the compilation at each start, nothing else
    return bytes(cubin)


def compile_source(name: str, defines: tuple[str, ...], arch: str) -> Compiled:
    """NAME.cu for `arch` (sm_80 ...). Raises KakeraError with the compiler's words."""
    from cuda.bindings import nvrtc

    headers = _headers()
    (program,) = _check(
        nvrtc.nvrtcCreateProgram(
            (SOURCES / f"{name}.cu").read_bytes(),
            f"{name}.cu".encode(),
            len(headers),
            [header.read_bytes() for header in headers],
            [header.name.encode() for header in headers],
        )
    )
    options = [*OPTIONS, f"-arch={arch}", *(f"-D{define}" for define in defines)]
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    report = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(bytes(1)).decode()
    if int(result[0]) != 0:
        raise KakeraError(f"{name}.cu does not compile for {arch}:\n{report}")
    cubin = _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    _check(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(cubin, report)


def _read(program: Any, size: Any, get: Any) -> bytes:
    """What NVRTC hands out in two steps: how long it is, and what it is."""
    (length,) = _check(size(program))
    text = bytes(length)
    _check(get(program, text))
    return text


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.cuh"))


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a CUDA call returned behind its status; raises KakeraError if that is not success."""
    if int(result[0]) != 0:
        raise KakeraError(f"a CUDA call failed: {result[0]!r}")
    return result[1:]
