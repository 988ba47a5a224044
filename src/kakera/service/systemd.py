"""systemctl, journalctl and loginctl for one user unit, and what is missing where they can not work."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from kakera.errors import KakeraError

UNIT = "kakera.service"
BOOTED = Path("/run/systemd/system")  # exists if and only if systemd is the init of this machine (sd_booted)
INSTEAD = "run `kakera serve` in a container or under a supervisor of your own instead (docs/operating.md)"

# what `systemctl show` calls it -> what we do
PROPERTIES = {
    "LoadState": "load",
    "UnitFileState": "enabled",
    "ActiveState": "active",
    "SubState": "state",
    "StatusText": "status",
    "MainPID": "pid",
    "NRestarts": "restarts",
    "MemoryCurrent": "memory_bytes",
    "ExecMainStatus": "exit_status",
    "ActiveEnterTimestamp": "since",
}
NUMBERS = ("pid", "restarts", "memory_bytes", "exit_status")
NO_NUMBER = 2**64 - 1  # systemd's way to say that it has none; newer versions write [not set]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class NoSystemd(KakeraError):
    """There is no user manager to talk to. The text says what to do instead."""


def require_systemd(booted: Path = BOOTED, wsl: bool = False) -> None:
    """Raises NoSystemd."""
    if not booted.is_dir() or not shutil.which("systemctl"):
        fix = "put systemd=true under [boot] in /etc/wsl.conf and run wsl --shutdown in Windows, or " if wsl else ""
        raise NoSystemd(f"systemd does not run here, so there can be no service: {fix}{INSTEAD}")
    if os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return
    raise NoSystemd(
        "no user manager answers in this session (XDG_RUNTIME_DIR is not set, as after su or sudo): log in as the user "
        f"who shall own the service, by ssh or machinectl shell; or {INSTEAD}"
    )


def unit_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / UNIT


def systemctl(*words: str, run: Run = subprocess.run) -> None:
    """A step that must work. Raises KakeraError with what systemctl said."""
    done = run(["systemctl", "--user", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KakeraError(f"systemctl --user {' '.join(words)}: {done.stderr.strip() or done.returncode}")


def show(*words: str, run: Run = subprocess.run) -> int:
    """A command whose output and exit status are for the user."""
    return run(list(words), check=False).returncode


def properties(run: Run = subprocess.run) -> dict[str, str | int | None]:
    """What systemd knows of the unit, installed or not. Raises KakeraError with what systemctl said."""
    words = ["systemctl", "--user", "show", UNIT, f"--property={','.join(PROPERTIES)}"]
    done = run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KakeraError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    found: dict[str, str | int | None] = {name: told.get(key) or None for key, name in PROPERTIES.items()}
    for name in NUMBERS:
        text = str(found[name])
        found[name] = int(text) if text.isdecimal() and int(text) < NO_NUMBER else None
    return found


def linger_problem(run: Run = subprocess.run) -> str | None:
    """Let the user's services run without a login. Returns what to do if that is not permitted."""
    done = run(["loginctl", "enable-linger"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
    return (
        f"the service will start at login and end at logout, because lingering could not be enabled ({said[0]}): "
        "sudo loginctl enable-linger $USER"
    )
