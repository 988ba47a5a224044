"""WSL2: what Windows has to be told before a service can live there. Files of Windows are named, never written."""

from __future__ import annotations

WINDOWS_BYTES = 6 * 10**9  # left to Windows


def needs(memory_max: int, systemd: bool) -> list[str]:
    """Lines for a person. `memory_max`: bytes that the service may take; `systemd`: whether it runs already."""
    gigabytes = -(-(memory_max + 2 * 10**9) // 10**9)  # and the rest of Linux
    boot = [] if systemd else ["  /etc/wsl.conf:              [boot] systemd=true"]
    return [
        "WSL2 needs this once, then `wsl --shutdown` in Windows:",
        *boot,
        f"  %UserProfile%\\.wslconfig:   [wsl2] memory={gigabytes}GB or more (by default half of the Windows memory;"
        f" leave Windows {WINDOWS_BYTES // 10**9} GB), swap=8GB",
        "                              [wsl2] vmIdleTimeout=-1 and [general] instanceIdleTimeout=-1, or Windows ends"
        " Linux, and the service with it, when no terminal is open",
        "  NVIDIA Control Panel:       Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback,"
        " or a full card becomes several times slower without an error",
    ]
