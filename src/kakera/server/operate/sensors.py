"""What the machine says about itself: memory in use, power and temperature of the cards. For the status page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from kakera.target.devices import host_memory, visible_cards

FRESH_SECONDS = 0.45  # several open pages share one reading

SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80  # NVML's reasons: hardware, thermal by software, by hardware, power brake


@dataclass(frozen=True)
class CardReading:
    """None where the driver does not say (power under WSL2, for example). `slowed`: its clocks are lower for heat or
    for its supply; that it stays within its power limit is not meant."""

    name: str
    bytes: int
    used: int  # by everybody
    watts: float | None
    limit_watts: float | None
    celsius: int | None
    utilization: int | None  # percent of the time in which kernels ran
    clock_mhz: int | None = None
    slowed: bool | None = None


@dataclass(frozen=True)
class Reading:
    host_bytes: int
    host_used: int  # by everybody
    resident: int  # of our own processes; shared pages count in each
    cards: tuple[CardReading, ...] = ()


class Sensors:
    """`cards`: how many NVIDIA cards the plan uses; they are the first that CUDA shows."""

    def __init__(self, cards: int = 0):
        self._cards = cards
        self._nvml: Any = None
        self._process = psutil.Process()
        self._read_at = float("-inf")
        self._last: Reading | None = None

    def read(self) -> Reading:
        """Blocks for some milliseconds. At most about two readings a second; in between the last one again."""
        if self._last is None or time.monotonic() - self._read_at >= FRESH_SECONDS:
            total, used = host_memory()
            cards = self._read_cards() if self._cards else ()
            self._last, self._read_at = Reading(total, used, self._resident(), cards), time.monotonic()
        return self._last

    def _resident(self) -> int:
        found = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it may have ended by now
                found += process.memory_info().rss
        return found

    def _read_cards(self) -> tuple[CardReading, ...]:
        import pynvml

        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            return tuple(_card(pynvml, handle) for handle in visible_cards(pynvml)[: self._cards])
        except pynvml.NVMLError:
            return ()


def _card(nvml: Any, handle: Any) -> CardReading:
    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    name = nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    milliwatts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return CardReading(
        name=name.decode() if isinstance(name, bytes) else str(name),
        bytes=int(memory.total),
        used=int(memory.used),
        watts=None if milliwatts is None else milliwatts / 1000,
        limit_watts=None if limit is None else limit / 1000,
        celsius=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        utilization=None if rates is None else int(rates.gpu),
        clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        slowed=None if reasons is None else bool(reasons & SLOWDOWNS),
    )
