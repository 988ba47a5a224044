"""A private directory for the engine's socket. Those that killed servers left behind are cleared away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from kakera.errors import KakeraError

PREFIX = "kakera-"
OLD_SECONDS = 3600.0  # another container may share /tmp and not our process ids; its engine has long connected by then


def make_socket_directory() -> Path:
    """Named after this process, mode 0700: the socket is ours alone. Raises KakeraError if there is no place."""
    try:
        made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    except OSError as error:
        raise KakeraError(f"no place for the engine's socket: {error}; free some space or set TMPDIR") from None
    clear_left_ones(made.parent, now=made.stat().st_mtime)
    return made


def clear_left_ones(place: Path, now: float) -> None:
    """Remove directories of ours whose process is gone. `now`: as the file system counts."""
    for path in place.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            found = path.lstat()
            ours = found.st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
            old = now - found.st_mtime > OLD_SECONDS
            if ours and old and pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)
