"""What servers that were killed left in /tmp goes when the next one starts; nothing else does."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kakera.run.process.socket_place import OLD_SECONDS, make_socket_directory


def left(name: str, age: float) -> Path:
    path = Path(tempfile.gettempdir()) / name
    path.mkdir()
    (path / "engine").touch()
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


def test_only_old_directories_of_processes_that_are_gone_are_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone, old = child.pid, OLD_SECONDS + 60
    cleared = left(f"kakera-{gone}-ab12", old)
    kept = [
        left(f"kakera-{gone}-young", 0),
        left(f"kakera-{os.getpid()}-mine", old),
        left("kakera-notes-2025", old),
        left(f"kakera-{gone}", old),
        left(f"other-{gone}-x", old),
    ]
    (tmp_path / f"kakera-{gone}-link").symlink_to(kept[2])
    made = make_socket_directory()
    assert not cleared.exists() and all((path / "engine").exists() for path in kept)
    assert made.is_dir() and made.stat().st_mode & 0o777 == 0o700 and str(os.getpid()) in made.name
