"""How many threads a machine lets this process compute with at once, and how they wait for each other. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def given_threads(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int:
    """The cores that this process may run on, or what its container's or unit's quota pays for if that is fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root, own)
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def cpu_quota(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that control groups (v2) pay for: the least of this process's own group and those above it; None if none
    has a limit, or where there are no such groups."""
    try:
        path = next(line[3:].strip("/\n") for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        path = ""
    places = [root, *(root.joinpath(*path.split("/")[: i + 1]) for i in range(path.count("/") + 1))]
    found = [quota for place in places if (quota := _quota(place / "cpu.max")) is not None]
    return min(found, default=None)


def _quota(file: Path) -> float | None:
    """Of "200000 100000" two cores, of "max 100000" None."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


@contextlib.contextmanager
def patient_threads(computes: bool) -> Iterator[None]:
    """In here nobody has loaded torch yet, and whoever does (a child, too) has threads that sleep while they wait.

    Threads that spin take the core from the one that they wait for: with neighbours on both of two cores the bundled
    model did not get through 660 + 60 tokens in a minute with two, bound to cores or not; asleep it read 181 tokens/s,
    and 84 with one. `computes`: on the CPU. A policy of the user's own stays.
    """
    added = {"OMP_WAIT_POLICY"} if computes and "OMP_WAIT_POLICY" not in os.environ else set()
    os.environ.update(dict.fromkeys(added, "passive"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
