"""Files of a repository into the hub's cache, where every program that uses the cache finds them. No torch.

The hub's library does this too, but keeps nothing of a file whose download was interrupted (since 2.0), and the files
of a 27B are 5 GB each: half an hour of a 20 Mbit/s line. So large files come through its `http_get` into a part of
their own, which the next run continues; the library then finds the whole file and links it into the snapshot.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kakera.errors import CheckpointError
from kakera.hub.disk import PART, folder_of, room
from kakera.hub.remote import File, Remote, failed
from kakera.plan.table import gigabytes

LARGE = 16 << 20  # bytes; a smaller file is quickly had again
LARGEST = 45 * 10**9  # the hub gives more over its own protocol only
SPARE = 10**9  # of a disk that stays free: full disks break other programs
_SHA256 = re.compile(r"[0-9a-f]{64}")
Advance = Callable[[int], object]


def snapshot_of(remote: Remote) -> Path:
    """Its directory in the cache, whatever is in it."""
    return folder_of(remote.repository) / "snapshots" / remote.commit


def absent(remote: Remote, names: Iterable[str]) -> dict[str, int]:
    """Files that the cache lacks, and the bytes of each that have still to come."""
    snapshot = snapshot_of(remote)
    return {
        name: remote.files[name].bytes - _begun(remote, remote.files[name])
        for name in names
        if not (snapshot / name).exists()
    }


def check_room(remote: Remote, coming: Mapping[str, int]) -> None:
    """Raises CheckpointError if the disk can not hold what has still to come."""
    place, free = room()
    if coming and (need := sum(coming.values()) + SPARE) > free:
        raise CheckpointError(
            f"{remote.repository}: {gigabytes(sum(coming.values()))} have still to come, and {place} has "
            f"{gigabytes(free)} free, {gigabytes(SPARE)} of which kakera leaves: free {gigabytes(need - free)}, or set "
            "HF_HOME to a directory on another disk"
        )


def fetch(remote: Remote, names: Iterable[str], advance: Advance) -> Path:
    """The snapshot's directory with these files in it. `advance` gets bytes as they come. Raises CheckpointError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        for name, coming in absent(remote, names).items():
            file = remote.files[name]
            if LARGE <= file.bytes <= LARGEST and file.digest:
                _fetch_large(remote, name, file, file.digest, advance)
                coming = 0
            hf_hub_download(remote.repository.id, name, revision=remote.commit)
            advance(coming)
        # by its name, which is then known without the network, too
        hf_hub_download(remote.repository.id, "config.json", revision=remote.repository.revision)
    except Exception as error:
        raise failed(remote.repository, error) from None
    finally:
        if shown:
            enable_progress_bars()
    return snapshot_of(remote)


def _blob(remote: Remote, digest: str) -> Path:
    return folder_of(remote.repository) / "blobs" / digest


def _begun(remote: Remote, file: File) -> int:
    """Bytes that are there of a file that is not there."""
    if not file.digest:
        return 0
    blob = _blob(remote, file.digest)
    for path in (blob, blob.with_name(blob.name + PART)):
        if path.exists():
            return min(path.stat().st_size, file.bytes)
    return 0


def _fetch_large(remote: Remote, name: str, file: File, digest: str, advance: Advance) -> None:
    """Its blob, begun or continued, and compared with its SHA-256. Raises CheckpointError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob = _blob(remote, digest)
    if blob.exists():
        return
    with _alone(blob.with_name(blob.name + PART), f"{remote.repository}: {name}") as part:
        if blob.exists():  # another process has just ended it, and `part` is that file
            return
        if part.tell() > file.bytes:
            part.truncate(0)
            part.seek(0)
        begun = part.tell()
        url = hf_hub_url(remote.repository.id, name, revision=remote.commit)
        told = _Told(part, advance, file.bytes)
        http_get(url, told, resume_size=begun, headers=build_hf_headers(), expected_size=file.bytes)  # type: ignore[arg-type]
        part.flush()
        path = Path(part.name)
        if _SHA256.fullmatch(digest) and sha256_of(path) != digest:
            path.unlink()
            raise CheckpointError(f"{remote.repository}: {name} came damaged and was deleted; run it again")
        path.replace(blob)


@contextmanager
def _alone(path: Path, what: str) -> Iterator[BinaryIO]:
    """The file, open at its end, and no other process in it. Raises CheckpointError if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{what} is being downloaded by another process: wait for it") from None
        except OSError:
            pass  # a file system without locks
        yield file


class _Told:
    """A file that tells how many bytes are written into it, and takes no more than `most`: an answer may never end."""

    def __init__(self, file: BinaryIO, advance: Advance, most: int):
        self._file, self._advance, self._most = file, advance, most

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._most:
            raise OSError(f"more came than the {self._most} bytes that the hub's list says")
        count = self._file.write(data)
        self._advance(count)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def sha256_of(path: Path) -> str:
    """In hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
