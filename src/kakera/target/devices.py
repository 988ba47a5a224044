"""Machine: the cards and the host memory that a plan may use, asked for by `--gpus` or detected. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from kakera.errors import UsageError
from kakera.target import cards, wsl
from kakera.target.remembered import proven_reserve
from kakera.target.target import CPU, CUDA, Target

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_UNITS = {"": 1, **_DECIMAL, **_BINARY}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t|ki|mi|gi|ti)?b?")
HINT = (
    "use auto, cpu, cpu:4GB, cpu,cpu, sizes such as 12GB,12GB (10^9 bytes) or 12GiB, or names such as rtx5070,rtx5070"
)
MOST_BYTES = 2**60  # of a size that is written down
DESKTOP_BYTES = 256 * 10**6  # a display takes about this much; more is worth a warning


@dataclass(frozen=True)
class Device:
    """One card, the CPU with its memory ("cpu"), or the CPU with a part of it ("cpu:4GB").

    `used` bytes belong to other processes. Speeds None = unknown.
    """

    name: str
    bytes: int
    used: int = 0
    bandwidth: float | None = None  # bytes per second
    flops: float | None = None  # fp16 operations per second
    driver: str | None = None  # version, of a card that was asked


@dataclass(frozen=True)
class Machine:
    """`devices` compute and hold weights and KV; `ram` is the host's memory (of a CPU the same memory). `reserve`:
    bytes of a device that stay free beyond the usual margin, because its driver is known to take them. `processes`: on
    a CPU, how many share the model."""

    target: Target
    devices: tuple[Device, ...]
    ram: int
    ram_used: int = 0
    warnings: tuple[str, ...] = ()
    reserve: int = 0
    processes: int = 1

    @property
    def ranks(self) -> int:
        """Parts of a model, each with a process of its own."""
        return len(self.devices) if self.target.has_cards else self.processes


def parse_bytes(text: str, said: str = "") -> int:
    """ "12GB" -> 12 * 10^9, "512MiB" -> 512 * 2^20. Raises UsageError, which begins with `said`."""
    match = _SIZE.fullmatch(text.strip().lower())
    if not match:
        hint = "write for example 2GB (10^9 bytes), 512MiB or plain bytes"
        raise UsageError(f"{said}{text[:40]!r} is not a size; {hint}")
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size > MOST_BYTES:
        raise UsageError(f"{said}{text[:40]!r} is more than any machine has")
    return int(size)


def resolve(gpus: str) -> Machine:
    """The machine that `--gpus` names; "auto" takes every NVIDIA card, or the CPU without one. Raises UsageError."""
    total, used = host_memory()
    text = gpus.strip().lower()
    if text == "auto":
        found, warnings = detect_gpus()
        return Machine(CUDA, found, total, used, warnings, _reserve(found)) if found else resolve("cpu")
    if text == "cpu":
        return Machine(CPU, (Device("cpu", total, used),), total, used)
    if text.replace(" ", "") == ",".join(["cpu"] * (text.count(",") + 1)):
        return replace(resolve("cpu"), processes=text.count(",") + 1)
    if text.startswith("cpu:"):
        return _part_of_host(text.removeprefix("cpu:").strip(), total)
    devices = tuple(_named(part.strip()) for part in text.split(","))
    return Machine(CUDA, devices, total, used, reserve=_reserve(devices))


def _reserve(devices: tuple[Device, ...]) -> int:
    """Under WSL2 what was proven to be enough, for the card that needs most, and at most a safe figure."""
    if not wsl.under_wsl():
        return 0
    proven = [proven_reserve(device.name, device.driver) for device in devices]
    return max(wsl.RESERVE if found is None else min(wsl.RESERVE, found) for found in proven)


def resolve_to_compute(gpus: str) -> Machine:
    """As `resolve`, for one card, because one computes so far: of those that "auto" finds the first. Raises UsageError
    if several are named."""
    machine = resolve(gpus)
    if len(machine.devices) == 1:
        return machine
    if gpus.strip().lower() != "auto":
        raise UsageError(
            f"--gpus {gpus}: kakera computes on one card so far; name one (kakera plan shows what several will hold)"
        )
    first, *others = machine.devices
    warning = (
        f"kakera computes on one card so far: on the first, {first.name}, and not on {len(others)} more; "
        "CUDA_VISIBLE_DEVICES=1 chooses the second"
    )
    mine = tuple(line for line in machine.warnings if line.startswith("GPU 0 "))
    return replace(machine, devices=(first,), warnings=(*mine, warning))


def _part_of_host(text: str, total: int) -> Machine:
    """The CPU with so much memory and no more, whatever others use: the same plan at every start."""
    size, name = parse_bytes(text, "--gpus cpu:"), f"cpu:{_as_written(text)}"
    warning = f"--gpus {name}: this machine has {total} bytes of memory" if size > total else ""
    return Machine(CPU, (Device(name, size),), size, warnings=(warning,) if warning else ())


def _named(part: str) -> Device:
    card = cards.find(part)
    if card is not None:
        return Device(
            cards.normalise(part), card.memory_mib * 2**20, 0, card.bandwidth_gbs * 1e9, card.fp16_tflops * 1e12
        )
    if part and part[0].isdigit() and _SIZE.fullmatch(part):
        size = parse_bytes(part, "--gpus ")
        if size < 10**9:
            raise UsageError(f"--gpus {part}: {size} bytes is no card; {HINT}")
        return Device(_as_written(part), size)
    raise UsageError(f"--gpus {part or '(empty)'}: not a size and not a known card; {HINT}")


def _as_written(size: str) -> str:
    """ "12gib" -> "12GiB"."""
    return size.upper().replace("I", "i")


def detect_gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """NVIDIA cards by NVML, and warnings about who else uses them. Nothing found if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ()
    try:
        found = [_detected(i, handle) for i, handle in enumerate(visible_cards(pynvml))]
    finally:
        pynvml.nvmlShutdown()
    return tuple(device for device, _ in found), tuple(warning for _, warning in found if warning)


def device_bytes_used() -> int:
    """Bytes in use on all NVIDIA cards, by anybody; 0 without a card."""
    return sum(device.used for device in detect_gpus()[0])


def visible_cards(nvml: Any) -> list[Any]:
    """NVML's handles of the cards that CUDA shows, in its order (by bus, see `run.build`): all, or those that
    CUDA_VISIBLE_DEVICES names by number or by the beginning of a UUID. A name of no card hides those behind it."""
    every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return every
    found: list[Any] = []
    for name in names.split(","):
        card = _card_called(name.strip(), every, nvml)
        if card is None:
            break
        found.append(card)
    return found


def _card_called(name: str, every: list[Any], nvml: Any) -> Any:
    if name.isdigit():
        return every[int(name)] if int(name) < len(every) else None
    if name.startswith("MIG-"):  # a part of a card, which is in no list
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            return None
    uuids = [nvml.nvmlDeviceGetUUID(card) for card in every] if name.startswith("GPU-") else []
    return next((card for card, uuid in zip(every, uuids, strict=False) if _text(uuid).startswith(name)), None)


def _driver(nvml: Any) -> str | None:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except (nvml.NVMLError, AttributeError):
        return None


def _text(raw: bytes | str) -> str:
    """Older bindings give bytes."""
    return raw.decode() if isinstance(raw, bytes) else raw


def _detected(index: int, handle: object) -> tuple[Device, str]:
    import pynvml

    name = _text(pynvml.nvmlDeviceGetName(handle))
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    device = Device(name, int(memory.total), int(memory.used), driver=_driver(pynvml))
    if card := cards.find(name):
        device = replace(device, bandwidth=card.bandwidth_gbs * 1e9, flops=card.fp16_tflops * 1e12)
    if device.used <= DESKTOP_BYTES:
        return device, ""
    try:
        # under WSL2 the list may be empty or not available although memory is in use
        users = [f"process {p.pid}" for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:
        users = []
    who = ", ".join(users) or "another process or the desktop"
    return device, (
        f"GPU {index} ({name}): {who} holds {device.used / 1e9:.1f} GB of it, which the plan leaves alone; where the "
        f"plan is smaller than you want, close it and plan again"
    )


def host_memory() -> tuple[int, int]:
    """(total, used by others) bytes of host memory; a container's limit counts if it is lower."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _cgroup_limit()
    if limit is not None and limit < total:
        return limit, min(limit, max(used, limit - available))
    return total, total - available


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """(limit, bytes in use without the page cache) of this container (cgroup v2), or (None, 0)."""
    try:
        limit = int((root / "memory.max").read_text())
        current = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit, max(0, current - int(stat.get("file", 0)))
    except (OSError, ValueError):
        return None, 0
