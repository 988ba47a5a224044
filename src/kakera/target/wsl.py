"""WSL2: whether this Linux runs under Windows, whose driver keeps more of a card than it shows. No torch."""

from __future__ import annotations

from pathlib import Path

PROC_VERSION = Path("/proc/version")

# Residency was refused with 9.6 of 12.2 GiB in use on two 5070s, and 24 GB cards slow down 0.5 GB before bare metal
# does: so much more stays free until a proven figure says better.
RESERVE = 10**9


def under_wsl(proc_version: Path = PROC_VERSION) -> bool:
    try:
        return "microsoft" in proc_version.read_text().lower()
    except OSError:
        return False
