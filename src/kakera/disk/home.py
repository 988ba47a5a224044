"""Where the disk cache lies, who may read it, and what lies there: a directory for each key of a model.

HOME/<digest of the key>/ holds LOCK, MANIFEST.json (the key in words) and segments. The files hold prompts: nobody but
their owner may read them, and a home that others may read or write is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kakera.errors import UsageError

MANIFEST, LOCK, SUFFIX = "MANIFEST.json", "LOCK", ".seg"


def default_home() -> Path:
    """kakera/prefix in the user's cache directory (XDG_CACHE_HOME, else ~/.cache). Never a temporary directory, which
    others can read."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return base / "kakera" / "prefix"


def check_home(home: Path) -> None:
    """Make it if need be. Raises UsageError if it is not a private directory of this user's."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = home.lstat()
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"the disk cache can not be at {home}: {reason}") from None
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"the disk cache can not be at {home}: it is a link; set XDG_CACHE_HOME to have it elsewhere")
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the disk cache can not be at {home}: it is not a directory")
    if found.st_uid != os.getuid():
        raise UsageError(f"the disk cache can not be at {home}: it belongs to another user (id {found.st_uid})")
    if found.st_mode & 0o077:
        raise UsageError(f"{home} holds prompts and can be read by others: chmod 700 {home}")


def digest_of(key: Mapping[str, str]) -> str:
    """Name of the directory for a key: everything that changes a bit of a record, in words."""
    text = json.dumps(dict(sorted(key.items())), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kakera disk").hexdigest()


@dataclass(frozen=True)
class DiskCache:
    """What an engine is told of its disk cache. `limit`: bytes of the whole home; `daily`: most bytes written a day."""

    home: Path
    limit: int
    daily: int = 100 * 10**9


@dataclass(frozen=True)
class Directory:
    """What lies in the home under one key. `bytes` as `du` counts them."""

    path: Path
    key: Mapping[str, str]
    bytes: int
    used_at: float  # seconds since the epoch


def directories(home: Path) -> list[Directory]:
    """The least recently used first. What is not a cache's is not listed; a manifest that can not be read is empty."""
    found = []
    for path in sorted(home.iterdir()) if home.is_dir() else []:
        if path.is_symlink() or not path.is_dir() or len(path.name) != 32:
            continue
        inside = [_stat(file) for file in _below(path)]
        used_at = max((at for _, at in inside), default=_stat(path)[1])
        found.append(Directory(path, _manifest(path), sum(size for size, _ in inside), used_at))
    return sorted(found, key=lambda each: each.used_at)


def bytes_in(path: Path) -> int:
    """Of all files below, as they take them of the disk."""
    return sum(_stat(file)[0] for file in _below(path))


def _below(path: Path) -> Iterator[Path]:
    """All that lies there. What goes meanwhile, or can not be read, is left out; links are not followed."""
    for at, directories, files in os.walk(path):
        yield from (Path(at, name) for name in (*directories, *files))


def remove(path: Path) -> bool:
    """A directory of the home with all files. False if it is there still: a process writes in it, or will not have it.
    Nobody begins to write there meanwhile."""
    with _locked(path) as free:
        if free:
            shutil.rmtree(path, ignore_errors=True)
    return free and not path.exists()


def write_manifest(path: Path, key: Mapping[str, str]) -> None:
    """Raises OSError."""
    fresh = path / f"{MANIFEST}.new"
    fresh.write_text(json.dumps(dict(sorted(key.items())), indent=1, ensure_ascii=False) + "\n")
    fresh.chmod(0o600)
    fresh.replace(path / MANIFEST)


def _manifest(path: Path) -> Mapping[str, str]:
    try:
        read = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in read.items()} if isinstance(read, dict) else {}


def _stat(file: Path) -> tuple[int, float]:
    """Bytes on the disk and time of the last change; of a file that has just gone nothing."""
    try:
        found = file.lstat()
    except OSError:
        return 0, 0.0
    return found.st_blocks * 512, found.st_mtime


def in_use(path: Path) -> bool:
    """Whether another process writes there."""
    with _locked(path) as free:
        return not free


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields whether nobody writes there, and keeps others from it inside. What has no lock is nobody's."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(file)
